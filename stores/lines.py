"""Lines of a stored object, in bounded memory whatever the lines are. A line ends at `\\n` and nothing else."""

import codecs
from array import array
from dataclasses import dataclass
from typing import Final, Self

from stores.backend import Reader, blocks

INDEX_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LinesPage:
    """Some lines, without their ends; bytes that are not UTF-8 are replaced.

    `first..last` is what is here, 1-based; `last` is `first - 1` where nothing is. `total` is known only where the
    page reaches the end of the object. `truncated` tells that `max_bytes` ended the page before the wanted last
    line; a line that does not fit alone is cut, and goes on at byte `end_offset`.
    """

    lines: tuple[str, ...]
    first: int
    last: int
    total: int | None
    truncated: bool
    start_offset: int
    end_offset: int


class LineIndex:
    """How many lines end in each whole MiB of an object, counted as it is written: 4 bytes a MiB.

    With it a line far inside is found by reading one MiB instead of all before it.
    """

    def __init__(self) -> None:
        self._counts = array("I")
        self._ended = 0
        self._filled = 0

    def add(self, chunk: bytes) -> None:
        """Count the next bytes."""
        position = 0
        while position < len(chunk):
            end = min(len(chunk), position + INDEX_BLOCK - self._filled)
            self._ended += chunk.count(b"\n", position, end)
            self._filled += end - position
            position = end
            if self._filled == INDEX_BLOCK:
                self._counts.append(self._ended)
                self._ended = self._filled = 0

    def to_bytes(self) -> bytes:
        return self._counts.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        index = cls()
        index._counts.frombytes(data)
        return index

    def ended_before(self, offset: int) -> tuple[int, int]:
        """An offset at or before the given one, and how many lines end before it."""
        block = min(offset // INDEX_BLOCK, len(self._counts))
        return block * INDEX_BLOCK, sum(self._counts[:block])

    def before(self, number: int) -> tuple[int, int]:
        """Where to begin looking for the line, and how many lines end before that."""
        passed = 0
        for block, ended in enumerate(self._counts):
            if passed + ended >= number - 1:
                return block * INDEX_BLOCK, passed
            passed += ended
        return len(self._counts) * INDEX_BLOCK, passed


def page(reader: Reader, first: int, last: int, max_bytes: int, index: LineIndex | None = None) -> LinesPage:
    """Return the lines `first..last` (1-based, inclusive), at most `max_bytes` stored bytes of them."""
    if first < 1 or last < first or max_bytes < 1:
        raise ValueError("lines count from 1, and a page has room for something")
    start, passed = _find_line(reader, first, index or LineIndex())
    if passed < first - 1 or start >= reader.size:
        return LinesPage((), first, first - 1, passed, False, reader.size, reader.size)
    window = reader.read(start, min(max_bytes, reader.size - start))
    return _cut(window, start, first, last, at_end=start + len(window) == reader.size)


def _find_line(reader: Reader, number: int, index: LineIndex) -> tuple[int, int]:
    """Return where the line begins and how many lines are before it; at the end, how many there are."""
    if number == 1:
        return 0, 0
    position, passed = index.before(number)
    for block in blocks(reader, position):
        count = block.count(b"\n")
        if passed + count >= number - 1:
            return position + _after_newlines(block, number - 1 - passed), number - 1
        passed += count
        position += len(block)
    unfinished = reader.size > 0 and reader.read(reader.size - 1, 1) != b"\n"
    return reader.size, passed + unfinished


def _after_newlines(block: bytes, count: int) -> int:
    position = 0
    for _ in range(count):
        position = block.index(b"\n", position) + 1
    return position


def _cut(window: bytes, start: int, first: int, last: int, *, at_end: bool) -> LinesPage:
    *whole, rest = window.split(b"\n")
    if at_end and rest:
        whole.append(rest)
    total = first - 1 + len(whole) if at_end else None
    if not whole:
        text, used = _decode_start(rest)
        return LinesPage((text,), first, first, None, True, start, start + used)
    taken = whole[: last - first + 1]
    end = start + min(sum(len(line) + 1 for line in taken), len(window))
    truncated = len(taken) < last - first + 1 and not at_end
    lines = tuple(line.decode("utf-8", "replace") for line in taken)
    return LinesPage(lines, first, first + len(taken) - 1, total, truncated, start, end)


def _decode_start(data: bytes) -> tuple[str, int]:
    """Decode all but a character cut at the end, if there is more; return also how many bytes that took."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    left, _ = decoder.getstate()
    if not text:
        return data.decode("utf-8", "replace"), len(data)
    return text, len(data) - len(left)
