"""Local files on their way: a folder as a tar and back, a body saved into a file."""

import hashlib
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import IO, Final

import anyio
import anyio.to_thread
import httpx2

from gateway.client.errors import ArchiveRefused, ConnectionLost

Progress = Callable[[int], None]
CHUNK_BYTES: Final = 256 * 1024
TAR: Final = "application/x-tar"
_NOT_IN_A_NAME: Final = ("\\", ":") if os.name == "nt" else ()


async def file_chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


async def packed(folder: Path) -> AsyncGenerator[bytes, None]:
    """A tar of the regular files in a folder, made as it is read. A file that shrinks meanwhile ends it by OSError."""
    for path in await anyio.to_thread.run_sync(_regular_files, folder):
        with await anyio.to_thread.run_sync(path.open, "rb") as file:
            info = os.fstat(file.fileno())
            yield _tar_header(path.relative_to(folder).as_posix(), info)
            left = info.st_size
            while left:
                chunk = await anyio.to_thread.run_sync(file.read, min(left, CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{path} became shorter while it was sent")
                left -= len(chunk)
                yield chunk
            yield bytes(-info.st_size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _regular_files(folder: Path) -> list[Path]:
    paths = [Path(at, name) for at, _, names in os.walk(folder, onerror=_raise) for name in names]
    return sorted(path for path in paths if stat.S_ISREG(path.lstat().st_mode))


def _raise(error: OSError) -> None:
    raise error


def _tar_header(name: str, info: os.stat_result) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = info.st_size, info.st_mode & 0o777, int(info.st_mtime)
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


async def save(response: httpx2.Response, target: Path, *, progress: Progress | None = None, sha256: str = "") -> None:
    """Stream a body into a file, which appears whole or not at all; where a digest is given, only with that one."""
    part, digest, size = _part_of(target), hashlib.sha256(), 0
    try:
        async with await anyio.open_file(part, "xb") as file:
            async for chunk in response.aiter_bytes(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                await file.write(chunk)
                if progress is not None:
                    progress(size)
        if sha256 and digest.hexdigest() != sha256:
            raise ConnectionLost("what arrived is not what was stored: its digest is another")
        await anyio.to_thread.run_sync(part.replace, target)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove, part)


def _part_of(target: Path) -> Path:
    return target.with_name(f".{secrets.token_hex(8)}.part")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def unpack(response: httpx2.Response, folder: Path) -> None:
    """Spool an archive, check all of it, then write it."""
    with tempfile.TemporaryFile(prefix="sandgate-") as spool:
        async for chunk in response.aiter_bytes(CHUNK_BYTES):
            await anyio.to_thread.run_sync(spool.write, chunk)
        await anyio.to_thread.run_sync(_extract, spool, folder)


def _extract(spool: IO[bytes], folder: Path) -> None:
    most = spool.tell() // tarfile.BLOCKSIZE  # every member has a header: a number beyond this is a trick
    spool.seek(0)
    try:
        with tarfile.open(fileobj=spool, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            members = [_checked(member, count, most) for count, member in enumerate(archive, start=1)]
            folder.mkdir(parents=True, exist_ok=True)
            for member in members:
                _extract_member(archive, member, folder.joinpath(*member.name.split("/")))
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ArchiveRefused(f"the archive of the folder cannot be read: {error}") from error


def _checked(member: tarfile.TarInfo, count: int, most: int) -> tarfile.TarInfo:
    """The member itself, or ArchiveRefused. The names come from a sandbox, where anybody may have made them."""
    parts = member.name.split("/")
    if count > most or member.size < 0 or member.size > most * tarfile.BLOCKSIZE:
        raise ArchiveRefused("the archive of the folder claims more than it holds")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ArchiveRefused(f"the archive of the folder holds {member.name[:200]!r}, which is no plain file or folder")
    if {"", ".", ".."} & set(parts) or any(one in member.name for one in ("\0", *_NOT_IN_A_NAME)):
        raise ArchiveRefused(f"the archive of the folder holds {member.name[:200]!r}, which does not stay below it")
    return member


def _extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part, mode = _part_of(target), 0o755 if member.mode & stat.S_IXUSR else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(part, flags, mode), "wb") as file, tarfile.ExFileObject(archive, member) as source:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
        part.replace(target)
    finally:
        _remove(part)
