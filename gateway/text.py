"""Bytes as text for people and models: nothing cut in two, nothing lost silently."""

import codecs
import difflib
import unicodedata
from collections.abc import Iterable


def joined(head: bytes, tail: bytes, total: int) -> str:
    """Head and tail as text, with a line between them that says how much is missing; no character is cut in two."""
    if not tail:
        return head.decode(errors="replace")
    left_out = total - len(head) - len(tail)
    return f"{decode_head(head)}\n... {left_out:,} bytes left out ...\n{decode_tail(tail)}"


def decode_head(head: bytes) -> str:
    """Text of bytes that were cut at their end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(head)


def decode_tail(tail: bytes) -> str:
    """Text of bytes that were cut at their start: up to three continuation bytes are dropped."""
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    return tail[start:].decode(errors="replace")


def is_text(head: bytes) -> bool:
    """Whether bytes, perhaps cut at their end, are UTF-8 without NUL."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def whole_characters(data: bytes) -> bytes:
    """The bytes without an unfinished UTF-8 character at their end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if needed > back else data
        if byte & 0xC0 != 0x80:
            return data
    return data


def printable(text: str, *, keep: str = "") -> str:
    """Text for a terminal, a log or a page: control, direction and surrogate characters shown as escapes, `keep`
    (such as newline and tab) aside."""
    return "".join(_escaped(one) if unicodedata.category(one) in _HOSTILE and one not in keep else one for one in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name that is close, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


_HOSTILE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
