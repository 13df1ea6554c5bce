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
    return _parts_match(path.split("/"), pattern.split("/"))


def _parts_match(path: Sequence[str], pattern: Sequence[str]) -> bool:
    reachable = {0}
    for part in pattern:
        if part == "**":
            reachable = set(range(min(reachable, default=len(path) + 1), len(path) + 1))
        else:
            reachable = {at + 1 for at in reachable if at < len(path) and fnmatchcase(path[at], part)}
    return len(path) in reachable or (bool(pattern) and pattern[-1] == "**" and bool(reachable))
