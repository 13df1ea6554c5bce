"""ApprovalRows: the approvals in the journal. Each decision and each use is one statement, so that it happens once."""

import json
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, Final

from pydantic import TypeAdapter

from gateway.journal import Journal, approval_id, bounded
from gateway.models import Approval, ApprovalScope, ApprovalState, Arguments, Question, ToolCall

_QUESTIONS: Final = TypeAdapter(tuple[Question, ...])


class ApprovalRows:
    """What was asked and decided. Writing methods raise Unavailable, as the journal's do."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._revision = 0

    def add(
        self, call: ToolCall, digest: str, original: Arguments, questions: Sequence[Question], expires: float
    ) -> str:
        """Note that somebody must decide; the arguments are kept whole until then. Returns its id."""
        arguments = json.dumps(self._journal._redact(call.arguments))
        number = self._journal._insert(
            "INSERT INTO approvals (session_id, call_id, tool, digest, arguments, original_arguments, questions,"
            " created, expires, revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                call.session_id,
                call.id,
                call.tool,
                digest,
                arguments,
                "null" if original == call.arguments else self._journal._kept(original),
                _QUESTIONS.dump_json(tuple(questions)).decode(),
                time.time(),
                expires,
                self._next_revision(),
            ),
        )
        return approval_id(number)

    async def get(self, id: str) -> Approval | None:
        found = await self._journal._read(self._select, "number = ?", _number(id))
        return found[0] if found else None

    async def of_call(self, session_id: str, tool: str, digest: str) -> list[Approval]:
        """Those that a call may still use, grants for the session first, then the oldest first."""
        return await self._journal._read(
            self._select,
            "session_id = ? AND tool = ? AND digest = ? AND ((state, scope) = ('allowed', 'session')"
            " OR used IS NULL AND (state IN ('waiting', 'expired') OR expires > ?)) ORDER BY scope DESC, number",
            session_id,
            tool,
            digest,
            time.time(),
        )

    async def page(self, state: ApprovalState | None, after: int, limit: int) -> list[Approval]:
        """In order of their last change, those with a revision over `after`; long arguments shortened."""
        return await self._journal._read(
            lambda: self._select(
                "(? IS NULL OR state = ?) AND revision > ? ORDER BY revision LIMIT ?",
                state,
                state,
                after,
                limit,
                shorten=True,
            )
        )

    async def count_waiting(self, session_id: str) -> int:
        row = await self._journal._one(
            "SELECT COUNT(*) FROM approvals WHERE session_id = ? AND state = 'waiting'", session_id
        )
        return int(row[0]) if row else 0

    def claim(self, id: str, call_id: str) -> None:
        """Note which call waits for it now."""
        self._journal._write_one("UPDATE approvals SET call_id = ? WHERE number = ?", (call_id, _number(id)))

    def decide(
        self,
        approval: Approval,
        state: ApprovalState,
        *,
        expires: float,
        scope: ApprovalScope = "once",
        edited: Arguments | None = None,
        reason: str = "",
    ) -> bool:
        """Decide one that waits, once; `expires` is when a call can have that no more. False where it was decided
        already, or had expired by now."""
        now = time.time()
        changed = self._journal._write_one(
            "UPDATE approvals SET state = ?, scope = ?, edited_arguments = ?, reason = ?, arguments = ?, decided = ?,"
            " expires = ?, revision = ? WHERE number = ? AND state = 'waiting' AND expires > ?",
            (
                state,
                scope,
                json.dumps(edited),
                reason,
                self._journal._kept(approval.arguments),
                now,
                expires,
                self._next_revision(),
                _number(approval.id),
                now,
            ),
        )
        return changed == 1

    def use(self, id: str) -> bool:
        """Give what was decided to a call; False where one has it already."""
        changed = self._journal._write_one(
            "UPDATE approvals SET used = ?, revision = ? WHERE number = ? AND state != 'waiting' AND used IS NULL",
            (time.time(), self._next_revision(), _number(id)),
        )
        return changed == 1

    def expire(self, approvals: Sequence[Approval], *, used: bool) -> None:
        """End those that nobody decided. `used` where no call will ask how they ended."""
        now = time.time()
        self._journal._write(
            "UPDATE approvals SET state = 'expired', used = ?, arguments = ?, revision = ?"
            " WHERE number = ? AND state = 'waiting'",
            [
                (now if used else None, self._journal._kept(one.arguments), self._next_revision(), _number(one.id))
                for one in approvals
            ],
        )

    async def due(self, now: float) -> list[Approval]:
        """Those that nobody decided in time."""
        return await self._journal._read(self._select, "state = 'waiting' AND expires <= ?", now)

    async def waiting(self, session_id: str) -> list[Approval]:
        return await self._journal._read(self._select, "state = 'waiting' AND session_id = ?", session_id)

    def _select(self, condition: str, *values: Any, shorten: bool = False) -> list[Approval]:
        rows = self._journal._reader.execute(f"SELECT * FROM approvals WHERE {condition}", values)  # noqa: S608
        return [_approval(row, shorten=shorten) for row in rows]  # the conditions are those above

    def _next_revision(self) -> int:
        """Microseconds since 1970, each given once: they grow over restarts and removals too."""
        self._revision = max(self._revision + 1, int(time.time() * 1_000_000))
        return self._revision


def _number(approval_id: str) -> int:
    """The number in an id, or one that nothing has."""
    digits = approval_id.removeprefix("a-")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else -1


def _approval(row: sqlite3.Row, *, shorten: bool) -> Approval:
    values = dict(row)
    del values["digest"]
    number, arguments = values.pop("number"), json.loads(values.pop("arguments"))
    return Approval(
        id=approval_id(number),
        arguments=json.loads(bounded(arguments)) if shorten else arguments,
        original_arguments=json.loads(values.pop("original_arguments")),
        edited_arguments=json.loads(values.pop("edited_arguments")),
        questions=_QUESTIONS.validate_json(values.pop("questions")),
        **values,
    )
