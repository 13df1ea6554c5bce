"""Spool: one stream of one call, kept while the call lasts: in memory up to a bound, then in a file.

Readers take byte ranges at any time (that is how streams replay); nothing is buffered twice.
"""

import codecs
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from gateway.models import Stream
from stores import LineIndex

MEMORY_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 512 * 1024


class Spool:
    """A sink for bytes. Up to `keep` bytes can be read back; beyond that they are counted, and the last
    `TAIL_BYTES` stay readable as `tail`. The digest covers what is kept, and so does the index `lines`.
    """

    def __init__(self, folder: Path, name: str, *, keep: int) -> None:
        self._folder = folder
        self._name = name
        self._keep = keep
        self._memory = bytearray()
        self._file: int | None = None
        self._beyond = bytearray()
        self._hash = hashlib.sha256()
        self.lines = LineIndex()
        self._changed: anyio.Event | None = None
        self.kept = 0
        self.total = 0
        self.closed = False

    @property
    def truncated(self) -> bool:
        """Whether more came than is kept."""
        return self.total > self.kept

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def path(self) -> Path | None:
        """The file with everything kept, or None while it is in memory."""
        return self._folder / self._name if self._file is not None else None

    async def write(self, chunk: bytes) -> None:
        """Append; a chunk never waits for a reader."""
        self.total += len(chunk)
        kept = chunk[: max(0, self._keep - self.kept)]
        if len(kept) < len(chunk):
            self._beyond += chunk[len(kept) :]
            del self._beyond[:-TAIL_BYTES]
        if kept:
            await self._append(kept)
        self._announce()

    async def _append(self, chunk: bytes) -> None:
        if self._file is None and len(self._memory) + len(chunk) <= MEMORY_BYTES:
            self._memory += chunk
            self._hash.update(chunk)
        else:
            await anyio.to_thread.run_sync(self._spill, chunk)
        self.kept += len(chunk)

    def _spill(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._folder / self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _write_all(self._file, bytes(self._memory))
            self.lines.add(bytes(self._memory))
            self._memory.clear()
        _write_all(self._file, chunk)
        self._hash.update(chunk)
        self.lines.add(chunk)

    def _announce(self) -> None:
        event, self._changed = self._changed, None
        if event is not None:
            event.set()

    def end(self) -> None:
        """Say that nothing more will come; readers at the end are told."""
        self.closed = True
        self._announce()

    async def read(self, start: int, end: int) -> bytes:
        """The kept bytes `start..end`, fewer where there are fewer."""
        end = min(end, self.kept)
        if start >= end:
            return b""
        if self._file is None:
            return bytes(self._memory[start:end])
        return await anyio.to_thread.run_sync(os.pread, self._file, end - start, start)

    async def more(self, seen: int) -> None:
        """Wait until more than `seen` bytes are kept, or the stream has ended."""
        while self.kept <= seen and not self.closed:
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()

    async def head_and_tail(self, limit: int) -> tuple[bytes, bytes]:
        """All of it and nothing, if it fits `limit`; else its first and its last `limit / 2` bytes."""
        if self.total <= min(limit, self.kept):
            return await self.read(0, self.kept), b""
        half = limit // 2
        return await self.read(0, half), await self._tail(half)

    async def _tail(self, size: int) -> bytes:
        beyond = bytes(self._beyond[-size:])
        missing = size - len(beyond)
        if missing <= 0 or self.total - len(beyond) > self.kept:
            return beyond
        return await self.read(max(0, self.kept - missing), self.kept) + beyond

    def count_characters(self) -> int:
        """How many code points the kept bytes are, as text with replacement; reads all of it, so call in a thread."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return sum(len(decoder.decode(chunk)) for chunk in self._chunks()) + len(decoder.decode(b"", final=True))

    def count_lines(self) -> int:
        """How many line ends the kept bytes have; reads all of it, so call in a thread."""
        return sum(chunk.count(b"\n") for chunk in self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        if self._file is None:
            yield bytes(self._memory)
            return
        for start in range(0, self.kept, MEMORY_BYTES):
            yield os.pread(self._file, MEMORY_BYTES, start)

    def discard(self) -> None:
        """Forget everything; removes the file if it is still there."""
        self._memory.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None
            (self._folder / self._name).unlink(missing_ok=True)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


class SpoolFolder:
    """Makes spools below one private folder; what an earlier process left there is removed at start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink()

    def new(self, *, keep: int) -> Spool:
        self._next += 1
        return Spool(self._folder, f"{self._next:08d}", keep=keep)


Spools = Mapping[Stream, Spool]
