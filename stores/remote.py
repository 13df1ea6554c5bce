"""A store on any other fsspec file system: memory, S3 and its like, SFTP and its like.

Asynchronous file systems are used through their blocking side, in our worker threads like all others.
"""

import errno
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from stores.backend import Backend, Draft, Reader, StoredKey
from stores.errors import StoreUnavailable

SINGLE_PUT_BYTES: Final = 8 << 20
FETCH_BYTES: Final = 4 << 20
REQUEST_SECONDS: Final = 30.0
SLOWEST_BYTES_A_SECOND: Final = 256 * 1024
"""A request to an asynchronous file system may take `REQUEST_SECONDS`, and longer by this for the bytes it sends."""

_OBJECT_STORES: Final = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "obs", "tos"}
)
_S3: Final = ("s3", "s3a")
_PARTS: Final[Mapping[str, object]] = {"chunksize": SINGLE_PUT_BYTES}
"""s3fs reads `max_concurrency` parts of 50 MiB into memory at a time, if it is not told otherwise."""
_PARTIAL: Final = ".partial"
_DELETE_ROUNDS: Final = 3
_ANSWERS: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that are a far side's answer; any other may be a connection that is no more."""


class FsspecBackend(Backend):
    """Objects below a root of an fsspec file system, which is connected at the first use.

    An object is sent when it is complete, so an aborted put has sent nothing; up to `single_put_bytes` wait in
    memory, more in a temporary file. Where the place is no object store, it is sent under another name first, and
    then moved. File systems that are not asynchronous are asked one thing at a time (a connection of paramiko or
    ftplib is not made for threads), and connected anew after a failure.
    """

    single_put_bytes: int | None = SINGLE_PUT_BYTES

    def __init__(self, connect: Callable[[], AbstractFileSystem], root: str, kind: str, uri: str) -> None:
        self.kind = kind
        self._connect = connect
        self._connected: AbstractFileSystem | None = None
        self._root = root.rstrip("/")
        self._uri = uri.rstrip("/")
        self._turn = threading.RLock()

    def draft(self, max_bytes: int | None) -> Draft:
        return _SpooledDraft(self, max_bytes)

    def adopt(self, name: str, path: Path) -> bool:
        self.create(name, path)
        return True

    def create(self, name: str, data: bytes | Path) -> None:
        """Send one whole object to a name that must be new."""
        path = self._path(name)
        if self.kind not in _OBJECT_STORES:
            self._create_by_moving(path, data)
            return
        try:
            self._send(path, data, mode="create", **(_PARTS if self.kind in _S3 else {}))
        except OSError as error:
            # SeaweedFS refuses the second write well, and s3fs makes a plain EINVAL of it
            if error.errno == errno.EINVAL and self.ask("exists", path):
                raise FileExistsError(path) from error
            raise

    def _create_by_moving(self, path: str, data: bytes | Path) -> None:
        partial = f"{self._root}/{_PARTIAL}/{secrets.token_hex(16)}"
        self.ask("makedirs", _folder(partial), exist_ok=True)
        try:
            self._send(partial, data)
            self.ask("makedirs", _folder(path), exist_ok=True)
            with self._turn:  # between looking and moving, nobody else of this process
                if self.ask("exists", path):
                    raise FileExistsError(path)
                self.ask("mv", partial, path)
        except BaseException:
            with suppress(Exception):  # whatever it is, the first error is the one to tell
                self.ask("rm_file", partial)
            raise

    def _send(self, path: str, data: bytes | Path, **options: object) -> None:
        if isinstance(data, Path):
            self.ask("put_file", str(data), path, sent_bytes=data.stat().st_size, **options)
        else:
            options.pop("chunksize", None)  # it is smaller than one part
            self.ask("pipe_file", path, data, sent_bytes=len(data), **options)

    def ask(self, method: str, *arguments: object, sent_bytes: int = 0, **options: object) -> Any:
        """Call one method of the file system, in its turn or with a limit of time."""
        filesystem = self._filesystem()
        if filesystem.async_impl:
            seconds = REQUEST_SECONDS + sent_bytes / SLOWEST_BYTES_A_SECOND
            return getattr(filesystem, method)(*arguments, timeout=seconds, **options)
        with self._turn:
            try:
                return getattr(filesystem, method)(*arguments, **options)
            except _ANSWERS:
                raise
            except Exception:
                self._forget(filesystem)
                raise

    def _filesystem(self) -> AbstractFileSystem:
        with self._turn:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def _forget(self, filesystem: AbstractFileSystem) -> None:
        if self._connected is filesystem:
            self._connected = None

    def open(self, name: str) -> Reader:
        return _FsspecReader(self, self._path(name))

    def list(self, prefix: str) -> Iterator[StoredKey]:
        for path, info in self._find(prefix).items():
            yield StoredKey(path[len(self._root) + 1 :], int(info["size"]), _modified(info))

    def delete(self, name: str) -> None:
        path = self._path(name)
        if self.info(path)["type"] != "file":  # object stores do not mind deleting what is not there
            raise FileNotFoundError(path)
        self.ask("rm_file", path)

    def delete_all(self, prefix: str) -> None:
        for _ in range(_DELETE_ROUNDS):
            paths = list(self._find(prefix))
            if not paths:
                return
            with suppress(FileNotFoundError):
                if self.kind in _OBJECT_STORES:
                    self.ask("rm", paths)
                else:
                    self.ask("rm", self._path(prefix), recursive=True)
        raise StoreUnavailable("objects are still there after deleting them")

    def uri(self, name: str) -> str | None:
        return f"{self._uri}/{name}"

    def not_enforced(self) -> tuple[str, ...]:
        if self.kind in _OBJECT_STORES:
            return ()
        return (f"on {self.kind} another program may take a key at the same moment",)

    def close(self) -> None:
        """Let go of the connection, which its own finalizer closes; s3fs's fails where it runs beside another loop."""
        filesystem, self._connected = self._connected, None
        if filesystem is not None and (session := getattr(filesystem, "_s3creator", None)) is not None:
            filesystem.close_session(filesystem.loop, session)

    def info(self, path: str) -> Mapping[str, Any]:
        """What the place says of one path, not what it said before."""
        self._filesystem().invalidate_cache()
        info: Mapping[str, Any] = self.ask("info", path)
        return info

    def _find(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        # `find` lists a plain prefix; `rm` and `cat` of a list would expand globs, which no key can hold
        top = self._path(prefix) if prefix else self._root
        self._filesystem().invalidate_cache()
        try:
            found = self.ask("find", top, detail=True)
        except FileNotFoundError:
            return {}
        return {path: info for path, info in found.items() if path.startswith(f"{top}/")}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class MemoryBackend(FsspecBackend):
    """Objects in this process, of this store alone: fsspec's shared dictionary is not used."""

    single_put_bytes = None

    def __init__(self, root: str) -> None:
        self._memory = MemoryFileSystem(global_store=False, skip_instance_cache=True)
        super().__init__(lambda: self._memory, root, "memory", "")

    def adopt(self, name: str, path: Path) -> bool:
        """Always by a draft: `put_file` would show an object that grows."""
        return False

    def uri(self, name: str) -> None:
        """Nobody else can open it."""

    def close(self) -> None:
        self._memory.store.clear()
        self._memory.pseudo_dirs[:] = [""]


class _SpooledDraft(Draft):
    def __init__(self, backend: FsspecBackend, max_bytes: int | None) -> None:
        super().__init__(max_bytes)
        self._backend = backend
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def append(self, chunk: bytes) -> None:
        limit = self._backend.single_put_bytes
        if self._file is None and limit is not None and self.size > limit:
            self._file = tempfile.NamedTemporaryFile(prefix="sandgate-store-")  # noqa: SIM115 - closed by discard
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += chunk
        else:
            self._file.write(chunk)

    def publish(self, name: str) -> None:
        if self._file is None:
            self._backend.create(name, bytes(self._memory))
            return
        self._file.flush()
        self._backend.create(name, Path(self._file.name))

    def discard(self) -> None:
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()


class _FsspecReader:
    fetch_bytes = FETCH_BYTES

    def __init__(self, backend: FsspecBackend, path: str) -> None:
        info = backend.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        self.size = int(info["size"])
        self._backend = backend
        self._path = path

    def read(self, start: int, length: int) -> bytes:
        if not length:
            return b""
        data: bytes = self._backend.ask("cat_file", self._path, start=start, end=start + length)
        if len(data) != length:
            raise StoreUnavailable("a stored object has become shorter")
        return data

    def close(self) -> None:
        """Nothing is held between requests."""


def _modified(info: Mapping[str, object]) -> float | None:
    for name in ("LastModified", "mtime", "modified", "created"):
        match info.get(name):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
    return None


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
