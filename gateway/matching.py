"""What a pattern means: for tools an exact name, a glob, or `*`; for files a glob with `**`."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

EXACT, LIST, GLOB, ANY = 0, 1, 2, 3


def is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def matches(tool: str, patterns: Iterable[str]) -> bool:
    """Whether any pattern is the tool's name or a glob (case matters) that covers it."""
    return any(pattern == tool or fnmatchcase(tool, pattern) for pattern in patterns)


def rank(tool: str, patterns: Sequence[str]) -> int | None:
    """How exactly the patterns name the tool: 0 its own name, 1 one of several, 2 a glob, 3 `*`; None if not at all."""
    if tool in patterns:
        return EXACT if len(patterns) == 1 else LIST
    if any(pattern != "*" and fnmatchcase(tool, pattern) for pattern in patterns):
        return GLOB
    return ANY if "*" in patterns else None


def glob_matches(path: str, pattern: str) -> bool:
    """Whether a relative path matches: `*` and `?` within a name, `**` for any number of folders."""
    return _parts_match(path.split("/"), pattern.split("/"), "**")


def words_match(words: Sequence[str | None], pattern: Sequence[str]) -> bool:
    """Whether a command matches word by word; a `*` of its own stands for any number of words, none included.

    A word that is None is not known: it may be any number of words, and matches what they could.
    """
    return _parts_match(words, pattern, "*")


def _parts_match(parts: Sequence[str | None], pattern: Sequence[str], many: str) -> bool:
    reachable = _over_unknown(parts, {0})
    for one in pattern:
        if one == many:
            reachable = set(range(min(reachable, default=len(parts) + 1), len(parts) + 1))
        else:
            reachable = _over_unknown(
                parts, {after for at in reachable if (after := _step(parts, at, one)) is not None}
            )
    return len(parts) in reachable


def _step(parts: Sequence[str | None], at: int, pattern: str) -> int | None:
    """Where one part of the pattern leads from a place; None where it does not fit."""
    if at == len(parts):
        return None
    part = parts[at]
    if part is None:
        return at
    return at + 1 if fnmatchcase(part, pattern) else None


def _over_unknown(parts: Sequence[str | None], places: set[int]) -> set[int]:
    """The places, and those behind parts that may be nothing."""
    for at in range(len(parts)):
        if at in places and parts[at] is None:
            places.add(at + 1)
    return places
