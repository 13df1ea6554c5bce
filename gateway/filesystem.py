"""`sandgate://` for fsspec: the stored results of a gateway's sessions, read-only, and their workspaces.

    sandgate://<session>/results/<key>        as a result gave it
    sandgate://<session>/workspace/<path>     the file /workspace/<path> of the session's sandbox, while that is open

pandas, `fsspec.open`, `simplecache::` and whatever else speaks fsspec open these as they stand. Where the gateway is,
and who asks, comes from arguments (`url`, `token`) or, better, from SANDGATE_URL and SANDGATE_TOKEN.
"""

import asyncio
import errno
import os
import tempfile
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from fsspec.asyn import AsyncFileSystem, sync, sync_teardown
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile, make_instance

from gateway.client import Client, Endpoint, FileInfo, Gone, Session, endpoint
from gateway.filesystem_paths import (
    AREAS,
    Info,
    Place,
    as_oserror,
    children,
    entry_info,
    file_place,
    folder_info,
    place_of,
    read_only,
    result_info,
    writable_place,
)

CLOSE_SECONDS: Final = 1.0
_MODES: Final = ("rb", "wb", "xb")


class SandgateFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A path that no gateway would have is FileNotFoundError, and nothing is asked of anybody.

    Absent and foreign things are FileNotFoundError, as is an expired result, which says so; a refused token is
    PermissionError, and so is every attempt to write a result. What is known of a result is kept: results do not
    change; of a workspace nothing is. A file of a workspace appears whole or not at all; folders are made by what is
    written into them. A pickle and `to_json` leave the token out; what reads them takes it from its own environment.
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
        place = place_of(path)
        if not place.below:
            await self._listed(place, path)
            return folder_info(path)
        if place.in_workspace:
            found = await self._file_info(place, path)
            if found.is_folder:
                return folder_info(path)
            return {"name": path, "size": found.bytes, "type": "file", "mtime": found.modified}
        await self._connected()  # forgets what another token knew
        if path not in self._known:
            await self._look(place, path)
        return self._known[path]

    async def _file_info(self, place: Place, path: str) -> FileInfo:
        with as_oserror(path):
            return await (await self._session(place.session)).file_info(place.below)

    async def _look(self, place: Place, path: str) -> None:
        """Ask for one result, and where there is none, whether it is a folder of some."""
        session = await self._session(place.session)
        try:
            with as_oserror(path):
                found = await session.result_info(place.below)
        except FileNotFoundError as error:
            if isinstance(error.__cause__, Gone) or not await self._listed(place, path):
                raise
            self._known[path] = folder_info(path)
            return
        self._created[path] = found.created
        self._known[path] = result_info(path, found.bytes, found.media_type, found.sha256)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Info] | list[str]:
        path = self._strip_protocol(path)
        place = place_of(path)
        entries = await self._listed(place, path)
        if not entries and place.below:
            info = await self._info(path)
            entries = [] if info["type"] == "directory" else [info]
        return entries if detail else [entry["name"] for entry in entries]

    async def _listed(self, place: Place, path: str) -> list[Info]:
        """What is in a folder; of a file or of nothing, an empty list. Raises for a session that is not there."""
        with as_oserror(path):
            if not place.session:
                return [folder_info(one.id) for one in await (await self._connected()).sessions()]
            session = await self._session(place.session)
            match place.area:
                case "results":
                    return await self._results(session, path)
                case "workspace":
                    return await self._files(session, place)
            await session.record()
            return [folder_info(f"{path}/{area}") for area in AREAS]

    async def _results(self, session: Session, path: str) -> list[Info]:
        results = await session.results()
        for one in results:
            name = self._strip_protocol(one.reference)
            self._known[name] = result_info(name, one.bytes, one.media_type, one.sha256)
        return children(path, (self._known[self._strip_protocol(one.reference)] for one in results))

    async def _files(self, session: Session, place: Place) -> list[Info]:
        if place.below and not (await session.file_info(place.below)).is_folder:
            return []
        listed = await session.files(place.below or ".")
        if not listed.complete:
            raise OSError(errno.EFBIG, "the folder has more entries than can be listed", place.below)
        return [entry_info(f"{place.session}/workspace", entry) for entry in listed.entries]

    async def _modified(self, path: str) -> datetime:
        """When a result was stored, or a file written; a folder has no time."""
        path = self._strip_protocol(path)
        place = file_place(path)
        when = (await self._file_info(place, path)).modified if place.in_workspace else await self._stored(place, path)
        if when is None:
            raise NotImplementedError("this gateway does not tell the time of it")
        return datetime.fromtimestamp(when, UTC)

    async def _stored(self, place: Place, path: str) -> float | None:
        await self._connected()
        if self._created.get(path) is None:
            with as_oserror(path):
                self._created[path] = (await (await self._session(place.session)).result_info(place.below)).created
        return self._created[path]

    def modified(self, path: str) -> datetime:
        """The same, for those who wait."""
        when: datetime = sync(self.loop, self._modified, path)
        return when

    created = modified

    # reading

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        place = file_place(path)
        if (start or 0) < 0 or (end or 0) < 0:  # counted from the end, as in a slice
            start, end, _step = slice(start, end).indices((await self._info(path))["size"])
        with as_oserror(path):
            session = await self._session(place.session)
            read = session.read_file if place.in_workspace else session.read_result
            return await read(place.below, start or 0, end)

    async def _get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_: Any) -> None:
        """A file appears whole or not at all; the callback is told how far it is."""
        rpath = self._strip_protocol(rpath)
        info = await self._info(rpath)
        target = Path(lpath)
        if info["type"] == "directory":
            await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
            return
        place = file_place(rpath)
        callback.set_size(info["size"])
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        with as_oserror(rpath):
            session = await self._session(place.session)
            if place.in_workspace:
                await session.download(place.below, target)
                callback.absolute_update(info["size"])
            else:
                await session.save_result(place.below, target, progress=callback.absolute_update)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        size: int | None = None,
        **options: Any,
    ) -> AbstractBufferedFile:
        options |= {"cache_options": cache_options, **options}
        if mode != "rb":
            writable_place(self._strip_protocol(path))
            if mode not in _MODES:
                raise NotImplementedError(f"mode {mode!r}: files of a workspace are written whole")
            if mode == "xb" and self.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return WorkspaceFile(self, path, "wb", block_size or "default", autocommit, **options)
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return StoredFile(self, path, mode, block_size or "default", autocommit, size=info["size"], **options)

    # writing

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        place = writable_place(path)
        if mode == "create" and await self._exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with as_oserror(path):
            await (await self._session(place.session)).write_file(place.below, bytes(value))

    async def _put_file(
        self, lpath: str, rpath: str, mode: str = "overwrite", callback: Any = DEFAULT_CALLBACK, **_: Any
    ) -> None:
        rpath, local = self._strip_protocol(rpath), Path(lpath)
        place = writable_place(rpath)
        if await asyncio.to_thread(local.is_dir):  # its files follow, and make it
            return
        if mode == "create" and await self._exists(rpath):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), rpath)
        size = (await asyncio.to_thread(local.stat)).st_size
        callback.set_size(size)
        with as_oserror(rpath):
            await (await self._session(place.session)).upload(local, place.below)
        callback.absolute_update(size)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy through this machine, file by file."""
        writable_place(self._strip_protocol(path2))
        with tempfile.TemporaryDirectory(prefix="sandgate-") as folder:
            part = f"{folder}/part"
            await self._get_file(path1, part)
            await self._put_file(part, path2)

    async def _mv_file(self, path1: str, path2: str) -> None:
        writable_place(self._strip_protocol(path1))
        await self._cp_file(path1, path2)
        await self._rm_file(path1)

    async def _rm_file(self, path: str, *, recursive: bool = False, **_: Any) -> None:
        path = self._strip_protocol(path)
        place = writable_place(path)
        with as_oserror(path):
            await (await self._session(place.session)).delete(place.below, recursive=recursive)

    async def _rm(self, path: str | list[str], recursive: bool = False, **_: Any) -> None:
        """A folder goes with all in it by one request: what fsspec sends at once, it sends in no order."""
        for one in await self._expand_path(path):
            await self._rm_file(one, recursive=recursive)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        await self._makedirs(path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to do: folders are made by what is written into them."""
        if not place_of(self._strip_protocol(path)).in_workspace:
            read_only(path)

    def rmdir(self, path: str) -> None:
        sync(self.loop, self._rm_file, path)


class StoredFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An open result or file: blocks are fetched by range when they are read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start=start, end=end)
        return data


class WorkspaceFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file of a workspace being written: kept in a temporary file, and sent when it is closed."""

    _spool: IO[bytes]

    def _initiate_upload(self) -> None:
        self._spool = tempfile.NamedTemporaryFile(prefix="sandgate-")  # noqa: SIM115 - closed below

    def _upload_chunk(self, final: bool = False) -> bool:
        self._spool.write(self.buffer.getvalue())
        if final:
            with self._spool:
                self._spool.flush()
                self.fs.put_file(self._spool.name, self.path)
        return True

    def discard(self) -> None:
        """Send nothing."""
        self._spool.close()


def _without_token(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "token"}


def _close(loop: asyncio.AbstractEventLoop, client: Client) -> None:
    """Close a client whose file system is gone, in the loop that it belongs to, while that still runs."""
    with suppress(RuntimeError, TimeoutError):
        sync_teardown(loop, client.aclose, timeout=CLOSE_SECONDS)
