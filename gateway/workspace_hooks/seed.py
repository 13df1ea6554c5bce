"""SeedWorkspace: what a workspace starts with."""

import base64
import binascii
import os
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.to_thread

from gateway.errors import Unprocessable
from gateway.models import SeedFile
from sandboxes import Sandbox, SandboxContext, SandboxHook, file_chunks, unpack

MAX_FILES: Final = 100_000
MAX_BYTES: Final = 16 << 30
"""Of a tar of the operator's own; the workspace's size is the limit that counts."""


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
    """A folder, a file or a tar of the operator's, placed at `to` below the workspace."""

    source: Path
    to: str = "."


class SeedWorkspace(SandboxHook):
    """Writes files through the sandbox, as its user: a link in the workspace is never followed. Skips what a restored
    workspace already has."""

    def __init__(self, sources: Sequence[Inline | FromHost]) -> None:
        self._sources = tuple(sources)

    async def on_create(self, ctx: SandboxContext) -> None:
        if ctx.restored:
            return
        for source in self._sources:
            if isinstance(source, Inline):
                await _write_inline(ctx.sandbox, source)
            else:
                await _write_from_host(ctx.sandbox, source)


async def _write_inline(sandbox: Sandbox, source: Inline) -> None:
    for file in source.files:
        await sandbox.write(file.path, _content(file), mode=file.mode)


def _content(file: SeedFile) -> bytes:
    if (file.text is None) == (file.base64 is None):
        raise Unprocessable(f"seed: {file.path}: give exactly one of 'text' and 'base64'")
    if file.text is not None:
        return file.text.encode(errors="surrogatepass")
    try:
        return base64.b64decode(file.base64 or "", validate=True)
    except binascii.Error as error:
        raise Unprocessable(f"seed: {file.path}: not base64: {error}") from error


async def _write_from_host(sandbox: Sandbox, source: FromHost) -> None:
    if source.source.is_dir():
        for path, relative in await anyio.to_thread.run_sync(_walk, source.source):
            await _copy(sandbox, path, f"{source.to}/{relative}")
    elif await anyio.to_thread.run_sync(_is_tar, source.source):
        with await anyio.to_thread.run_sync(source.source.open, "rb") as archive:
            await unpack(sandbox, archive, source.to, MAX_BYTES)
    elif source.source.is_file():
        to = f"{source.to}/{source.source.name}" if source.to in (".", "") else source.to
        await _copy(sandbox, source.source, to)
    else:
        raise FileNotFoundError(f"seed: {source.source}: no such file or folder")


def _is_tar(path: Path) -> bool:
    return path.is_file() and tarfile.is_tarfile(path)


def _walk(folder: Path) -> list[tuple[Path, str]]:
    """Regular files below a folder of the operator's; links and other things are left out."""
    found = []
    for at, _, names in os.walk(folder, followlinks=False):
        for name in sorted(names):
            path = Path(at, name)
            if stat.S_ISREG(path.lstat().st_mode):
                found.append((path, path.relative_to(folder).as_posix()))
    if len(found) > MAX_FILES:
        raise ValueError(f"seed: {folder}: {len(found):,} files; at most {MAX_FILES:,}")
    return found


async def _copy(sandbox: Sandbox, path: Path, to: str) -> None:
    with await anyio.to_thread.run_sync(path.open, "rb") as file:
        await sandbox.write(to, file_chunks(file), mode=os.fstat(file.fileno()).st_mode & 0o777)
