"""`sandgate://<session>/results/<key>` for fsspec: the stored results of a gateway, read-only.

pandas, `fsspec.open`, `simplecache::` and whatever else speaks fsspec open a reference as it stands in a result. Where
the gateway is, and who asks, comes from arguments (`url`, `token`) or from SANDGATE_URL and SANDGATE_TOKEN.
"""

import asyncio
import errno
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from fsspec.asyn import AsyncFileSystem, sync, sync_teardown
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile, make_instance

from gateway.client import (
    Client,
    ClientError,
    ConnectionLost,
    Endpoint,
    Forbidden,
    GatewayUnreachable,
    Gone,
    NotFound,
    Session,
    Unauthorized,
    endpoint,
)

RESULTS: Final = "results"
CLOSE_SECONDS: Final = 1.0

_SESSION: Final = re.compile(r"s-[0-9a-f]{32}")
_KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """What a path names: the root, a session, its results, or (where `key` is not empty) below these."""

    session: str = ""
    in_results: bool = False
    key: str = ""


class SandgateFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Read-only. A path that is no reference is FileNotFoundError, and nothing is asked of anybody.

    Absent and foreign results are FileNotFoundError, as is an expired one, which says so; a refused token is
    PermissionError, and so is every attempt to write. What is known of a result is kept: results do not change.
    A pickle and `to_json` leave the token out; what reads them takes it from its own environment.
    """

    protocol: ClassVar[str] = "sandgate"
    root_marker: ClassVar[str] = ""
    cachable: ClassVar[bool] = True

    def __init__(self, *, url: str | None = None, token: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._url = url
        self._token = token
        self._client: Client | None = None
        self._where: Endpoint | None = None
        self._closing: Any = None
        self._known: dict[str, Info] = {}
        self._created: dict[str, float | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return make_instance, (type(self), self.storage_args, _without_token(self.storage_options))

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        return _without_token(super().to_dict(include_password=include_password))

    async def aclose(self) -> None:
        """Close the connections; the next use opens new ones. Without `asynchronous` this happens by itself."""
        await self._replace(None, None)

    async def _session(self, session_id: str) -> Session:
        return Session(await self._connected(), session_id)

    async def _connected(self) -> Client:
        """The client; another one where the environment has changed, for instances live as long as the process."""
        where = endpoint(self._url, self._token)
        client = self._client
        if client is None or where != self._where:
            client = Client(where.url, where.token)
            await self._replace(client, where)
        return client

    async def _replace(self, client: Client | None, where: Endpoint | None) -> None:
        """Forget everything, then close the old client; nobody else's turn comes in between."""
        old, self._client, self._where = self._client, client, where
        self._known.clear()
        self._created.clear()
        if self._closing is not None:
            self._closing.detach()
        if client is not None and not self.asynchronous:
            self._closing = weakref.finalize(self, _close, self.loop, client)
        if old is not None:
            await old.aclose()

    # looking

    async def _info(self, path: str, **_: Any) -> Info:
        path = self._strip_protocol(path)
        place = _place(path)
        if not place.key:
            await self._listed(place, path)
            return _folder(path)
        await self._connected()  # forgets what another token knew
        if path not in self._known:
            await self._look(place, path)
        return self._known[path]

    async def _look(self, place: _Place, path: str) -> None:
        """Ask for one result, and where there is none, whether it is a folder of some."""
        session = await self._session(place.session)
        try:
            with _as_oserror(path):
                found = await session.result_info(place.key)
        except FileNotFoundError as error:
            if isinstance(error.__cause__, Gone) or not await self._listed(place, path):
                raise
            self._known[path] = _folder(path)
            return
        self._created[path] = found.created
        self._known[path] = _file(path, found.bytes, found.media_type, found.sha256)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Info] | list[str]:
        path = self._strip_protocol(path)
        place = _place(path)
        entries = await self._listed(place, path)
        if not entries and place.key:
            entries = [await self._info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    async def _listed(self, place: _Place, path: str) -> list[Info]:
        """What is in a folder; of a result or of nothing, an empty list. Raises for a session that is not there."""
        with _as_oserror(path):
            if not place.session:
                return [_folder(one.id) for one in await (await self._connected()).sessions()]
            session = await self._session(place.session)
            if not place.in_results:
                await session.record()
                return [_folder(f"{path}/{RESULTS}")]
            results = await session.results()
        for one in results:
            name = self._strip_protocol(one.reference)
            self._known[name] = _file(name, one.bytes, one.media_type, one.sha256)
        return _children(path, (self._known[self._strip_protocol(one.reference)] for one in results))

    async def _modified(self, path: str) -> datetime:
        """When the result was stored; a folder has no time."""
        path = self._strip_protocol(path)
        place = _file_place(path)
        await self._connected()
        if self._created.get(path) is None:
            with _as_oserror(path):
                self._created[path] = (await (await self._session(place.session)).result_info(place.key)).created
        created = self._created[path]
        if created is None:
            raise NotImplementedError("this gateway does not tell when a result was stored")
        return datetime.fromtimestamp(created, UTC)

    def modified(self, path: str) -> datetime:
        """The same, for those who wait."""
        when: datetime = sync(self.loop, self._modified, path)
        return when

    created = modified

    # reading

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        place = _file_place(path)
        if (start or 0) < 0 or (end or 0) < 0:  # counted from the end, as in a slice
            start, end, _step = slice(start, end).indices((await self._info(path))["size"])
        with _as_oserror(path):
            return await (await self._session(place.session)).read_result(place.key, start or 0, end)

    async def _get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_: Any) -> None:
        """A file appears whole or not at all; the callback is told when it is there."""
        rpath = self._strip_protocol(rpath)
        info = await self._info(rpath)
        target = Path(lpath)
        if info["type"] == "directory":
            await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
            return
        place = _file_place(rpath)
        callback.set_size(info["size"])
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        with _as_oserror(rpath):
            await (await self._session(place.session)).save_result(place.key, target)
        callback.relative_update(info["size"])

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        size: int | None = None,
        **options: Any,
    ) -> "ResultFile":
        if mode != "rb":
            _read_only(path)
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return ResultFile(
            self,
            path,
            mode,
            block_size or "default",
            autocommit,
            cache_options=cache_options,
            size=info["size"],
            **options,
        )

    # writing

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        _read_only(path)

    async def _put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **_: Any) -> None:
        _read_only(rpath)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        _read_only(path2)

    async def _mv_file(self, path1: str, path2: str) -> None:
        _read_only(path1)

    async def _rm_file(self, path: str, **_: Any) -> None:
        _read_only(path)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        _read_only(path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        _read_only(path)

    def rmdir(self, path: str) -> None:
        _read_only(path)


class ResultFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An open result: blocks are fetched by range when they are read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start=start, end=end)
        return data


