"""Approvals: calls that a person must let run, from the question to the answer, across restarts."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import anyio

from gateway.approval_rows import ApprovalRows
from gateway.errors import NotFound, TooMany, Unprocessable
from gateway.models import Approval, ApprovalDecision, ApprovalState, Arguments, Question, ToolCall

MOST_WAITING: Final = 1000
"""How many approvals of one session may wait: each keeps its arguments whole."""
CLOCK_GRAIN_SECONDS: Final = 0.01
"""A timer may end that much before the clock of the wall says so."""


@dataclass(frozen=True, slots=True)
class ApprovalTimes:
    """How long a call waits for a decision, and how long an approval can be decided at all, and then be used."""

    wait_seconds: float = 55.0
    expires_seconds: float = 3600.0


class Approvals:
    """The approvals of one gateway. What is asked and decided is in the journal; here are only the calls that wait now.

    An approval is looked up by session, tool and digest of the final arguments. It serves one call: no two wait for
    the same, and what was decided is used once, a grant for the session aside.
    """

    def __init__(self, rows: ApprovalRows, times: ApprovalTimes) -> None:
        self._rows = rows
        self._times = times
        self._waiting: dict[str, anyio.Event] = {}
        self._changed = anyio.Event()
        self.stopping = False

    @property
    def held(self) -> int:
        """How many calls wait now."""
        return len(self._waiting)

    # the call's side

    async def ask(
        self, call: ToolCall, original: Arguments, questions: Sequence[Question], tell: Callable[[str], None]
    ) -> Approval:
        """Ask, or take up what was asked before for the same call, and wait for the decision; who listens to the call
        is told.

        What comes back is `waiting` where nobody decided within `wait_seconds`; anything else was given to this call.
        A call that is cancelled while it waits ends its approval. Raises TooMany.
        """
        digest = arguments_digest(call.arguments)
        while True:
            id = await self._earlier(call, digest) or await self._new(call, digest, original, questions)
            with self._claimed(id) as decided:
                try:
                    approval = await self._decision(id, decided, tell)
                except anyio.get_cancelled_exc_class():
                    with anyio.CancelScope(shield=True):
                        await self._expire([await self.get(id)], used=True)
                    raise
            if approval.state == "waiting":
                return approval
            if self._rows.use(id):
                self._tell()
                return approval
            if _is_grant(approval):
                return approval

    async def _earlier(self, call: ToolCall, digest: str) -> str | None:
        for one in await self._rows.of_call(call.session_id, call.tool, digest):
            if _is_grant(one) or one.id not in self._waiting:
                self._rows.claim(one.id, call.id)
                return one.id
        return None

    async def _new(self, call: ToolCall, digest: str, original: Arguments, questions: Sequence[Question]) -> str:
        if await self._rows.count_waiting(call.session_id) >= MOST_WAITING:
            raise TooMany(
                f"{MOST_WAITING:,} calls of this session wait for a decision already",
                "Wait until some are decided.",
                code="too_many_approvals",
            )
        expires = time.time() + self._times.expires_seconds
        id = self._rows.add(call, digest, original, questions, expires)
        self._tell()
        return id

    @contextmanager
    def _claimed(self, id: str) -> Iterator[anyio.Event]:
        """While this call waits, no other waits for the same approval."""
        self._waiting[id] = anyio.Event()
        try:
            yield self._waiting[id]
        finally:
            self._waiting.pop(id, None)

    async def _decision(self, id: str, decided: anyio.Event, tell: Callable[[str], None]) -> Approval:
        """The approval when it is decided, or when the wait is over. A waiting call keeps nothing of it in memory."""
        if (seconds := await self._seconds_left(id)) > 0:
            tell(f"waits for a person's decision: {id}")
        with anyio.move_on_after(seconds):
            await decided.wait()
        await self.expire_due()
        return await self.get(id)

    async def _seconds_left(self, id: str) -> float:
        approval = await self.get(id)
        if approval.state != "waiting" or self.stopping:
            return 0
        return min(self._times.wait_seconds, approval.expires - time.time() + CLOCK_GRAIN_SECONDS)

    def release(self) -> None:
        """Let every waiting call end as it is, and keep what they asked: the gateway stops."""
        self.stopping = True
        self._tell()
        for event in self._waiting.values():
            event.set()

    # the other side

    async def get(self, id: str) -> Approval:
        """One approval, its arguments whole while it waits. Raises NotFound."""
        found = await self._rows.get(id)
        if found is None:
            raise NotFound("no such approval", "GET /v1/approvals lists them.")
        return found

    async def list(
        self, state: ApprovalState | None = "waiting", *, after: int = 0, limit: int = 100, wait_seconds: float = 0
    ) -> Sequence[Approval]:
        """Those in that state (any: None) that changed after the revision `after`, in the order of their change.

        Where there is none, wait that long for one. Arguments over 64 KiB are shortened.
        """
        changed = self._changed
        found = await self._rows.page(state, after, limit)
        with anyio.move_on_after(wait_seconds):
            while not found and not self.stopping:
                await changed.wait()
                changed = self._changed
                found = await self._rows.page(state, after, limit)
        return found

    async def decide(self, approval: Approval, decision: ApprovalDecision) -> Approval:
        """Take an answer; whatever is not "allow" is a rejection. The same answer again changes nothing.

        Raises Unprocessable where it was decided otherwise, or where its time is over.
        """
        allowed = decision.decision == "allow"
        done = self._rows.decide(
            approval,
            "allowed" if allowed else "denied",
            expires=time.time() + self._times.expires_seconds,
            scope=decision.scope if allowed else "once",
            edited=decision.arguments if allowed else None,
            reason=_reason(decision),
        )
        if done:
            self._tell()
            if approval.id in self._waiting:
                self._waiting[approval.id].set()
            return await self.get(approval.id)
        await self.expire_due()
        now = await self.get(approval.id)
        if now.state == "expired":
            raise Unprocessable(f"{now.id} has expired", "The agent has to make its call again.", code="expired")
        if (now.state == "allowed") is not allowed:
            raise Unprocessable(f"{now.id} was decided before: {now.state}", code="already_decided")
        return now

    async def expire_due(self) -> None:
        """End those that nobody decided in time; the next same call is told."""
        await self._expire(await self._rows.due(time.time()), used=False)

    async def end_session(self, session_id: str) -> None:
        """End what waits in a session that is over."""
        await self._expire(await self._rows.waiting(session_id), used=True)

    async def _expire(self, approvals: Sequence[Approval], *, used: bool) -> None:
        if approvals:
            self._rows.expire(approvals, used=used)
            self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()


def arguments_digest(arguments: Arguments) -> str:
    """SHA-256 of the arguments as JSON, whatever the order of their names."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def _is_grant(approval: Approval) -> bool:
    return (approval.state, approval.scope) == ("allowed", "session")


def _reason(decision: ApprovalDecision) -> str:
    if decision.decision in ("allow", "deny"):
        return decision.reason
    return decision.reason or f'the answer was {json.dumps(decision.decision)[:100]}, not "allow"'
