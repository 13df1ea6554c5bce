"""Journal: what was asked, what was decided, what happened; SQLite, one writer at a time.

Every accepted call has one accepted and exactly one terminal record. WAL with `synchronous=NORMAL` survives the death
of the process at any moment, not a power cut.
"""

import functools
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar

import anyio
import anyio.to_thread
from pydantic import JsonValue, TypeAdapter

from gateway.errors import StateError, Unavailable
from gateway.models import CallRecord, CloseReport, DecisionRecord, Fault, Reference, SessionState, ToolCall, ToolResult

MAX_ARGUMENTS_BYTES: Final = 64 * 1024
KEPT_ARGUMENTS_CHARACTERS: Final = 4 * 1024
RECORDS_SECONDS: Final = 30 * 86400.0

P = ParamSpec("P")
T = TypeVar("T")
_FINISH: Final = (
    "UPDATE calls SET finished = ?, status = ?, arguments = ?, exit_code = ?, error = ?, raw_digest = ?,"
    " final_digest = ?, decisions = ?, answer = ? WHERE session_id = ? AND id = ? AND finished IS NULL"
)
_ADD_RESULT: Final = (
    "INSERT INTO results (session_id, key, call_id, stream, bytes, media_type, sha256, created, expires, deleted,"
    " withheld) VALUES (:session_id, :key, :call_id, :stream, :bytes, :media_type, :sha256, :created, :expires,"
    " :deleted, :withheld)"
)
_DECISIONS: Final = TypeAdapter(tuple[DecisionRecord, ...])


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as it is stored; `request` is its SessionRequest as JSON."""

    id: str
    token_sha256: str
    opened_by: str
    profile: str
    state: SessionState
    request: str
    created: float
    last_used: float
    expires: float
    ended: float | None = None
    close_report: CloseReport | None = None


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A stored result of a session; `deleted` once its bytes are gone, `withheld` where only the operator reads it."""

    session_id: str
    key: str
    call_id: str | None
    stream: str
    bytes: int
    media_type: str
    sha256: str
    created: float
    expires: float
    deleted: float | None = None
    withheld: int = 0


