"""Script: what a shell command says, as far as that can be read without running it."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bashkit import Bash, ScriptAnalysis

from gateway.matching import words_match

MAX_SCRIPT_CHARACTERS: Final = 32 * 1024
"""A longer script is not read: the worst nesting of this size takes 0.1 s (measured, bashkit 0.20)."""
RUNNERS: Final = frozenset(
    """
    ash bash busybox chroot csh dash doas entr env find fish flock ionice ksh ltrace mksh nice nohup nsenter parallel
    script setarch setsid sh ssh stdbuf strace su sudo taskset tcsh time timeout unshare watch xargs zsh
    . [ alias bind builtin command compgen complete coproc declare enable eval exec export fc getopts hash let
    local mapfile printf read readarray readonly set shopt source test trap typeset unalias unset wait
    """.split()  # noqa: SIM905 - forty lines of one word each say less
)
"""Programs that run what their arguments say, and builtins that evaluate a word or change what a later one means."""
EXPANDS: Final = frozenset("*?[{~$`")
"""Outside quotes these make of a word something that is known only when it runs."""

_QUOTED: Final = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
_SEPARATORS: Final = frozenset({";", "&&", "||", "|", "|&", "&", "(", ")"})
_DUPLICATES: Final = (("2", ">&", "1"), (">&", "2"), (">&", "1"))

Words = tuple[str | None, ...]
"""One simple command; a word that is known only when it runs is None."""


@dataclass(frozen=True, slots=True)
class Script:
    """Its simple commands, also those inside substitutions and functions.

    `readable` is False where it hides commands (it does not parse, evaluates text, computes a command's name).
    `complete` says that these commands, every word of them known, are all that it does: no assignment, no redirect
    that writes, no expansion, no keyword.
    """

    commands: tuple[Words, ...] = ()
    readable: bool = False
    complete: bool = False

    def runs(self, pattern: str) -> bool:
        """Whether a command is one that the pattern names, by whatever path or through whichever runner."""
        return any(words_match(_known(one), pattern.split()) for words in self.commands for one in _spellings(words))

    def may_run(self, pattern: str) -> bool:
        """The same, where each word that is known only when it runs may be any."""
        return not self.readable or any(
            words_match(one, pattern.split()) for words in self.commands for one in _spellings(words)
        )

    def runs_only(self, patterns: Sequence[str]) -> bool:
        """Whether it is complete and each command is named by a pattern; a runner only by the very words."""
        return (
            self.complete
            and bool(self.commands)
            and all(any(_is_named(words, pattern.split()) for pattern in patterns) for words in self.commands)
        )


def read_script(text: str) -> Script:
    """Read a script without running it; what cannot be read is not `readable`, never an error."""
    if len(text) > MAX_SCRIPT_CHARACTERS:
        return Script()
    try:
        found = Bash().analyze(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # no syntax, a lone surrogate, or a panic of the parser's, which is no Exception
        return Script()
    commands = tuple((one.name, *one.args) for one in found.commands if one.name is not None or one.args)
    readable = not (found.is_opaque or found.truncated)
    return Script(commands, readable, readable and _is_all(text, found, commands))


def _is_all(text: str, found: ScriptAnalysis, commands: Sequence[Words]) -> bool:
    """Whether the commands explain every word of the text: two readers, bashkit's and Python's, must find the same.

    bashkit passes over what is no simple command, such as `(( $(date) ))` and `for PATH in x`.
    """
    if found.functions or any(one.is_write or one.path is None for one in found.redirects):
        return False
    if any(one.assignments for one in found.commands) or EXPANDS & set(_QUOTED.sub("", text)):
        return False
    words = [word for words in commands for word in words]
    return None not in words and words == _words(text)


def _words(text: str) -> list[str] | None:
    """The words of plain commands, without what stands between them; None for anything more."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, ""
    try:
        tokens = list(reader)
    except ValueError:
        return None
    words, at = [], 0
    while at < len(tokens):
        skipped = _separator(tokens, at)
        if not skipped:
            words.append(tokens[at])
        at += skipped or 1
    return words


def _separator(tokens: Sequence[str], at: int) -> int:
    """How many tokens from here on are no words: operators, `< file`, and one descriptor made another's copy."""
    for duplicate in _DUPLICATES:
        if tuple(tokens[at : at + len(duplicate)]) == duplicate:
            return len(duplicate)
    if tokens[at] == "<":
        return 2
    return int(tokens[at] in _SEPARATORS)


def _spellings(words: Words) -> Iterator[Words]:
    """A command as it stands, by its bare name, and what it would run where it is a runner."""
    name = words[0]
    if name is None:
        yield words
        return
    bare = posixpath.basename(name)
    yield words
    yield (bare, *words[1:])
    if bare in RUNNERS:
        for start in range(1, len(words)):
            inner = words[start]
            yield words[start:] if inner is None else (posixpath.basename(inner), *words[start + 1 :])


def _known(words: Words) -> Words:
    """With a word that no pattern but `*` matches in the place of each that is not known."""
    return tuple("\0" if word is None else word for word in words)


def _is_named(words: Words, pattern: Sequence[str]) -> bool:
    if posixpath.basename(words[0] or "") in RUNNERS:
        return list(words) == list(pattern)
    return words_match(words, pattern)
