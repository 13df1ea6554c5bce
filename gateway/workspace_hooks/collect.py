"""CollectWorkspace: what is taken out of a workspace before it is destroyed."""

import base64
import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

import anyio
import anyio.to_thread

from gateway.matching import glob_matches
from gateway.models import CollectReport
from gateway.text import printable
from sandboxes import (
    SMALL_BYTES,
    Entry,
    FileRefused,
    Listing,
    Sandbox,
    SandboxContext,
    SandboxError,
    SandboxHook,
    batches,
)
from stores import StoredObject, StoreError, file_key

MAX_FILES: Final = 10_000
MAX_SKIPPED: Final = 1000
AT_ONCE: Final = 8
COLLECT_SECONDS: Final = 45.0
"""What is not taken by then is left out and named; a session's end has a longer limit, which leaves no manifest."""
MANIFEST_KEY: Final = "manifest.json"


Content = bytes | FileRefused | AsyncIterator[bytes]


class Target(Protocol):
    """Where collected files go; `name` is what people call it."""

    @property
    def name(self) -> str: ...

    async def clear(self) -> None:
        """Remove what a collection that was cut off by the gateway's death has left there."""
        ...

    async def put(self, key: str, source: AsyncIterable[bytes] | bytes, media_type: str) -> StoredObject: ...

    def reference(self, key: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """One collected file: its real name, and the key it lies under. `path_base64` only where the name is not UTF-8."""

    path: str
    path_base64: str | None
    key: str
    bytes: int
    sha256: str
    mode: str


@dataclass(slots=True)
class Manifest:
    """What was collected and what was left out; `complete` is False when anything that matched is missing."""

    session: str
    match: tuple[str, ...]
    created: float
    complete: bool = True
    files: list[Collected] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def skip(self, path: str, reason: str) -> None:
        self.complete = False
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append({"path": printable(path), "reason": reason})


class CollectWorkspace(SandboxHook):
    """Takes every regular file that matches one of the globs, never through a link, up to caps on count, size and sum.
    Sparse files count with their whole length, so they are skipped by size. One object serves one session."""

    def __init__(self, match: Iterable[str], target: Target, *, max_bytes: int) -> None:
        self._match = tuple(pattern.removeprefix("./") for pattern in match)
        self._target = target
        self._max_bytes = max_bytes
        self.report: CollectReport | None = None

    async def on_destroy(self, ctx: SandboxContext) -> None:
        manifest = Manifest(ctx.session_id, self._match, time.time())
        error: str | None = None
        try:
            if not ctx.restored:
                manifest.skip("*", "the workspace was lost before it could be collected")
            await self._target.clear()
            with anyio.move_on_after(COLLECT_SECONDS) as limit:
                await self._take_all(ctx.sandbox, manifest)
            if limit.cancelled_caught:
                manifest.skip("*", f"collecting took over {COLLECT_SECONDS:g} s; the rest was left out")
            content = await anyio.to_thread.run_sync(_json, manifest)  # of 10,000 files, most of a second
            await self._target.put(MANIFEST_KEY, content, "application/json")
        except BaseException as broken:
            manifest.complete, error = False, f"{type(broken).__name__}: {broken}"
            raise
        finally:
            self.report = CollectReport(
                to=self._target.name,
                files=len(manifest.files),
                bytes=sum(one.bytes for one in manifest.files),
                complete=manifest.complete,
                error=error,
                manifest=None if error else self._target.reference(MANIFEST_KEY),
                skipped=tuple(f"{one['path']}: {one['reason']}" for one in manifest.skipped),
            )

    def _wanted(self, path: str) -> bool:
        return any(glob_matches(path, pattern) for pattern in self._match)

    async def _take_all(self, sandbox: Sandbox, manifest: Manifest) -> None:
        listing = await sandbox.list(recursive=True)
        if not listing.complete:
            manifest.skip("*", "the workspace has too many entries, or is too deep, to list whole")
        chosen = self._chosen(listing, manifest)
        send, receive = anyio.create_memory_object_stream[tuple[Entry, Content]](AT_ONCE)
        failures: list[SandboxError] = []

        async def give() -> None:
            async with send, aclosing(_contents(sandbox, chosen)) as contents:
                try:
                    async for one in contents:
                        await send.send(one)
                except SandboxError as error:
                    failures.append(error)

        async def take() -> None:
            async for entry, content in receive:
                try:
                    await self._take(entry, content, manifest)
                except SandboxError as error:
                    failures.append(error)

        with receive:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give)
                for _ in range(AT_ONCE):
                    tasks.start_soon(take)
        if failures:
            raise failures[0]

    def _chosen(self, listing: Listing, manifest: Manifest) -> list[Entry]:
        """The files that are taken; what matches and is left out is noted in the manifest."""
        chosen: list[Entry] = []
        left = self._max_bytes
        for entry in listing.entries:
            if entry.kind == "directory" or not self._wanted(entry.path):
                continue
            if entry.kind != "file":
                manifest.skip(entry.path, f"not a regular file: {entry.kind}")
            elif len(chosen) >= MAX_FILES:
                manifest.skip(entry.path, f"over {MAX_FILES:,} files")
            elif entry.size > left:
                manifest.skip(entry.path, f"too large: {entry.size:,} bytes, {left:,} left")
            else:
                chosen.append(entry)
                left -= entry.size
        return chosen

    async def _take(self, entry: Entry, content: Content, manifest: Manifest) -> None:
        key = f"files/{file_key(entry.path)}"
        try:
            stored = await self._target.put(key, _not_grown(content, entry), "application/octet-stream")
        except FileRefused as error:
            manifest.skip(entry.path, error.message)
            return
        except StoreError as error:
            manifest.skip(entry.path, f"not stored: {error.message}")
            return
        exact = entry.path.encode(errors="surrogateescape")
        manifest.files.append(
            Collected(
                path=printable(entry.path),
                path_base64=_base64_unless_text(exact),
                key=key,
                bytes=stored.bytes,
                sha256=stored.sha256,
                mode=oct(entry.mode & 0o777),
            )
        )


