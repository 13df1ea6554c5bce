"""Many small files in one call, which costs ten times what one of them does: how they are gathered, what travels over
a direct channel, and how it is cut into files again.

Going in, each is a header (length of its path, mode, size), its path and its bytes. Coming out, each is a line
(`ok SIZE`, or the code of a refusal) and its bytes; that side is not trusted.
"""

import os
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from sandboxes.errors import FILE_CODES, FileCode, FileRefused
from sandboxes.sandbox import SmallFile

SMALL_BYTES: Final = 64 * 1024
_BATCH_FILES: Final = 500
_BATCH_BYTES: Final = 4 << 20
T = TypeVar("T")
_HEADER: Final = struct.Struct("!III")
_LINE_BYTES: Final = 32
_OK: Final = re.compile(rb"ok (\d{1,12})")
_ANSWER: Final = re.compile(rb"(\d{1,9}) ([a-z_]{1,32})")


def batches(files: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Runs of files to be moved in one call, in their order; one over `SMALL_BYTES` is a run of its own."""
    batch: list[T] = []
    left = _BATCH_BYTES
    for file in files:
        large = size(file) > SMALL_BYTES
        if batch and (large or len(batch) == _BATCH_FILES or size(file) > left):
            yield batch
            batch, left = [], _BATCH_BYTES
        if large:
            yield [file]
            continue
        batch.append(file)
        left -= size(file)
    if batch:
        yield batch


def frame(path: str, file: SmallFile) -> bytes:
    """One file on its way in, at the absolute path."""
    name = os.fsencode(path)
    return _HEADER.pack(len(name), file.mode & 0o777, len(file.content)) + name + file.content


def refusal(answer: bytes, files: Sequence[SmallFile]) -> FileRefused:
    """What the answer to a bulk write means: the place and the code of the file that could not be written."""
    match = _ANSWER.fullmatch(answer)
    if match is None or int(match[1]) >= len(files):
        return _nonsense("what was written")
    return _refused(files[int(match[1])].path, match[2])


class Gathered:
    """Cuts the answer to a bulk read into files; memory stays at one file and one chunk."""

    def __init__(self, chunks: AsyncIterator[bytes], max_bytes: int) -> None:
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    async def next(self, path: str) -> bytes | FileRefused:
        """The next file, or why there is none. Raises FileRefused where the answer makes no sense."""
        line = await self._line(path)
        match = _OK.fullmatch(line)
        if match is None:
            return _refused(path, line)
        size = int(match[1])
        if size > self._max_bytes:
            raise _nonsense(path)
        return await self._take(size, path)

    async def _line(self, path: str) -> bytes:
        while (end := self._buffer.find(b"\n", 0, _LINE_BYTES)) < 0:
            if len(self._buffer) >= _LINE_BYTES:
                raise _nonsense(path)
            await self._more(path)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def _take(self, size: int, path: str) -> bytes:
        while len(self._buffer) < size:
            await self._more(path)
        content = bytes(self._buffer[:size])
        del self._buffer[:size]
        return content

    async def _more(self, path: str) -> None:
        try:
            self._buffer += await anext(self._chunks)
        except StopAsyncIteration:
            raise _nonsense(path) from None


def _refused(path: str, word: bytes) -> FileRefused:
    code: FileCode = next((code for code in FILE_CODES if code.encode() == word), "sandbox_helper_failed")
    return FileRefused(f"{path}: {code.replace('_', ' ')}", code=code)


def _nonsense(path: str) -> FileRefused:
    return FileRefused(f"{path}: the answer makes no sense", code="sandbox_helper_failed")