@dataclass(frozen=True, slots=True)
class Terminal:
    """How a call ended, for the record; `answer` is kept where a retry must get the same."""

    call: ToolCall
    result: ToolResult
    decisions: Sequence[DecisionRecord]
    raw_digest: str | None = None
    results: Sequence[ResultRow] = ()
    keep_answer: bool = False


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a used Idempotency-Key stands for."""

    call: str
    request_sha256: str
    answer: ToolResult | None


class Journal:
    """One database, two connections. Each writing method is one transaction, done where it is called: with WAL a commit
    costs about 15 us, a hop to a thread four times that. Reading methods run in a worker thread. What takes long, bulk
    removal and checkpoints, is `tidy`, in a thread too.
    """

    def __init__(self, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self._writer = writer
        self._reader = reader
        self._reading = anyio.CapacityLimiter(1)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or make the database, mode 0600, and bring its tables up to date. Raises StateError."""
        path.touch(mode=0o600)
        try:
            writer = _connected(path)
            _migrate(writer)
            return cls(writer, _connected(path))
        except sqlite3.DatabaseError as error:
            raise StateError(f"{path}: {error}", "Move the file away; a new one is made at the next start.") from error

    def _write(self, statement: str, rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> None:
        with _writing(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(statement, rows)

    def _write_one(self, statement: str, row: Mapping[str, Any] | Sequence[Any]) -> None:
        with _writing():
            self._writer.execute(statement, row)  # one statement is a transaction of its own

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await anyio.to_thread.run_sync(functools.partial(work, *args, **kwargs), limiter=self._reading)

    async def aclose(self) -> None:
        def close() -> None:
            self._reader.close()
            self._writer.close()

        await anyio.to_thread.run_sync(close, limiter=self._reading)

    async def tidy(self, ended_before: float) -> list[str]:
        """Move the log into the database and remove the sessions that ended before, with all their records; returns
        their ids."""
        return await self._read(self._tidy, ended_before)

    def _tidy(self, ended_before: float) -> list[str]:
        gone = [row["id"] for row in self._reader.execute("SELECT id FROM sessions WHERE ended < ?", (ended_before,))]
        for id in gone:  # one at a time: a writer waits for no more than one
            self._reader.execute("DELETE FROM sessions WHERE id = ?", (id,))
        self._reader.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return gone

    # sessions

    def add_session(self, row: SessionRow) -> None:
        self._write(
            "INSERT INTO sessions (id, token_sha256, opened_by, profile, state, request, created, last_used, expires)"
            " VALUES (:id, :token_sha256, :opened_by, :profile, :state, :request, :created, :last_used, :expires)",
            [
                {
                    name: getattr(row, name)
                    for name in (
                        "id",
                        "token_sha256",
                        "opened_by",
                        "profile",
                        "state",
                        "request",
                        "created",
                        "last_used",
                        "expires",
                    )
                }
            ],
        )

    async def sessions(self) -> list[SessionRow]:
        """All sessions still on record, the oldest first."""
        return await self._read(
            lambda: [_session(row) for row in self._reader.execute("SELECT * FROM sessions ORDER BY created, id")]
        )

    def touch_sessions(self, used: Sequence[tuple[str, float]]) -> None:
        """Note when sessions were last used."""
        self._write("UPDATE sessions SET last_used = ? WHERE id = ?", [(at, id) for id, at in used])

    def end_session(self, report: CloseReport, ended: float) -> None:
        self._write(
            "UPDATE sessions SET state = ?, ended = ?, close_report = ? WHERE id = ?",
            [(report.state, ended, report.model_dump_json(), report.id)],
        )

    # calls

    def accept(self, call: ToolCall, key: str | None, request_sha256: str | None) -> None:
        """The record before anything runs. Raises Unavailable, as every writing method does."""
        self._write_one(
            "INSERT INTO calls (session_id, id, sequence, call_id, turn_id, tool, requested_tool, source, accepted,"
            " original_arguments, idempotency_key, request_sha256) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                call.session_id,
                call.id,
                call.sequence,
                call.call_id,
                call.turn_id,
                call.tool,
                call.requested_tool,
                call.source,
                time.time(),
                _bounded(call.original_arguments),
                key,
                request_sha256,
            ),
        )

    def finish(self, end: Terminal) -> None:
        """The record after; the index of its stored results is part of the same transaction."""
        call, result = end.call, end.result
        answer = result.model_dump_json()
        row = (
            time.time(),
            result.status,
            _bounded(call.arguments),
            result.exit_code,
            result.error.model_dump_json() if result.error else None,
            end.raw_digest,
            hashlib.sha256(answer.encode()).hexdigest(),
            _DECISIONS.dump_json(tuple(end.decisions)).decode(),
            answer if end.keep_answer else None,
            call.session_id,
            call.id,
        )
        if not end.results:
            self._write_one(_FINISH, row)
            return
        with _writing(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute(_FINISH, row)
            self._writer.executemany(_ADD_RESULT, [asdict(one) for one in end.results])

    def interrupt_unfinished(self) -> int:
        """End what an earlier process left running as `interrupted`; returns how many calls that were."""
        left = self._writer.execute("SELECT * FROM calls WHERE finished IS NULL").fetchall()
        fault = Fault(
            code="interrupted",
            message="the gateway stopped while this call ran",
            remedy="Whether it had effects is not known; look before you repeat it.",
        )
        ends = [
            (
                time.time(),
                fault.model_dump_json(),
                ToolResult(
                    id=row["id"], call_id=row["call_id"], tool=row["tool"], status="interrupted", error=fault
                ).model_dump_json(),
                row["session_id"],
                row["id"],
            )
            for row in left
        ]
        self._write(
            "UPDATE calls SET finished = ?, status = 'interrupted', error = ?, answer = ?, decisions = '[]'"
            " WHERE session_id = ? AND id = ?",
            ends,
        )
        return len(left)

    async def earlier(self, session_id: str, key: str) -> Earlier | None:
        """The call that a key was used for."""
        row = await self._one(
            "SELECT id, request_sha256, answer FROM calls WHERE session_id = ? AND idempotency_key = ?", session_id, key
        )
        if row is None:
            return None
        answer = ToolResult.model_validate_json(row["answer"]) if row["answer"] else None
        return Earlier(row["id"], row["request_sha256"], answer)

    async def last_sequence(self, session_id: str) -> int:
        row = await self._one("SELECT MAX(sequence) FROM calls WHERE session_id = ?", session_id)
        return int(row[0] or 0) if row else 0

    async def calls(self, session_id: str, after: int = 0, limit: int = 1000) -> list[CallRecord]:
        """Calls in order, those with a sequence over `after`."""
        return await self._read(self._calls, "sequence > ? ORDER BY sequence LIMIT ?", session_id, after, limit)

    async def call(self, session_id: str, id: str) -> CallRecord | None:
        found = await self._read(self._calls, "id = ?", session_id, id)
        return found[0] if found else None

    async def _one(self, statement: str, *values: Any) -> sqlite3.Row | None:
        row: sqlite3.Row | None = await self._read(lambda: self._reader.execute(statement, values).fetchone())
        return row

    def _calls(self, condition: str, session_id: str, *values: Any) -> list[CallRecord]:
        rows = self._reader.execute(
            f"SELECT * FROM calls WHERE session_id = ? AND {condition}",  # noqa: S608
            (session_id, *values),
        ).fetchall()  # the conditions are the two above
        return [self._call(row) for row in rows]

    def _call(self, row: sqlite3.Row) -> CallRecord:
        rows = self._reader.execute(
            "SELECT * FROM results WHERE session_id = ? AND call_id = ? AND NOT withheld ORDER BY key",
            (row["session_id"], row["id"]),
        ).fetchall()
        references = tuple(
            Reference(
                reference=f"sandgate://{one['session_id']}/results/{one['key']}",
                stream=one["stream"],
                bytes=one["bytes"],
                media_type=one["media_type"],
                sha256=one["sha256"],
            )
            for one in rows
        )
        return CallRecord(
            **{
                name: row[name]
                for name in (
                    "id",
                    "session_id",
                    "sequence",
                    "call_id",
                    "turn_id",
                    "tool",
                    "requested_tool",
                    "source",
                    "status",
                    "accepted",
                    "finished",
                    "exit_code",
                    "raw_digest",
                    "final_digest",
                )
            },
            original_arguments=json.loads(row["original_arguments"]),
            arguments=json.loads(row["arguments"]) if row["arguments"] else None,
            error=Fault.model_validate_json(row["error"]) if row["error"] else None,
            decisions=_DECISIONS.validate_json(row["decisions"] or "[]"),
            references=references,
        )

    # results

    def add_result(self, row: ResultRow) -> None:
        """Index a result that no call made (a collected file)."""
        self._write(_ADD_RESULT, [asdict(row)])

    async def result(self, session_id: str, key: str) -> ResultRow | None:
        row = await self._one("SELECT * FROM results WHERE session_id = ? AND key = ?", session_id, key)
        return ResultRow(**dict(row)) if row else None

    async def results(self, session_id: str) -> list[ResultRow]:
        """The session's results that still have their bytes, in the order of their keys."""
        return await self._read(self._results, "session_id = ? ORDER BY key", session_id)

    async def expired_results(self, now: float) -> list[ResultRow]:
        return await self._read(self._results, "expires < ?", now)

    def _results(self, condition: str, value: Any) -> list[ResultRow]:
        rows = self._reader.execute(
            f"SELECT * FROM results WHERE deleted IS NULL AND {condition}",  # noqa: S608
            (value,),
        )  # the conditions are the two above
        return [ResultRow(**dict(row)) for row in rows]

    def forget_results(self, rows: Sequence[ResultRow]) -> None:
        """Remove results that nobody was ever told of; their keys are free again."""
        self._write("DELETE FROM results WHERE session_id = ? AND key = ?", [(row.session_id, row.key) for row in rows])

    def mark_deleted(self, rows: Sequence[ResultRow], now: float) -> None:
        self._write(
            "UPDATE results SET deleted = ? WHERE session_id = ? AND key = ?",
            [(now, row.session_id, row.key) for row in rows],
        )


@contextmanager
def _writing() -> Iterator[None]:
    """What SQLite cannot write (a full disk, a lock held too long) is a part of ours that does not work now."""
    try:
        yield
    except sqlite3.Error as error:
        raise Unavailable(
            "the journal cannot be written, so nothing runs",
            "See to the disk of the state folder.",
            code="journal_unavailable",
        ) from error


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    database.row_factory = sqlite3.Row
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "wal_autocheckpoint=0"):
        database.execute(f"PRAGMA {pragma}")
    return database


def _migrate(database: sqlite3.Connection) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    scripts = sorted(
        (file for file in resources.files("gateway").joinpath("migrations").iterdir() if file.name.endswith(".sql")),
        key=lambda file: file.name,
    )
    if version > len(scripts):
        raise StateError(
            f"the state folder was written by a newer version (schema {version})",
            "Start that version, or name another folder with --state-dir.",
        )
    for number, script in enumerate(scripts[version:], start=version + 1):
        database.executescript(f"BEGIN; {script.read_text()} PRAGMA user_version = {number}; COMMIT;")


def _session(row: sqlite3.Row) -> SessionRow:
    values = dict(row)
    report = values.pop("close_report")
    return SessionRow(**values, close_report=CloseReport.model_validate_json(report) if report else None)


def _bounded(arguments: JsonValue) -> str:
    text = json.dumps(arguments)
    if len(text) <= MAX_ARGUMENTS_BYTES:
        return text
    return json.dumps(
        {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "bytes": len(text),
            "first": text[:KEPT_ARGUMENTS_CHARACTERS],
        }
    )
