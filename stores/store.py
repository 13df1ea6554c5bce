"""Named bytes over any fsspec file system, below a fixed root, written once."""

import io
import os
import secrets
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from stores.backend import CHUNK_BYTES, Backend, Draft, Reader, StoredKey, StoredObject
from stores.errors import KeyRefused, StoreError, StoreUnavailable, translated
from stores.keys import check_key, check_segment, is_key
from stores.opening import open_backend

PROBE_SECONDS: Final = 10.0

_BLOCK_BYTES: Final = 1 << 20
_THREADS: Final = 16
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

Source = AsyncIterable[bytes] | bytes | Path


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a store works here. `not_enforced` names each promise of a store that this one cannot keep."""

    kind: str
    works: bool
    reason: str = ""
    remedy: str = ""
    not_enforced: tuple[str, ...] = ()


class Store:
    """A store, or with a prefix one scope of it: a scope knows no key outside, and shares everything else.

    An object is absent or whole, and never changes. Keys are `check_key`'s, anything else is KeyRefused before the
    file system hears of it. Every method may raise StoreUnavailable. Of a key and a longer one that begins with
    it and a slash, at most the first written is sure to be stored.
    """

    def __init__(self, backend: Backend, prefix: str = "", limiter: anyio.CapacityLimiter | None = None) -> None:
        self._backend = backend
        self._prefix = prefix
        self._limiter = limiter or anyio.CapacityLimiter(_THREADS)

    @classmethod
    def from_uri(cls, uri: str, options: Mapping[str, object] | None = None) -> Self:
        """Open `file:///path`, a bare path, `memory://`, `s3://bucket/prefix` or any other writable fsspec URI.

        Nothing is asked of the place yet, `probe` does that. `options` go to the file system as they are.
        A memory store is this object's own. Raises StoreUnavailable for chained URLs and unknown protocols.
        """
        return cls(open_backend(uri, options or {}))

    @property
    def kind(self) -> str:
        """The protocol: `file`, `memory`, `s3`, ..."""
        return self._backend.kind

    def scoped(self, name: str) -> "Store":
        """Return the scope of one session. The name is one segment of a key, else KeyRefused."""
        return Store(self._backend, f"{self._prefix}{check_segment(name)}/", self._limiter)

    async def put(self, key: str, source: Source, *, max_bytes: int | None = None) -> StoredObject:
        """Store the source whole, or nothing: no error, no cancellation and no crash leaves a part to be seen.

        Raises AlreadyExists, and QuotaExceeded when the source gives more than `max_bytes`; what the source
        raises rises as it is.
        """
        name = self._name(key)
        if isinstance(source, bytes) and len(source) <= _BLOCK_BYTES:
            sha256 = await self._run(self._write, name, source, max_bytes, writing=True)
            return StoredObject(key, len(source), sha256)
        async with self._draft(max_bytes) as draft:
            await self._fill(draft, source)
            await self._run(draft.publish, name, writing=True)
            return StoredObject(key, draft.size, draft.sha256)

    async def put_file(self, key: str, path: Path, *, sha256: str, size: int) -> StoredObject:
        """Store a finished local file whose size and hash are known; the path stays the caller's to remove.

        In a local store of the same file system this is a hard link and costs nothing: the file becomes 0600
        and must not be written again. Its size is compared, its hash only where the bytes are copied anyway.
        """
        name = self._name(key)
        if await self._run(self._adopt, name, path, size, writing=True):
            return StoredObject(key, size, sha256)
        async with self._draft(size) as draft:
            await self._fill(draft, path)
            if (draft.size, draft.sha256) != (size, sha256):
                raise _not_as_announced()
            await self._run(draft.publish, name, writing=True)
            return StoredObject(key, size, sha256)

    def read(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes `start..end`, end not included, in chunks of at most 256 KiB; beyond the end is nothing.

        KeyRefused is raised by the call, NotFound by the first chunk. In a local store what is being read
        stays readable when it is deleted.
        """
        if start < 0 or (end is not None and end < 0):
            raise ValueError("a range counts from the beginning")
        return self._read(self._name(key), start, end)

    async def scan(self, key: str, work: Callable[[Reader], _T]) -> _T:
        """Run blocking work over the opened object in a worker thread; cancelled, it ends at its next read."""
        name = self._name(key)
        stopped = threading.Event()

        def run() -> _T:
            with translated():
                reader = self._backend.open(name)
            try:
                return work(_Stoppable(reader, stopped))
            finally:
                reader.close()

        try:
            return await anyio.to_thread.run_sync(run, limiter=self._limiter, abandon_on_cancel=True)
        finally:
            stopped.set()

    async def size(self, key: str) -> int:
        """Return the size in bytes. Raises NotFound."""
        return await self._run(self._size, self._name(key))

    async def list(self) -> tuple[StoredKey, ...]:
        """Return every object of this scope, in the order of their keys; what has no legal key is not ours."""
        return await self._run(self._list)

    async def delete(self, key: str) -> None:
        """Delete one object. Raises NotFound."""
        await self._run(self._backend.delete, self._name(key))

    async def delete_all(self) -> None:
        """Delete everything in this scope; an empty one is fine.

        Only for scopes: what else lies in the root folder is not ours. Raises KeyRefused without one.
        """
        if not self._prefix:
            raise KeyRefused("only a scope is deleted as a whole")
        await self._run(self._backend.delete_all, self._prefix.rstrip("/"))

    def uri(self, key: str) -> str | None:
        """Return what fsspec opens with access to the store itself; None where nobody else could (memory)."""
        return self._backend.uri(self._name(key))

    async def probe(self) -> Probe:
        """Write, read, write again and delete a small object, within 10 seconds. Never raises a StoreError."""
        try:
            with anyio.fail_after(PROBE_SECONDS):
                gaps = await anyio.to_thread.run_sync(self._try, limiter=self._limiter, abandon_on_cancel=True)
        except StoreError as error:
            return Probe(self.kind, False, error.message, error.remedy)
        except TimeoutError:
            return Probe(self.kind, False, f"no answer within {PROBE_SECONDS:g} seconds", "check address and network")
        return Probe(self.kind, True, not_enforced=gaps)

    async def aclose(self) -> None:
        """Forget what is in memory. A scope's does nothing: its store is another's."""
        if not self._prefix:
            await self._run(self._backend.close)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    async def _run(self, work: Callable[[*_Ts], _T], *args: *_Ts, writing: bool = False) -> _T:
        with translated(writing=writing):
            return await anyio.to_thread.run_sync(work, *args, limiter=self._limiter)

    @asynccontextmanager
    async def _draft(self, max_bytes: int | None) -> AsyncIterator[Draft]:
        draft = await self._run(self._backend.draft, max_bytes, writing=True)
        try:
            yield draft
        finally:
            with anyio.CancelScope(shield=True):
                await self._run(draft.discard)

    async def _fill(self, draft: Draft, source: Source) -> None:
        async with aclosing(_chunks(source)) as chunks:
            async for chunk in chunks:
                await self._run(draft.write, chunk, writing=True)

    async def _read(self, name: str, start: int, end: int | None) -> AsyncIterator[bytes]:
        reader = await self._run(self._backend.open, name)
        try:
            stop = reader.size if end is None else min(end, reader.size)
            for position in range(start, stop, reader.fetch_bytes):
                block = await self._run(reader.read, position, min(reader.fetch_bytes, stop - position))
                for at in range(0, len(block), CHUNK_BYTES):
                    yield block[at : at + CHUNK_BYTES]
        finally:
            reader.close()

    def _adopt(self, name: str, path: Path, size: int) -> bool:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise _not_as_announced()
        return self._backend.adopt(name, path)

    def _size(self, name: str) -> int:
        reader = self._backend.open(name)
        reader.close()
        return reader.size

    def _list(self) -> tuple[StoredKey, ...]:
        found = (
            replace(entry, key=entry.key.removeprefix(self._prefix))
            for entry in self._backend.list(self._prefix.rstrip("/"))
        )
        return tuple(sorted((entry for entry in found if is_key(entry.key)), key=lambda entry: entry.key))

    def _try(self) -> tuple[str, ...]:
        name = f"{self._prefix}probe-{secrets.token_hex(8)}"
        with translated(writing=True):
            self._write(name, b"sandgate", None)
            try:
                if self._reread(name) != b"sandgate":
                    raise StoreUnavailable("what was written reads back as something else")
                gaps = self._backend.not_enforced()
                return gaps if self._refuses(name) else (*gaps, "a key can be written twice")
            finally:
                self._backend.delete(name)

    def _write(self, name: str, data: bytes, max_bytes: int | None) -> str:
        draft = self._backend.draft(max_bytes)
        try:
            draft.write(data)
            draft.publish(name)
            return draft.sha256
        finally:
            draft.discard()

    def _reread(self, name: str) -> bytes:
        reader = self._backend.open(name)
        try:
            return reader.read(0, reader.size)
        finally:
            reader.close()

    def _refuses(self, name: str) -> bool:
        try:
            self._write(name, b"again", None)
        except FileExistsError:
            return True
        return False


