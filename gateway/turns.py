"""Turns: what an agent's loop has reported of its turns, for the hooks that judge them and for the record."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import anyio

from gateway.errors import NotFound, Unprocessable
from gateway.hooks.hook import TurnInfo
from gateway.models import TokenUsage, TurnOutcome, TurnRecord

MOST_OPEN: Final = 100
"""Turns of one session that may be open; a new one then takes the place of the oldest."""


@dataclass
class Turn:
    """One turn that has not ended yet, or has just ended. `retries` are those in a row at each point."""

    id: str
    session_id: str
    started: float = field(default_factory=time.time)
    ended: float | None = None
    outcome: TurnOutcome | None = None
    reason: str = ""
    step_count: int = 0
    tool_call_counts: Counter[str] = field(default_factory=Counter)
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    retries: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = anyio.Lock()

    def info(self) -> TurnInfo:
        return TurnInfo(self.id, self.step_count, dict(self.tool_call_counts), self.token_usage)

    def end(self, outcome: TurnOutcome, reason: str) -> None:
        self.ended, self.outcome, self.reason = time.time(), outcome, reason

    def record(self) -> TurnRecord:
        """What is kept of it; the decisions are rows of their own."""
        return TurnRecord(
            id=self.id,
            session_id=self.session_id,
            started=self.started,
            ended=self.ended,
            outcome=self.outcome,
            reason=self.reason,
            step_count=self.step_count,
            tool_call_counts=dict(self.tool_call_counts),
            token_usage=self.token_usage,
        )


def restored(record: TurnRecord) -> Turn:
    """A turn that an earlier process left open; it may retry anew."""
    return Turn(
        record.id,
        record.session_id,
        record.started,
        step_count=record.step_count,
        tool_call_counts=Counter(record.tool_call_counts),
        token_usage=record.token_usage,
    )


class Turns:
    """The open turns of one session."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._sequence = 0
        self._open: dict[str, Turn] = {}

    def begin(self) -> Turn:
        self._sequence += 1
        turn = Turn(f"t-{self._sequence:04d}", self._session_id)
        self._open[turn.id] = turn
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return turn

    def restore(self, sequence: int, open_turns: list[TurnRecord]) -> None:
        """Go on where an earlier process stopped."""
        self._sequence = sequence
        self._open = {one.id: restored(one) for one in open_turns[-MOST_OPEN:]}

    def find(self, id: str) -> Turn:
        """An open turn. Raises NotFound, or Unprocessable where it has ended."""
        if id in self._open:
            return self._open[id]
        number = id.removeprefix("t-")
        if number.isdecimal() and id == f"t-{int(number):04d}" and 0 < int(number) <= self._sequence:
            raise Unprocessable("this turn has ended", "Begin another with POST .../turns.", code="turn_ended")
        raise NotFound("no such turn", "Begin one with POST .../turns.")

    def get(self, id: str | None) -> Turn | None:
        """The open turn of that id, if there is one."""
        return self._open.get(id) if id is not None else None

    def forget(self, turn: Turn) -> None:
        self._open.pop(turn.id, None)
