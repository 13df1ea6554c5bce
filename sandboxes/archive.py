"""Tar in and out of a workspace, written once above the file primitives. An archive from outside is hostile."""

import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Final

import anyio.to_thread

from sandboxes.errors import FileRefused
from sandboxes.sandbox import CHUNK_BYTES, Entry, Listing, Sandbox

MAX_MEMBERS: Final = 100_000
MAX_DEPTH: Final = 100


def checked_members(archive: tarfile.TarFile, max_bytes: int) -> tuple[tarfile.TarInfo, ...]:
    """All files of an archive, once every member is known to be harmless; else FileRefused, before any byte is used.

    Refused: absolute names, `..`, drive letters, links (hard or symbolic), devices, FIFOs, sparse files, over
    `MAX_MEMBERS` members, over `max_bytes` in sum. Folders need no entry of their own.
    """
    files, total = [], 0
    try:
        for count, member in enumerate(archive, start=1):
            _check(member)
            total += member.size
            if count > MAX_MEMBERS or total > max_bytes:
                raise FileRefused(f"archive: over {MAX_MEMBERS:,} members or {max_bytes:,} bytes",
                                  "Send less, in parts.", code="content_too_large")
            if member.isreg():
                files.append(member)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FileRefused(f"archive: not a readable tar: {error}", "Send an uncompressed or gzip tar.",
                          code="invalid_encoding") from error
    return tuple(files)


def _check(member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    wrong = (member.name.startswith("/") or ".." in parts or "\0" in member.name or "\\" in member.name
             or (len(parts[0]) > 1 and parts[0][1] == ":") or len(parts) > MAX_DEPTH)
    if wrong:
        raise FileRefused(f"archive: {member.name[:200]!r} does not stay below the target",
                          "Make it with relative names, from inside the folder.", code="invalid_path")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise FileRefused(f"archive: {member.name[:200]!r} is not a plain file or folder",
                          "Resolve links (tar --dereference) and leave devices and sparse files out.",
                          code="invalid_path")


async def unpack(sandbox: Sandbox, archive: Path, to: str, max_bytes: int) -> int:
    """Write the files of a tar below `to`, all of it or (where it is refused) none; returns how many files."""
    with await anyio.to_thread.run_sync(_opened, archive) as tar:
        members = await anyio.to_thread.run_sync(checked_members, tar, max_bytes)
        for member in members:
            file = tar.extractfile(member)
            if file is not None:
                await sandbox.write(f"{to}/{member.name}", file_chunks(file), mode=member.mode & 0o777)
    return len(members)


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FileRefused(f"archive: not a readable tar: {error}", "Send an uncompressed or gzip tar.",
                          code="invalid_encoding") from error


async def file_chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    """A host file's bytes, read in worker threads."""
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


async def pack(sandbox: Sandbox, path: str, listing: Listing) -> AsyncIterator[bytes]:
    """A tar of the regular files in a recursive listing of `path`; links and other things are left out.

    A file that shrank since is padded with zeros, so that the archive stays readable.
    """
    for entry in listing.entries:
        if entry.kind == "file":
            yield _header(entry)
            sent = 0
            async for chunk in sandbox.read(f"{path}/{entry.path}", 0, entry.size, follow=False):
                sent += len(chunk)
                yield chunk
            while sent < entry.size:
                filler = min(CHUNK_BYTES, entry.size - sent)
                sent += filler
                yield bytes(filler)
            yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(entry: Entry) -> bytes:
    member = tarfile.TarInfo(entry.path)
    member.size, member.mode, member.mtime = entry.size, entry.mode & 0o777, int(entry.modified)
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
