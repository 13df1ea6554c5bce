"""Searching a stored object line by line, in time linear in its size whatever the pattern (RE2)."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from stores.backend import Reader, blocks
from stores.errors import PatternRefused, StoreUnavailable
from stores.lines import LineIndex

MAX_PATTERN: Final = 2000
MAX_CONTEXT: Final = 50
SHOWN_BYTES: Final = 1000
"""How much of one line is shown; of a longer one the part around the match."""

_BLOCK_BYTES: Final = 256 * 1024
_LONG_LINE: Final = 1 << 20
_BEFORE_MATCH: Final = 200
_CONTEXT_WINDOW: Final = 16 * 1024
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_CLASS: Final = re.compile(r"(?<!\\)\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MULTILINE_OFF: Final = re.compile(r"\(\?[A-Za-z]*-[A-Za-z]*m")

Search = Callable[[bytes, int, int], tuple[int, int] | None]
"""Find the first match between two positions: where it begins and ends."""


@dataclass(frozen=True, slots=True)
class GrepLine:
    """One line, or with `cut` a part of it; `offset` is where in the object the text begins.

    `matched` is False for lines of context.
    """

    number: int
    text: str
    matched: bool
    cut: bool
    offset: int


@dataclass(frozen=True, slots=True)
class GrepPage:
    """Lines in order, each once; `truncated` tells that a limit ended the search before the object did."""

    lines: tuple[GrepLine, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class _Hit:
    line: GrepLine
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole lines (or a part of one over 1 MiB): `text[start:stop]`, of a text whose first byte is at `offset`."""

    text: bytes
    start: int
    stop: int
    offset: int


def grep(
    reader: Reader,
    pattern: str,
    *,
    max_matches: int,
    max_bytes: int,
    ignore_case: bool = False,
    context: int = 0,
    index: LineIndex | None = None,
) -> GrepPage:
    """Return the lines that the pattern matches somewhere, with `context` lines before and after each.

    The syntax is RE2's, whose `\\b`, `\\w` and `\\d` know ASCII only; bytes that are not UTF-8 match nothing. A line
    over 1 MiB is searched in pieces, so that a match across two of them is missed. At least one match is returned,
    however small `max_bytes` is. An index spares counting lines. Raises PatternRefused.
    """
    if max_matches < 1 or not 0 <= context <= MAX_CONTEXT:
        raise ValueError(f"at least one match, and at most {MAX_CONTEXT} lines of context")
    search = compile_pattern(pattern, ignore_case=ignore_case)
    lines: dict[int, GrepLine] = {}
    size = 0
    for matches, hit in enumerate(_hits(reader, search, index or LineIndex())):
        found = [line for line in (*_around(reader, hit, context), hit.line) if _is_news(line, lines)]
        size += sum(len(line.text.encode()) for line in found)
        if matches == max_matches or (matches and size > max_bytes):
            return GrepPage(_in_order(lines), True)
        lines.update((line.number, line) for line in found)
    return GrepPage(_in_order(lines), False)


def compile_pattern(pattern: str, *, ignore_case: bool = False) -> Search:
    """Compile for searching in many lines at once, no match crossing a line's end. Raises PatternRefused."""
    # google-re2 comes with sandgate[server]; a client has no use for it
    try:
        import re2
    except ImportError as error:
        raise StoreUnavailable("searching needs google-re2", "pip install 'sandgate[server]'") from error

    _check_pattern(pattern)
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True
    options.case_sensitive = not ignore_case
    try:
        compiled = re2.compile(f"(?m){pattern}", options)
    except re2.error as error:
        raise PatternRefused(f"not a pattern in RE2's syntax: {_reason(error)}") from error
    # its cache would keep up to 8 MiB for each of 128 patterns
    re2.purge()

    def search(text: bytes, start: int, stop: int) -> tuple[int, int] | None:
        match = compiled.search(text, start, stop)
        return (match.start(), match.end()) if match else None

    return search


