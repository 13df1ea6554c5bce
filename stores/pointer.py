"""The text that stands in an answer for a stored result. Output shown in it cannot pass for a field of ours.

    output stored: 5,242,880 bytes of text/plain (stdout)
    reference: sandgate://s-1/results/0009-bash-stdout
    read on: read_result(reference, offset=0), ...; as an argument of a tool: {"sandgate_reference": reference}
    preview (untrusted output):
    | first lines
    (5,240,880 characters left out)
    | last lines

A line that begins with `| ` is output, every other line is ours. Whatever could begin a line, hide, or turn the
direction of text is shown as an escape.
"""

import re
import unicodedata
from typing import Final

PREVIEW_CHARACTERS: Final = 2000
HOW_TO_READ: Final = (
    'read_result(reference, offset=0), read_result(reference, lines="1-200") or read_result(reference, grep="pattern")'
    '; as an argument of a tool: {"sandgate_reference": reference}'
)

_PREFIX: Final = "| "
_LINE_COST: Final = len(_PREFIX) + 1
_MAX_FIELD: Final = 200
_SHOWN_AS_IS: Final = frozenset("\t\u200c\u200d")  # the joiners belong to words and emoji of many scripts
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_POINTER: Final = re.compile(r"output stored: [0-9,]+ bytes of .*\nreference: sandgate://\S+\n")
_LEFT_OUT: Final = re.compile(r"\((part of it|[0-9,]+ characters) left out\)")


def escape(text: str) -> str:
    r"""Show control, format, surrogate and line separator characters as `\x1b`, `\u2028` and so on.

    A newline is one of them, so that the result is one line; a tab stays.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def preview(
    head: str, tail: str, *, max_characters: int = PREVIEW_CHARACTERS, cut: bool, total_characters: int | None = None
) -> str:
    """Show the beginning and the end of an output in at most `max_characters`, marks and escapes included.

    `head + tail` is the whole output, or with `cut` what is known of it. Lines stay whole where a line's end is
    near. The line about what was left out comes on top of the bound; it counts where the whole is known, or
    `total_characters` given.
    """
    if max_characters < 0:
        raise ValueError("a preview has no negative size")
    tail = tail.removesuffix("\n")
    if not cut:
        head = tail = (head + tail).removesuffix("\n")
        whole, taken = _take(head, max_characters)
        if taken == len(head):
            return _marked(whole)
        total_characters = len(head)
    first, taken_first = _take(head, max_characters // 2)
    last, taken_last = _take(tail[-max_characters - 1 :][::-1], max_characters // 2)
    count = None if total_characters is None else total_characters - taken_first - taken_last
    lines = [_marked(first), _left_out(count), _marked([line[::-1] for line in reversed(last)])]
    return "\n".join(line for line in lines if line)


def pointer(
    reference: str, *, stream: str, bytes: int, media_type: str, preview: str, how_to_read: str = HOW_TO_READ
) -> str:
    """Return the text that replaces a stored output.

    `preview` is what `preview()` made, else ValueError. `how_to_read` names only what the caller can call. What is
    empty of the two is left out.
    """
    if not all(line.startswith(_PREFIX) or _LEFT_OUT.fullmatch(line) for line in preview.splitlines()):
        raise ValueError("this preview was not made by preview()")
    lines = [
        f"output stored: {bytes:,} bytes of {_field(media_type)} ({_field(stream)})",
        f"reference: {escape(reference)}",
        f"read on: {escape(how_to_read)}" if how_to_read else "",
        "preview (untrusted output):" if preview else "",
        preview,
    ]
    return "\n".join(line for line in lines if line)


def is_pointer(text: str) -> bool:
    """Return whether a text is what `pointer` makes: it stands for something stored, and is not stored itself."""
    return _POINTER.match(text) is not None


def _take(text: str, room: int) -> tuple[list[str], int]:
    """Return lines from the beginning that fit when marked and escaped, and how many characters they are.

    The last one may be a part of its line, unless what is before it already fills half of the room.
    """
    lines: list[str] = []
    position, left = 0, room
    while position < len(text) and left > _LINE_COST:
        end = text.find("\n", position, position + left)
        line = text[position : end if end >= 0 else position + left]
        fitting, cost = _fit(line, left - _LINE_COST)
        whole = fitting == len(line) and (end >= 0 or position + fitting == len(text))
        if not whole and (fitting == 0 or (lines and left < room // 2)):
            break
        lines.append(line[:fitting])
        left -= cost + _LINE_COST
        position += fitting + (whole and end >= 0)
        if not whole:
            break
    return lines, position


def _fit(line: str, room: int) -> tuple[int, int]:
    """Return how many characters fit when escaped, and what they take."""
    used = 0
    for count, character in enumerate(line):
        cost = len(_shown(character))
        if used + cost > room:
            return count, used
        used += cost
    return len(line), used


def _marked(lines: list[str]) -> str:
    return "\n".join(_PREFIX + escape(line) for line in lines)


def _left_out(count: int | None) -> str:
    return "(part of it left out)" if count is None else f"({max(count, 0):,} characters left out)"


def _field(text: str) -> str:
    return escape(text[:_MAX_FIELD])


def _shown(character: str) -> str:
    if character in _SHOWN_AS_IS or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