class _Stoppable:
    """A reader that ends its user at the next read once nobody waits for the result."""

    def __init__(self, reader: Reader, stopped: threading.Event) -> None:
        self.size = reader.size
        self.fetch_bytes = reader.fetch_bytes
        self._reader = reader
        self._stopped = stopped

    def read(self, start: int, length: int) -> bytes:
        if self._stopped.is_set():
            raise StoreUnavailable("given up")
        with translated():
            return self._reader.read(start, length)

    def close(self) -> None:
        """Closed by whoever opened it."""


def _not_as_announced() -> StoreUnavailable:
    return StoreUnavailable("the file is not the one that was announced", "store it after its last write")


def _chunks(source: Source) -> AsyncGenerator[bytes, None]:
    match source:
        case bytes():
            return _slices(source)
        case Path():
            return _file(source)
        case _:
            return _gathered(source)


async def _slices(data: bytes) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(data), _BLOCK_BYTES):
        yield data[at : at + _BLOCK_BYTES]


async def _file(path: Path) -> AsyncGenerator[bytes, None]:
    file = await anyio.to_thread.run_sync(_open_regular, path)
    try:
        while chunk := await anyio.to_thread.run_sync(file.read, _BLOCK_BYTES):
            yield chunk
    finally:
        file.close()


async def _gathered(source: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Join small chunks: each one sent on costs a change of threads."""
    waiting = bytearray()
    async for chunk in source:
        waiting += chunk
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def _open_regular(path: Path) -> io.FileIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = io.FileIO(descriptor)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return file
    file.close()
    raise _not_as_announced()
