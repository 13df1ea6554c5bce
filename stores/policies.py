"""When a result is stored and replaced by a pointer. Policies look at size, never at success."""

from dataclasses import dataclass
from typing import Protocol


class Measured(Protocol):
    """How large a result's text is; characters are code points."""

    @property
    def characters(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def lines(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ResultSize:
    """The measures of one result."""

    characters: int
    bytes: int
    lines: int


class OffloadPolicy(Protocol):
    """Decides for one result of a tool. It is asked only for results that could be stored: never an empty one."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        """Return True to store it. `tool` is the canonical name; `ctx` is the context that hooks get."""
        ...


@dataclass(frozen=True, slots=True)
class AlwaysOffload:
    """Store every result."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class NeverOffload:
    """Leave every result in the answer."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Over:
    limit: int

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0:
            raise ValueError(f"{type(self).__name__} takes a whole number, zero or more")


@dataclass(frozen=True, slots=True)
class OffloadOverChars(_Over):
    """Store what has strictly more characters (code points) than the limit."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        return result.characters > self.limit


@dataclass(frozen=True, slots=True)
class OffloadOverBytes(_Over):
    """Store what has strictly more bytes than the limit."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        return result.bytes > self.limit


@dataclass(frozen=True, slots=True)
class OffloadOverLines(_Over):
    """Store what has strictly more lines than the limit."""

    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        return result.lines > self.limit