def _place(path: str) -> _Place:
    """Where a stripped path leads; FileNotFoundError for what no gateway would have, so that nothing is sent."""
    if not path:
        return _Place()
    session, _, below = path.partition("/")
    results, slash, key = below.partition("/")
    if not _SESSION.fullmatch(session) or results not in ("", RESULTS) or (slash and not _KEY.fullmatch(key)):
        raise FileNotFoundError(errno.ENOENT, "not of the form sandgate://<session>/results/<key>", path)
    return _Place(session, bool(results), key)


def _file_place(path: str) -> _Place:
    place = _place(path)
    if not place.key:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return place


def _folder(name: str) -> Info:
    return {"name": name, "size": 0, "type": "directory"}


def _file(name: str, size: int, media_type: str, sha256: str) -> Info:
    return {"name": name, "size": size, "type": "file", "media_type": media_type, "sha256": sha256}


def _children(path: str, files: Iterable[Info]) -> list[Info]:
    """What stands directly below `path`: files, and the folders that the names of others imply."""
    found: dict[str, Info] = {}
    for file in files:
        if file["name"].startswith(f"{path}/"):
            name, _, deeper = file["name"][len(path) + 1 :].partition("/")
            found.setdefault(name, _folder(f"{path}/{name}") if deeper else file)
    return [found[name] for name in sorted(found)]


@contextmanager
def _as_oserror(path: str) -> Iterator[None]:
    """The client's errors as those of a file system."""
    try:
        yield
    except Gone as error:
        raise FileNotFoundError(errno.ENOENT, f"expired: {error}", path) from error
    except NotFound as error:
        raise FileNotFoundError(errno.ENOENT, error.message, path) from error
    except (Unauthorized, Forbidden) as error:
        raise PermissionError(errno.EACCES, str(error), path) from error
    except (GatewayUnreachable, ConnectionLost) as error:
        raise ConnectionError(str(error)) from error
    except ClientError as error:
        raise OSError(errno.EIO, str(error), path) from error


def _read_only(path: str) -> NoReturn:
    raise PermissionError(errno.EROFS, "stored results do not change", path)


def _without_token(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "token"}


def _close(loop: asyncio.AbstractEventLoop, client: Client) -> None:
    """Close a client whose file system is gone, in the loop that it belongs to, while that still runs."""
    with suppress(RuntimeError, TimeoutError):
        sync_teardown(loop, client.aclose, timeout=CLOSE_SECONDS)
