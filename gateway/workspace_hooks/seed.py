"""SeedWorkspace: what a workspace starts with."""

import base64
import binascii
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.to_thread

from gateway.errors import Unprocessable
from gateway.models import SeedFile
from gateway.workspace_hooks.git import clone_bundle, is_bundle
from sandboxes import FileRefused, Incoming, Sandbox, SandboxContext, SandboxHook, unpack, write_files
from stores import Source, SourceFile

MAX_FILES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Inline:
    """Files whose content came with the request."""

    files: tuple[SeedFile, ...]

    def check(self) -> None:
        """Raise Unprocessable for a file with no, or two, contents."""
        for file in self.files:
            _content(file)


@dataclass(frozen=True, slots=True)
class FromHost:
    """A folder, a file, a tar or a git bundle of the operator's machine, placed at `to` below the workspace."""

    source: Path
    to: str = "."


@dataclass(frozen=True, slots=True)
class FromUri:
    """The same at any fsspec URI; on the web always one file."""

    uri: str
    to: str = "."


SeedSource = Inline | FromHost | FromUri


class SeedWorkspace(SandboxHook):
    """Writes files through the sandbox, as its user: they belong to it, and no link in the workspace is followed. A
    tar (plain or gzip) is unpacked, a git bundle cloned (with the sandbox's git), all else is copied. Links, devices
    and set-uid bits are left out. Raises FileRefused over 100,000 files or `max_bytes`. A restored workspace is left
    as it is."""

    def __init__(self, sources: Sequence[SeedSource], *, max_bytes: int) -> None:
        self._sources = tuple(sources)
        self._max_bytes = max_bytes

    async def on_create(self, ctx: SandboxContext) -> None:
        if ctx.restored:
            return
        left = self._max_bytes
        for source in self._sources:
            left -= await _write(ctx.sandbox, source, left)


async def _write(sandbox: Sandbox, source: SeedSource, max_bytes: int) -> int:
    """Write one source; returns the bytes that it took."""
    match source:
        case Inline(files):
            return await write_files(sandbox, _bounded(map(_inline, files), max_bytes))
        case FromHost(path, to) if path.is_dir():
            found = await anyio.to_thread.run_sync(lambda: list(_walk(path, to)))
            return await write_files(sandbox, _bounded(found, max_bytes))
        case FromHost(path, to) if path.is_file():
            return await _write_file(sandbox, path, path.name, to, max_bytes)
        case FromHost(path, _):
            raise FileNotFoundError(f"seed: {path}: no such file or folder")
        case FromUri(uri, to):
            return await _write_remote(sandbox, Source.at(uri), to, max_bytes)


def _inline(file: SeedFile) -> Incoming:
    content = _content(file)
    return Incoming(file.path, file.mode, len(content), lambda: io.BytesIO(content))


def _content(file: SeedFile) -> bytes:
    if (file.text is None) == (file.base64 is None):
        raise Unprocessable(f"seed: {file.path}: give exactly one of 'text' and 'base64'")
    if file.text is not None:
        return file.text.encode(errors="surrogatepass")
    try:
        return base64.b64decode(file.base64 or "", validate=True)
    except binascii.Error as error:
        raise Unprocessable(f"seed: {file.path}: not base64: {error}") from error


def _bounded(files: Iterable[Incoming], max_bytes: int) -> list[Incoming]:
    """The files, known not to be too many or too large before the first is written."""
    found = list(files)
    total = sum(file.size for file in found)
    if len(found) > MAX_FILES or total > max_bytes:
        raise _too_large(f"{len(found):,} files, {total:,} bytes", max_bytes)
    return found


def _too_large(what: str, max_bytes: int) -> FileRefused:
    return FileRefused(
        f"seed: {what}: at most {MAX_FILES:,} files and {max_bytes:,} bytes go in here",
        "Seed less, or raise limits.workspace_size of the profile.",
        code="content_too_large",
    )


def _walk(folder: Path, to: str) -> Iterator[Incoming]:
    """Regular files below a folder of the operator's; links and other things are left out."""
    for at, _, names in os.walk(folder, followlinks=False):
        for name in sorted(names):
            path = Path(at, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield _of_host(path, f"{to}/{path.relative_to(folder).as_posix()}")


def _of_host(path: Path, to: str) -> Incoming:
    status = path.stat()
    return Incoming(to, status.st_mode & 0o777, status.st_size, lambda: path.open("rb"))


async def _write_file(sandbox: Sandbox, path: Path, name: str, to: str, max_bytes: int) -> int:
    """A file of the host: unpacked, cloned or copied, by what is in it."""
    if await anyio.to_thread.run_sync(tarfile.is_tarfile, path):
        with await anyio.to_thread.run_sync(path.open, "rb") as archive:
            return (await unpack(sandbox, archive, to, max_bytes)).bytes
    [file] = _bounded([_of_host(path, f"{to}/{name}" if to in (".", "") else to)], max_bytes)
    if await anyio.to_thread.run_sync(is_bundle, path):
        await clone_bundle(sandbox, path, to)
        return file.size
    return await write_files(sandbox, [file])


async def _write_remote(sandbox: Sandbox, source: Source, to: str, max_bytes: int) -> int:
    if await anyio.to_thread.run_sync(source.is_folder):
        found = await anyio.to_thread.run_sync(lambda: [_remote(file, to) for file in source.files()])
        return await write_files(sandbox, _bounded(found, max_bytes), at_once=16)
    with tempfile.NamedTemporaryFile(prefix="sandgate-seed-") as copy:
        await anyio.to_thread.run_sync(source.copy, copy, max_bytes)
        copy.flush()
        return await _write_file(sandbox, Path(copy.name), source.name, to, max_bytes)


def _remote(file: SourceFile, to: str) -> Incoming:
    if ".." in file.path.split("/"):
        raise FileRefused(f"seed: {file.path[:200]!r} does not stay below the target", code="invalid_path")
    return Incoming(f"{to}/{file.path}", 0o644, file.size, file.open)
