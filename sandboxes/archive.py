"""Tar in and out of a workspace, written once above the file primitives. An archive from outside is hostile."""

import gzip
import io
import tarfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import IO, Final

import anyio.to_thread

from sandboxes.bulk import SMALL_BYTES, batches
from sandboxes.errors import FileRefused
from sandboxes.sandbox import CHUNK_BYTES, Entry, Listing, Sandbox, SmallFile

MAX_MEMBERS: Final = 100_000
MAX_DEPTH: Final = 100
MAX_NAME: Final = 255
MAX_HEADER: Final = 16 * 1024
"""Of one extended header; tarfile reads it whole, and Python < 3.11.10 searches it in quadratic time."""
MEMBER_OVERHEAD: Final = 4 * tarfile.BLOCKSIZE
SCAN_SECONDS: Final = 10.0
_GZIP: Final = b"\x1f\x8b"


class _Source(io.RawIOBase):
    """An archive's bytes, unpacked from gzip where needed. No read is larger than `most`, and nothing is read beyond
    `end`: tarfile alone would take a header of any size into memory, and follow a bomb to its end."""

    def __init__(self, archive: IO[bytes], end: int) -> None:
        archive.seek(0)
        packed = archive.read(2) == _GZIP
        archive.seek(0)
        self._bytes: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=archive) if packed else archive
        self._end = end
        self.most = MAX_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most or self._bytes.tell() + size > self._end:
            raise _too_large()
        return self._bytes.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or not 0 <= offset <= self._end:
            raise _too_large()
        return self._bytes.seek(offset)

    def tell(self) -> int:
        return self._bytes.tell()


def checked_members(archive: tarfile.TarFile, max_bytes: int) -> tuple[tarfile.TarInfo, ...]:
    """All files of an archive, once every member is known to be harmless; else FileRefused, before any byte is used.

    Refused: absolute names, `..`, drive letters, links (hard or symbolic), devices, FIFOs, sparse files, a file
    that is also a folder, over `MAX_MEMBERS` members, over `max_bytes` in sum, over `SCAN_SECONDS` to read. Folders
    need no entry of their own.
    """
    files: list[tarfile.TarInfo] = []
    folders: set[str] = set()
    names: set[str] = set()
    total = 0
    deadline = time.monotonic() + SCAN_SECONDS
    for count, member in enumerate(archive, start=1):
        parts = _checked(member)
        total += member.size
        if count > MAX_MEMBERS or total > max_bytes or time.monotonic() > deadline:
            raise _too_large()
        folders.update("/".join(parts[:depth]) for depth in range(len(parts) + member.isdir()))
        if member.isreg():
            files.append(member)
            names.add("/".join(parts))
    _check_end(archive)
    if clash := names & folders:
        raise FileRefused(f"archive: {min(clash)[:200]!r} is a file and a folder", code="invalid_path")
    return tuple(files)


def _check_end(archive: tarfile.TarFile) -> None:
    """tarfile takes a broken header for the end; what follows would be left out in silence."""
    source = archive.fileobj
    assert source is not None
    source.seek(archive.offset)
    if source.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise FileRefused("archive: a header in it is broken", "Make it again.", code="invalid_encoding")


def _checked(member: tarfile.TarInfo) -> list[str]:
    """The parts of a harmless member's name."""
    parts = member.name.split("/")
    wrong = (
        member.name.startswith("/")
        or ".." in parts
        or "\0" in member.name
        or "\\" in member.name
        or (len(parts[0]) > 1 and parts[0][1] == ":")
        or len(parts) > MAX_DEPTH
        or any(len(part.encode(errors="surrogateescape")) > MAX_NAME for part in parts)
    )
    parts = [part for part in parts if part not in ("", ".")]
    if wrong or (member.isreg() and not parts):
        raise FileRefused(
            f"archive: {member.name[:200]!r} does not stay below the target",
            "Make it with relative names, from inside the folder.",
            code="invalid_path",
        )
    if not (member.isreg() or member.isdir()) or member.issparse() or member.size < 0:
        raise FileRefused(
            f"archive: {member.name[:200]!r} is not a plain file or folder",
            "Resolve links (tar --dereference) and leave devices and sparse files out.",
            code="invalid_path",
        )
    return parts


def _too_large() -> FileRefused:
    return FileRefused(
        "archive: too many members, too many bytes, or a header that is too long",
        "Send less, in parts.",
        code="content_too_large",
    )


@dataclass(frozen=True, slots=True)
class Unpacked:
    """How many files were written, and the bytes in them."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A file of the host's, or of an archive, that is to be written inside; `open` is called in a worker thread."""

    path: str
    mode: int
    size: int
    open: Callable[[], IO[bytes]]


