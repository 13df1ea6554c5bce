"""Permissions: which calls a session may make. Advice about intent; the sandbox is the boundary."""

import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, Self, get_args

import anyio.to_thread
from pydantic import Field, JsonValue, TypeAdapter, ValidationError, model_validator

from gateway.errors import Unprocessable
from gateway.hooks.script import Script, read_script
from gateway.matching import matches
from gateway.models import Arguments, Wire

Mode = Literal["auto", "ask", "deny"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
"""The later the stricter."""
COMMAND_TOOL, COMMAND_ARGUMENT = "bash", "command"
"""The tool whose calls command patterns are about, and the argument that holds the command."""

CommandPattern = Annotated[str, Field(pattern=r"\S", max_length=1000)]
ArgumentPattern = Annotated[dict[str, Annotated[str, Field(max_length=1000)]], Field(min_length=1)]
Pattern = CommandPattern | ArgumentPattern


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the rules say of a call, and by which pattern, for people; empty where a mode says it. `certain` is false
    where the call could not be read well enough to tell whether the pattern matches."""

    mode: Mode
    pattern: str = ""
    certain: bool = True


class PermissionRule(Wire):
    """For the tools (names or globs) that it matches: `deny`, then `ask`, then `allow` patterns, else `otherwise`.

    A pattern is a command of `bash` ("git push *", word by word, a `*` of its own for any number of words), or globs
    over the texts of arguments ({file_path = "*.env"}), all of which must match. Without `otherwise` it is the
    policy's, and at least `ask` where there are `allow` patterns.
    """

    tools: tuple[str, ...] = Field(min_length=1)
    deny: tuple[Pattern, ...] = ()
    ask: tuple[Pattern, ...] = ()
    allow: tuple[Pattern, ...] = ()
    otherwise: Mode | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.patterns and self.otherwise is None:
            raise ValueError("a rule needs 'deny', 'ask', 'allow' or 'otherwise'")
        if any(isinstance(one, str) for one in self.patterns) and not matches(COMMAND_TOOL, self.tools):
            raise ValueError(f"a text is a command of {COMMAND_TOOL}; for other tools write {{argument = glob}}")
        return self

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        return (*self.deny, *self.ask, *self.allow)

    def decide(self, tool: str, arguments: Arguments, default: Mode) -> Ruling:
        """The outcome for a call of a tool that this matches. What may be denied and cannot be told is asked about."""
        script = self._script(tool, arguments)
        if (pattern := _first(self.deny, arguments, script)) is not None:
            return Ruling("deny", _shown(pattern))
        if (pattern := _first(self.ask, arguments, script)) is not None:
            return Ruling("ask", _shown(pattern))
        if (pattern := _first((*self.deny, *self.ask), arguments, script, may=True)) is not None:
            return Ruling("ask", _shown(pattern), certain=False)
        if self._allows(arguments, script):
            return Ruling("auto")
        return Ruling(self.otherwise or (_stricter("ask", default) if self.allow else default))

    def denied_by(self, tool: str, arguments: Arguments) -> str:
        """The `deny` pattern that certainly matches, or nothing."""
        pattern = _first(self.deny, arguments, self._script(tool, arguments))
        return "" if pattern is None else _shown(pattern)

    def _script(self, tool: str, arguments: Arguments) -> Script | None:
        command = arguments.get(COMMAND_ARGUMENT)
        if tool != COMMAND_TOOL or not any(isinstance(one, str) for one in self.patterns):
            return None
        return read_script(command) if isinstance(command, str) else Script()

    def _allows(self, arguments: Arguments, script: Script | None) -> bool:
        if any(isinstance(one, dict) and _globs_match(one, arguments, strictly=True) for one in self.allow):
            return True
        return script is not None and script.runs_only([one for one in self.allow if isinstance(one, str)])


class PermissionPolicy(Wire):
    """The first rule that matches a tool decides; `otherwise` decides where none does."""

    otherwise: Mode = "auto"
    rules: tuple[PermissionRule, ...] = ()

    def decide(self, tool: str, arguments: Arguments) -> Ruling:
        rule = self._rule(tool)
        return Ruling(self.otherwise) if rule is None else rule.decide(tool, arguments, self.otherwise)

    def denied_by(self, tool: str, arguments: Arguments) -> str:
        """The `deny` pattern that certainly matches, or nothing."""
        rule = self._rule(tool)
        return "" if rule is None else rule.denied_by(tool, arguments)

    def reads(self, tool: str) -> bool:
        """Whether the arguments are looked at."""
        rule = self._rule(tool)
        return rule is not None and bool(rule.patterns)

    def _rule(self, tool: str) -> PermissionRule | None:
        return next((rule for rule in self.rules if matches(tool, rule.tools)), None)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The profile's policy and the session's own; of the two outcomes the stricter holds."""

    policies: tuple[PermissionPolicy, ...]

    def frees(self, tool: str) -> bool:
        """Whether every call of the tool runs, whatever its arguments."""
        return all(not one.reads(tool) and one.decide(tool, {}).mode == "auto" for one in self.policies)

    async def decide(self, tool: str, original: Arguments, final: Arguments) -> Ruling:
        """Judge the final arguments, and by the deny patterns the original ones, too."""
        if not any(policy.reads(tool) for policy in self.policies):
            return self._decided(tool, original, final)
        return await anyio.to_thread.run_sync(self._decided, tool, original, final)  # it takes up to 0.1 s a policy

    def _decided(self, tool: str, original: Arguments, final: Arguments) -> Ruling:
        if original != final:
            for policy in self.policies:
                if pattern := policy.denied_by(tool, original):
                    return Ruling("deny", pattern)
        rulings = [policy.decide(tool, final) for policy in self.policies]
        return max(rulings, key=lambda one: MODES.index(one.mode), default=Ruling("auto"))


def _first(
    patterns: Iterable[Pattern], arguments: Arguments, script: Script | None, *, may: bool = False
) -> Pattern | None:
    """The first pattern that matches, or that may match."""
    for pattern in patterns:
        if isinstance(pattern, dict):
            if _globs_match(pattern, arguments):
                return pattern
        elif script is not None and (script.may_run(pattern) if may else script.runs(pattern)):
            return pattern
    return None


def _globs_match(globs: dict[str, str], arguments: Arguments, *, strictly: bool = False) -> bool:
    return all(name in arguments and _glob_matches(glob, arguments[name], strictly) for name, glob in globs.items())


def _glob_matches(glob: str, value: JsonValue, strictly: bool) -> bool:
    """Over the whole text. `strictly` never matches a path that climbs; else a detour does not hide one."""
    text = value if isinstance(value, str) else json.dumps(value)
    if strictly:
        return ".." not in text.split("/") and fnmatchcase(text, glob)
    return fnmatchcase(text, glob) or fnmatchcase(posixpath.normpath(text), glob)


def _stricter(one: Mode, other: Mode) -> Mode:
    return max(one, other, key=MODES.index)


def _shown(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else ", ".join(f"{name} = {glob}" for name, glob in pattern.items())


_POLICY: TypeAdapter[PermissionPolicy | Mode] = TypeAdapter(PermissionPolicy | Mode)


def session_policy(value: Any) -> PermissionPolicy:
    """Read a session's `permission`: a mode or a policy. Raises Unprocessable naming what is wrong."""
    if isinstance(value, str) and value not in MODES:
        raise Unprocessable("permission: no such mode", "Give 'auto', 'ask', 'deny' or a policy with rules.")
    try:
        parsed = _POLICY.validate_python(value)
    except ValidationError as error:
        raise Unprocessable(
            f"permission: {error.errors()[0]['msg'].removeprefix('Value error, ')}",
            "Give 'auto', 'ask', 'deny' or {otherwise, rules: [{tools, deny, ask, allow, otherwise}]}.",
        ) from error
    return PermissionPolicy(otherwise=parsed) if isinstance(parsed, str) else parsed