async def _contents(sandbox: Sandbox, chosen: Sequence[Entry]) -> AsyncGenerator[tuple[Entry, Content], None]:
    """Each file with its content: small ones many at a time, a large one as a stream that is read when it is taken."""
    for batch in batches(chosen, lambda entry: entry.size):
        if batch[0].size > SMALL_BYTES:
            [entry] = batch
            yield entry, sandbox.read(entry.path, 0, entry.size + 1, follow=False)
            continue
        async with aclosing(_small(sandbox, batch)) as contents:
            async for one in contents:
                yield one


async def _small(sandbox: Sandbox, batch: Sequence[Entry]) -> AsyncGenerator[tuple[Entry, Content], None]:
    left = iter(batch)
    try:
        async with aclosing(sandbox.read_many([entry.path for entry in batch], SMALL_BYTES)) as contents:
            async for content in contents:
                yield next(left), content
    except FileRefused as refused:
        for entry in left:
            yield entry, refused


def _not_grown(content: Content, entry: Entry) -> bytes | AsyncIterator[bytes]:
    """The content, as long as it is no longer than what was listed; raises FileRefused."""
    match content:
        case FileRefused(code="content_too_large"):
            raise _grown()
        case FileRefused():
            raise content
        case bytes():
            if len(content) > entry.size:
                raise _grown()
            return content
    return _not_growing(content, entry)


async def _not_growing(chunks: AsyncIterator[bytes], entry: Entry) -> AsyncIterator[bytes]:
    sent = 0
    async for chunk in chunks:
        sent += len(chunk)
        if sent > entry.size:
            raise _grown()
        yield chunk


def _grown() -> FileRefused:
    return FileRefused("changed while it was read", code="file_changed")


def _base64_unless_text(name: bytes) -> str | None:
    try:
        exact = name.decode()
    except UnicodeDecodeError:
        return base64.b64encode(name).decode()
    return None if exact == printable(exact) else base64.b64encode(name).decode()


def _json(manifest: Manifest) -> bytes:
    manifest.files.sort(key=lambda file: file.path)
    return json.dumps(asdict(manifest), indent=1).encode()
