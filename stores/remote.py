"""A store on any other fsspec file system: memory, S3 and its like.

Asynchronous file systems are used through their blocking side, in our worker threads like all others.
"""

import errno
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from stores.backend import Backend, Draft, Reader, StoredKey
from stores.errors import StoreUnavailable

SINGLE_PUT_BYTES: Final = 8 << 20
FETCH_BYTES: Final = 4 << 20

_OBJECT_STORES: Final = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "obs", "tos"}
)
_DELETE_ROUNDS: Final = 3


class FsspecBackend(Backend):
    """Objects below a root of an fsspec file system.

    An object is sent when it is complete, so an aborted put has sent nothing; up to `single_put_bytes` wait in
    memory, more in a temporary file.
    """

    single_put_bytes: int | None = SINGLE_PUT_BYTES

    def __init__(self, filesystem: AbstractFileSystem, root: str, kind: str) -> None:
        self.kind = kind
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._creating: AbstractContextManager[object] = nullcontext()

    def draft(self, max_bytes: int | None) -> Draft:
        return _SpooledDraft(self, max_bytes)

    def adopt(self, name: str, path: Path) -> bool:
        self.create(name, path)
        return True

    def create(self, name: str, data: bytes | Path) -> None:
        """Send one whole object to a name that must be new."""
        path = self._path(name)
        with self._creating:
            try:
                self._send(path, data)
            except OSError as error:
                # SeaweedFS refuses the second write well, and s3fs makes a plain EINVAL of it
                if error.errno == errno.EINVAL and self._fs.exists(path):
                    raise FileExistsError(path) from error
                raise

    def open(self, name: str) -> Reader:
        self._fs.invalidate_cache()
        return _FsspecReader(self._fs, self._path(name))

    def list(self, prefix: str) -> Iterator[StoredKey]:
        for path, info in self._find(prefix).items():
            yield StoredKey(path[len(self._root) + 1 :], int(info["size"]), _modified(info))

    def delete(self, name: str) -> None:
        self._fs.invalidate_cache()
        path = self._path(name)
        if self._fs.info(path)["type"] != "file":  # object stores do not mind deleting what is not there
            raise FileNotFoundError(path)
        self._fs.rm_file(path)

    def delete_all(self, prefix: str) -> None:
        for _ in range(_DELETE_ROUNDS):
            paths = list(self._find(prefix))
            if not paths:
                return
            with suppress(FileNotFoundError):
                self._fs.rm(paths)
        raise StoreUnavailable("objects are still there after deleting them")

    def uri(self, name: str) -> str | None:
        return str(self._fs.unstrip_protocol(self._path(name)))

    def not_enforced(self) -> tuple[str, ...]:
        if self.kind in _OBJECT_STORES:
            return ()
        return (f"on {self.kind} a reader may see an object that is not yet whole",)

    def _send(self, path: str, data: bytes | Path) -> None:
        if self.kind not in _OBJECT_STORES:
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        if isinstance(data, Path):
            self._fs.put_file(str(data), path, mode="create")
        else:
            self._fs.pipe_file(path, data, mode="create")

    def _find(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        # `find` lists a plain prefix; `rm` and `cat` of a list would expand globs, which no key can hold
        top = self._path(prefix) if prefix else self._root
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(top, detail=True)
        except FileNotFoundError:
            return {}
        return {path: info for path, info in found.items() if path.startswith(f"{top}/")}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class MemoryBackend(FsspecBackend):
    """Objects in this process, of this store alone: fsspec's shared dictionary is not used."""

    single_put_bytes = None

    def __init__(self, root: str) -> None:
        super().__init__(MemoryFileSystem(global_store=False, skip_instance_cache=True), root, "memory")
        self._creating = threading.Lock()  # its create looks first and writes then

    def adopt(self, name: str, path: Path) -> bool:
        """Always by a draft: `put_file` would show an object that grows."""
        return False

    def uri(self, name: str) -> None:
        """Nobody else can open it."""

    def close(self) -> None:
        self._fs.store.clear()
        self._fs.pseudo_dirs[:] = [""]


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

    def __init__(self, filesystem: AbstractFileSystem, path: str) -> None:
        info = filesystem.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        self.size = int(info["size"])
        self._fs = filesystem
        self._path = path

    def read(self, start: int, length: int) -> bytes:
        if not length:
            return b""
        data: bytes = self._fs.cat_file(self._path, start=start, end=start + length)
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