async def unpack(sandbox: Sandbox, archive: IO[bytes], to: str, max_bytes: int) -> Unpacked:
    """Write the files of a tar (plain or gzip) below `to`. A refused archive has written nothing; an error of the
    sandbox later (a full disk, a link in the way) leaves the files before it.
    """
    source = _Source(archive, max_bytes + MAX_MEMBERS * MEMBER_OVERHEAD)
    tar, members = await anyio.to_thread.run_sync(_scanned, source, max_bytes)
    source.most = CHUNK_BYTES
    with tar:
        files = [_incoming(tar, member, to) for member in members]
        return Unpacked(len(files), await write_files(sandbox, files, at_once=1))


def _incoming(tar: tarfile.TarFile, member: tarfile.TarInfo, to: str) -> Incoming:
    def content() -> IO[bytes]:
        file = tar.extractfile(member)
        assert file is not None  # a regular one
        return file

    return Incoming(f"{to}/{member.name}", member.mode & 0o777, member.size, content)


async def write_files(sandbox: Sandbox, files: Iterable[Incoming], *, at_once: int = 4) -> int:
    """Write the files in their order; returns the bytes in them. `at_once` are opened at a time."""
    written = 0
    for batch in batches(files, lambda file: file.size):
        [first, *_] = batch
        if first.size > SMALL_BYTES:
            with await anyio.to_thread.run_sync(first.open) as content:
                written += await sandbox.write(first.path, file_chunks(content), mode=first.mode)
            continue
        small = await _read_batch(batch, at_once)
        await sandbox.write_many(small)
        written += sum(len(file.content) for file in small)
    return written


async def _read_batch(batch: Sequence[Incoming], at_once: int) -> list[SmallFile]:
    read: dict[int, list[SmallFile]] = {}

    async def part(start: int) -> None:
        read[start] = await anyio.to_thread.run_sync(lambda: [_read(file) for file in batch[start::at_once]])

    async with anyio.create_task_group() as tasks:
        for start in range(at_once):
            tasks.start_soon(part, start)
    return [read[place % at_once][place // at_once] for place in range(len(batch))]


def _read(file: Incoming) -> SmallFile:
    with file.open() as content:
        return SmallFile(file.path, content.read(file.size), file.mode)


def _scanned(source: _Source, max_bytes: int) -> tuple[tarfile.TarFile, tuple[tarfile.TarInfo, ...]]:
    try:
        tar = tarfile.open(fileobj=source, mode="r:")  # noqa: SIM115 - closed by the caller
        return tar, checked_members(tar, max_bytes)
    except FileRefused:
        raise
    except Exception as error:  # tarfile and gzip raise whatever a hostile header leads them to
        raise FileRefused(
            f"archive: not a readable tar: {error}", "Send an uncompressed or gzip tar.", code="invalid_encoding"
        ) from error


async def file_chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    """A host file's bytes, read in worker threads."""
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


async def pack(sandbox: Sandbox, path: str, listing: Listing) -> AsyncIterator[bytes]:
    """A tar of the regular files in a recursive listing of `path`; links and other things are left out, and what is
    gone or replaced since.

    A file that shrank since is padded with zeros, so that the archive stays readable.
    """
    regular = (entry for entry in listing.entries if entry.kind == "file")
    for batch in batches(regular, lambda entry: entry.size):
        members = _small_members if batch[0].size <= SMALL_BYTES else _large_member
        async with aclosing(members(sandbox, path, batch)) as pieces:
            async for piece in pieces:
                yield piece
    yield bytes(2 * tarfile.BLOCKSIZE)


async def _small_members(sandbox: Sandbox, path: str, batch: Sequence[Entry]) -> AsyncGenerator[bytes, None]:
    left = iter(batch)
    async with aclosing(sandbox.read_many([f"{path}/{entry.path}" for entry in batch], SMALL_BYTES)) as contents:
        async for content in contents:
            entry = next(left)
            if isinstance(content, bytes):
                yield _member(entry, content[: entry.size].ljust(entry.size, b"\0"))


async def _large_member(sandbox: Sandbox, path: str, batch: Sequence[Entry]) -> AsyncGenerator[bytes, None]:
    [entry] = batch
    chunks = sandbox.read(f"{path}/{entry.path}", 0, entry.size, follow=False)
    try:
        first = await anext(chunks, b"")
    except FileRefused:
        return
    sent = len(first)
    yield _header(entry) + first
    async for chunk in chunks:
        sent += len(chunk)
        yield chunk
    while sent < entry.size:
        filler = min(CHUNK_BYTES, entry.size - sent)
        sent += filler
        yield bytes(filler)
    yield bytes(-entry.size % tarfile.BLOCKSIZE)


def _member(entry: Entry, content: bytes) -> bytes:
    return _header(entry) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def _header(entry: Entry) -> bytes:
    member = tarfile.TarInfo(entry.path)
    member.size, member.mode, member.mtime = entry.size, entry.mode & 0o777, int(entry.modified)
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
