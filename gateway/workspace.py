"""What a session's workspace starts with and what is taken from it: from a profile and a request to SandboxHooks."""

import re
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.errors import SettingsError, Unprocessable
from gateway.journal import SessionRow
from gateway.models import SeedFile, SeedUri, SessionRequest
from gateway.results import SessionResults
from gateway.settings import Profile, Settings
from gateway.shelf import Shelf
from gateway.workspace_hooks.collect import CollectWorkspace
from gateway.workspace_hooks.seed import FromHost, FromUri, Inline, SeedSource, SeedWorkspace
from gateway.workspace_hooks.setup import SetupCommand
from sandboxes import SandboxHook
from stores import Source, Store, StoredObject, StoreError

_CALLERS_PLACE: Final = re.compile(r"([a-z][a-z0-9+.-]{0,20}://)?[A-Za-z0-9._~/ @=+,-]{1,1000}")
"""What a caller may name: nothing that some protocol decodes, expands or chains."""


@dataclass(frozen=True, slots=True)
class WorkspaceHooks:
    """`own` are the operator's SandboxHooks, by profile; `folder` is where relative paths start."""

    settings: Settings
    folder: Path
    own: Mapping[str, Sequence[SandboxHook]]
    shelf: Shelf

    def of(self, row: SessionRow, profile: Profile, request: SessionRequest, size: int) -> tuple[SandboxHook, ...]:
        """Seeds, the operator's own, the setup, then what collects: at the end it comes first. Raises Unprocessable."""
        sources = [seed_source(one.source, one.to, self.folder) for one in profile.seed]
        sources += self._callers_seed(profile, request)
        hooks: list[SandboxHook] = [SeedWorkspace(sources, max_bytes=size)] if sources else []
        hooks += self.own[request.profile]
        if profile.setup is not None:
            hooks.append(SetupCommand(profile.setup))
        targets: dict[str, list[str]] = {}
        for one in profile.collect:
            targets.setdefault(collect_uri(one.to, self.folder), []).append(one.match)
        hooks += [CollectWorkspace(globs, _folder_target(to, row.id), max_bytes=size) for to, globs in targets.items()]
        if request.collect:
            expires = row.expires + self.settings.store.retention_hours * 3600
            own = ResultsTarget(SessionResults(row.id, self.shelf), "collected", expires)
            hooks.append(CollectWorkspace(request.collect, own, max_bytes=size))
        return tuple(hooks)

    def _callers_seed(self, profile: Profile, request: SessionRequest) -> Iterable[SeedSource]:
        inline = Inline(tuple(one for one in request.seed if isinstance(one, SeedFile)))
        inline.check()
        if inline.files:
            yield inline
        for one in request.seed:
            if isinstance(one, SeedUri):
                yield self._allowed(profile, one)

    def _allowed(self, profile: Profile, asked: SeedUri) -> SeedSource:
        if _CALLERS_PLACE.fullmatch(asked.source) and ".." not in asked.source.split("/"):
            source = seed_source(asked.source, asked.to, self.folder)
            if any(_is_below(source, seed_source(place, ".", self.folder)) for place in profile.seed_from):
                return source
        raise Unprocessable(
            f"seed: {asked.source[:200]!r} may not come from a caller",
            "The operator allows places with seed_from; below them, give a plain path without .. and % signs.",
        )


def seed_source(source: str, to: str, folder: Path) -> SeedSource:
    """A place on this machine, or elsewhere."""
    path = _host_path(source, folder)
    return FromUri(source, to) if path is None else FromHost(path, to)


def _host_path(uri: str, folder: Path) -> Path | None:
    """Where it is on this machine, links resolved; None where it is elsewhere."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return (folder / (rest if separator else uri)).resolve()


def _is_below(source: SeedSource, place: SeedSource) -> bool:
    match source, place:
        case FromHost(path), FromHost(allowed):
            return path.is_relative_to(allowed)
        case FromUri(uri), FromUri(allowed):
            return uri == allowed or uri.startswith(f"{allowed.rstrip('/')}/")
    return False


def check_seed(name: str, profile: Profile, folder: Path) -> None:
    """Look whether what a profile seeds from can be there. Raises SettingsError."""
    for seed in profile.seed:
        path = _host_path(seed.source, folder)
        if path is not None and not path.exists():
            raise SettingsError(
                f"profiles.{name}.seed: no such file or folder: {path}", "Make it, or take the seed out."
            )
    for uri in (*(seed.source for seed in profile.seed), *profile.seed_from):
        if _host_path(uri, folder) is None:
            try:
                Source.at(uri)
            except StoreError as error:
                raise SettingsError(f"profiles.{name}: {uri}: {error.message}", error.remedy) from error


def is_remote(uri: str) -> bool:
    """Whether it names a place that is not on this machine."""
    return _host_path(uri, Path()) is None


def collect_uri(to: str, folder: Path) -> str:
    """One spelling for each place, since two collections into one would be in each other's way."""
    path = _host_path(to, folder)
    return to.rstrip("/") if path is None else f"file://{path}" if "://" in to else str(path)


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """Collects into `<to>/<session>/`, a folder or any writable fsspec URI."""

    name: str
    session_id: str
    store: Store

    async def clear(self) -> None:
        await self.store.delete_all()

    async def put(self, key: str, source: AsyncIterable[bytes] | bytes, media_type: str) -> StoredObject:
        return await self.store.put(key, source)

    def reference(self, key: str) -> str:
        return f"{self.name.rstrip('/')}/{self.session_id}/{key}"


def _folder_target(to: str, session_id: str) -> FolderTarget:
    return FolderTarget(to, session_id, Store.from_uri(to).scoped(session_id))


@dataclass(frozen=True, slots=True)
class ResultsTarget:
    """Collects into the session's own results, below a prefix."""

    results: SessionResults
    prefix: str
    expires: float

    @property
    def name(self) -> str:
        return f"sandgate://{self.results.session_id}/results/{self.prefix}"

    async def clear(self) -> None:
        await self.results.forget_below(self.prefix)

    async def put(self, key: str, source: AsyncIterable[bytes] | bytes, media_type: str) -> StoredObject:
        row = await self.results.put(f"{self.prefix}/{key}", source, media_type, self.expires)
        return StoredObject(row.key, row.bytes, row.sha256)

    def reference(self, key: str) -> str:
        return f"{self.name}/{key}"