def _check_pattern(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN:
        raise PatternRefused(f"a pattern has at most {MAX_PATTERN} characters")
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise PatternRefused("a pattern is valid Unicode") from error
    escapes = {match.group(1) for match in _ESCAPE.finditer(_CLASS.sub("", pattern))}
    if "\n" in pattern or "n" in escapes:
        raise PatternRefused("a pattern is matched within one line and asks for no newline")
    if _MULTILINE_OFF.search(pattern) or escapes & {"A", "z"}:
        raise PatternRefused("lines are searched: use ^ and $ for their ends, not \\A, \\z or (?-m)")


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


def _hits(reader: Reader, search: Search, index: LineIndex) -> Iterator[_Hit]:
    numbers, last = _Numbers(reader, index), 0
    for piece in _pieces(reader):
        for hit in _hits_in(piece, search, numbers):
            if hit.line.number != last:
                last = hit.line.number
                yield hit


def _hits_in(piece: _Piece, search: Search, numbers: "_Numbers") -> Iterator[_Hit]:
    text, position = piece.text, piece.start
    while position < piece.stop and (found := search(text, position, piece.stop)):
        start = (text.rfind(b"\n", piece.start, found[0]) + 1) or piece.start
        end = text.find(b"\n", found[1], piece.stop)
        end = piece.stop if end < 0 else end
        if start == piece.stop:  # an empty match after the last newline is no line
            return
        number = numbers.at(piece.offset + start, piece)
        line = _show(text, number, start, end, found[0], piece.offset, matched=True)
        yield _Hit(line, piece.offset + start, piece.offset + end)
        position = end + 1


def _pieces(reader: Reader) -> Iterator[_Piece]:
    """All lines, where they lie in the blocks that are read; only a line across two of these is put together."""
    rest, position = b"", 0
    for block in blocks(reader, block_bytes=_BLOCK_BYTES):
        first, stop = block.find(b"\n") + 1, block.rfind(b"\n") + 1
        begun = position - len(rest)
        position += len(block)
        if not first:
            rest += block
            if len(rest) >= _LONG_LINE:
                yield _Piece(rest, 0, len(rest), begun)
                rest = b""
            continue
        if rest:
            line = rest + block[:first]
            yield _Piece(line, 0, len(line), begun)
        yield _Piece(block, first if rest else 0, stop, position - len(block))
        rest = block[stop:]
    if rest:
        yield _Piece(rest, 0, len(rest), position - len(rest))


class _Numbers:
    """The number of the line that begins at an offset; line ends are counted only up to where somebody asks."""

    def __init__(self, reader: Reader, index: LineIndex) -> None:
        self._reader = reader
        self._index = index
        self._offset = 0
        self._ended = 0

    def at(self, offset: int, piece: _Piece) -> int:
        """Offsets do not go back; the piece is where this one lies."""
        known, ended = self._index.ended_before(offset)
        if known > self._offset:
            self._offset, self._ended = known, ended
        while self._offset < offset:
            stop = offset
            if self._offset >= piece.offset:
                self._ended += piece.text.count(b"\n", self._offset - piece.offset, offset - piece.offset)
            else:
                stop = min(piece.offset, self._offset + self._reader.fetch_bytes)
                self._ended += self._reader.read(self._offset, stop - self._offset).count(b"\n")
            self._offset = stop
        return self._ended + 1


def _around(reader: Reader, hit: _Hit, context: int) -> Iterator[GrepLine]:
    """Yield the lines beside a match as far as 16 KiB before and after it hold them whole."""
    if not context:
        return
    position = hit.start
    for back, line in enumerate(_lines_before(reader, hit.start)[: -context - 1 : -1], 1):
        position -= len(line) + 1
        yield _show(line, hit.line.number - back, 0, len(line), 0, position)
    position = hit.end + 1
    for forth, line in enumerate(_lines_behind(reader, hit.end)[:context], 1):
        yield _show(line, hit.line.number + forth, 0, len(line), 0, position)
        position += len(line) + 1


def _lines_before(reader: Reader, position: int) -> list[bytes]:
    begin = max(0, position - _CONTEXT_WINDOW)
    *whole, rest = reader.read(begin, position - begin).split(b"\n")
    if rest:  # the hit is inside of a line searched in pieces
        return []
    return whole[1:] if begin else whole


def _lines_behind(reader: Reader, position: int) -> list[bytes]:
    stop = min(reader.size, position + _CONTEXT_WINDOW)
    ended, *whole = reader.read(position, stop - position).split(b"\n")
    if ended or not whole:
        return []
    rest = whole.pop()
    return [*whole, rest] if rest and stop == reader.size else whole


def _show(
    text: bytes, number: int, start: int, end: int, match: int, offset: int, *, matched: bool = False
) -> GrepLine:
    cut = end - start > SHOWN_BYTES
    if cut:
        start = _character_start(text, min(max(start, match - _BEFORE_MATCH), end - SHOWN_BYTES))
        end = _character_start(text, start + SHOWN_BYTES)
    return GrepLine(number, text[start:end].decode("utf-8", "replace"), matched, cut, offset + start)


def _character_start(text: bytes, position: int) -> int:
    """Return the beginning of the UTF-8 character that holds the position, if it looks like one."""
    for start in range(position, max(position - 4, -1), -1):
        if start == len(text) or text[start] & 0xC0 != 0x80:
            return start
    return position


def _is_news(line: GrepLine, known: dict[int, GrepLine]) -> bool:
    return line.matched or line.number not in known


def _in_order(lines: dict[int, GrepLine]) -> tuple[GrepLine, ...]:
    return tuple(lines[number] for number in sorted(lines))
