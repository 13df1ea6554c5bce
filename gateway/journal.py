"""Journal: what was asked, what was decided, what happened; SQLite, one writer at a time.

Every accepted call has one accepted and exactly one terminal record. WAL with `synchronous=NORMAL` survives the death
of the process at any moment, not a power cut.
"""

import builtins
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
from pydantic import BaseModel, JsonValue, TypeAdapter

from gateway.errors import StateError, Unavailable
from gateway.models import (
    CallRecord,
    CloseReport,
    DecisionRecord,
    Fault,
    Reference,
    SessionState,
    ToolCall,
    ToolResult,
    TurnRecord,
)

MAX_ARGUMENTS_BYTES: Final = 64 * 1024
KEPT_ARGUMENTS_CHARACTERS: Final = 4 * 1024
RECORDS_SECONDS: Final = 30 * 86400.0

P = ParamSpec("P")
T = TypeVar("T")
_FINISH: Final = (
    "UPDATE calls SET finished = ?, status = ?, arguments = ?, exit_code = ?, error = ?, raw_digest = ?,"
    " final_digest = ?, decisions = ?, answer = ?,"
    " idempotency_key = CASE ? WHEN 'pending' THEN NULL ELSE idempotency_key END"
    " WHERE session_id = ? AND id = ? AND finished IS NULL"
)
_ADD_RESULT: Final = (
    "INSERT INTO results (session_id, key, call_id, stream, bytes, media_type, sha256, created, expires, deleted,"
    " withheld, line_index) VALUES (:session_id, :key, :call_id, :stream, :bytes, :media_type, :sha256, :created,"
    " :expires, :deleted, :withheld, :line_index)"
)
_DECISIONS: Final = TypeAdapter(tuple[DecisionRecord, ...])
_INTERRUPTED: Final = Fault(
    code="interrupted",
    message="the gateway stopped while this call ran",
    remedy="Whether it had effects is not known; look before you repeat it.",
)


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
    line_index: builtins.bytes = b""


@dataclass(frozen=True, slots=True)
class UpstreamRow:
    """The tools of an MCP server, as JSON: those that are accepted, and those that it listed since, if they differ.
    `config` is a digest of how the server is reached."""

    name: str
    config: str
    accepted: str
    offered: str | None = None


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

    def __init__(self, writer: sqlite3.Connection, reader: sqlite3.Connection, redact: Callable[[Any], Any]) -> None:
        self._writer = writer
        self._reader = reader
        self._redact = redact
        self._reading = anyio.CapacityLimiter(1)

    @classmethod
    def open(cls, path: Path, redact: Callable[[Any], Any] = lambda arguments: arguments) -> Self:
        """Open or make the database, mode 0600, and bring its tables up to date; what `redact` makes of arguments is
        what is kept of them, and of what hooks say of turns. Raises StateError."""
        path.touch(mode=0o600)
        try:
            writer = _connected(path)
            _migrate(writer)
            return cls(writer, _connected(path), redact)
        except sqlite3.DatabaseError as error:
            raise StateError(f"{path}: {error}", "Move the file away; a new one is made at the next start.") from error

    def _write(self, statement: str, rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> int:
        """How many rows that changed."""
        with _writing(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            return self._writer.executemany(statement, rows).rowcount

    def _write_one(self, statement: str, row: Mapping[str, Any] | Sequence[Any]) -> int:
        """Returns how many rows it changed."""
        with _writing():
            return self._writer.execute(statement, row).rowcount  # one statement is a transaction of its own

    def _insert(self, statement: str, row: Sequence[Any]) -> int:
        """Returns the number that the row was given."""
        with _writing():
            number = self._writer.execute(statement, row).lastrowid
        assert number is not None  # of an INSERT
        return number

    def _kept(self, arguments: JsonValue) -> str:
        return bounded(self._redact(arguments))

    def _written(self, value: BaseModel) -> str:
        """What hooks said, in their own words."""
        return json.dumps(self._redact(value.model_dump(mode="json")))

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await anyio.to_thread.run_sync(functools.partial(work, *args, **kwargs), limiter=self._reading)

    async def aclose(self) -> None:
        def close() -> None:
            self._reader.close()
            self._writer.close()

        await anyio.to_thread.run_sync(close, limiter=self._reading)

    async def tidy(self, ended_before: float) -> list[str]:
        """Move the log into the database and remove the sessions that ended before and have no result left, with all
        their records; returns their ids."""
        return await self._read(self._tidy, ended_before)

    def _tidy(self, ended_before: float) -> list[str]:
        over = (
            "SELECT id FROM sessions WHERE ended < ? AND NOT EXISTS"
            " (SELECT 1 FROM results WHERE session_id = sessions.id AND deleted IS NULL)"
        )
        gone = [row["id"] for row in self._reader.execute(over, (ended_before,))]
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

    async def url_generation(self, session_id: str) -> int:
        """Which signed URLs of a session are in force; -1 for one that is not on record."""
        row = await self._one("SELECT url_generation FROM sessions WHERE id = ?", session_id)
        return -1 if row is None else int(row[0])

    def revoke_urls(self, session_id: str) -> None:
        self._write_one("UPDATE sessions SET url_generation = url_generation + 1 WHERE id = ?", (session_id,))

    # upstreams

    async def upstreams(self) -> list[UpstreamRow]:
        return await self._read(
            lambda: [UpstreamRow(**row) for row in self._reader.execute("SELECT * FROM upstreams ORDER BY name")]
        )

    def save_upstream(self, row: UpstreamRow) -> None:
        self._write_one(
            "INSERT OR REPLACE INTO upstreams (name, config, accepted, offered) VALUES (?, ?, ?, ?)",
            (row.name, row.config, row.accepted, row.offered),
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
                self._kept(call.original_arguments),
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
            self._kept(call.arguments),
            result.exit_code,
            result.error.model_dump_json() if result.error else None,
            end.raw_digest,
            hashlib.sha256(answer.encode()).hexdigest(),
            _DECISIONS.dump_json(tuple(end.decisions)).decode(),
            answer if end.keep_answer else None,
            result.status,
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
        """End what an earlier process left running as `interrupted`, or as `pending` where it waited for an approval
        and so did not run; returns how many calls that were."""
        left = self._writer.execute(
            "SELECT calls.id, calls.session_id, calls.call_id, calls.tool, idempotency_key, number FROM calls"
            " LEFT JOIN approvals ON approvals.session_id = calls.session_id AND approvals.call_id = calls.id"
            " AND approvals.used IS NULL WHERE calls.finished IS NULL"
        ).fetchall()
        self._write(
            "UPDATE calls SET finished = ?, status = ?, error = ?, answer = ?, idempotency_key = ?, decisions = '[]'"
            " WHERE session_id = ? AND id = ?",
            [_interrupted(row) for row in left],
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

    # turns

    def add_turn(self, record: TurnRecord) -> None:
        self._write_one(
            "INSERT INTO turns (session_id, id, record) VALUES (?, ?, ?)",
            (record.session_id, record.id, record.model_dump_json()),
        )

    def update_turn(self, record: TurnRecord, decisions: Sequence[DecisionRecord]) -> None:
        """Where the turn stands now, and what was decided since."""
        with _writing(), self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute(
                "UPDATE turns SET ended = ?, record = ? WHERE session_id = ? AND id = ?",
                (record.ended, self._written(record), record.session_id, record.id),
            )
            self._writer.executemany(
                "INSERT INTO turn_decisions (session_id, turn_id, decision) VALUES (?, ?, ?)",
                [(record.session_id, record.id, self._written(one)) for one in decisions],
            )

    async def turn(self, session_id: str, id: str) -> TurnRecord | None:
        return await self._read(self._turn, session_id, id)

    def _turn(self, session_id: str, id: str) -> TurnRecord | None:
        where = (session_id, id)
        row = self._reader.execute("SELECT record FROM turns WHERE session_id = ? AND id = ?", where).fetchone()
        if row is None:
            return None
        rows = self._reader.execute(
            "SELECT decision FROM turn_decisions WHERE session_id = ? AND turn_id = ? ORDER BY rowid", where
        )
        decisions = tuple(DecisionRecord.model_validate_json(one["decision"]) for one in rows)
        return TurnRecord.model_validate_json(row["record"]).model_copy(update={"decisions": decisions})

    async def turns_left(self, session_id: str) -> tuple[int, list[TurnRecord]]:
        """How many turns the session had, and those that had not ended."""
        return await self._read(self._turns_left, session_id)

    def _turns_left(self, session_id: str) -> tuple[int, list[TurnRecord]]:
        count = self._reader.execute("SELECT COUNT(*) FROM turns WHERE session_id = ?", (session_id,)).fetchone()[0]
        rows = self._reader.execute(
            "SELECT record FROM turns WHERE session_id = ? AND ended IS NULL", (session_id,)
        ).fetchall()
        return count, sorted(
            (TurnRecord.model_validate_json(row["record"]) for row in rows), key=lambda one: one.started
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

    async def oldest_results(self, session_id: str | None) -> list[ResultRow]:
        """The first stored that still have their bytes, a thousand at most: of one session, or of all."""
        condition = "session_id = ?" if session_id is not None else "? IS NULL"
        return await self._read(self._results, f"{condition} ORDER BY created, key LIMIT 1000", session_id)

    def _results(self, condition: str, value: Any) -> list[ResultRow]:
        rows = self._reader.execute(
            f"SELECT * FROM results WHERE deleted IS NULL AND {condition}",  # noqa: S608
            (value,),
        )  # the conditions are the ones above
        return [ResultRow(**dict(row)) for row in rows]

    def forget_results(self, rows: Sequence[ResultRow]) -> None:
        """Remove results that nobody was ever told of; their keys are free again."""
        self._write("DELETE FROM results WHERE session_id = ? AND key = ?", [(row.session_id, row.key) for row in rows])

    def mark_deleted(self, rows: Sequence[ResultRow], now: float) -> int:
        """Note that the bytes are gone; returns of how many that was news."""
        return self._write(
            "UPDATE results SET deleted = ? WHERE session_id = ? AND key = ? AND deleted IS NULL",
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
    del values["url_generation"]
    report = values.pop("close_report")
    return SessionRow(**values, close_report=CloseReport.model_validate_json(report) if report else None)


def pending_fault(approval_id: str) -> Fault:
    """What the agent is told of a call that waits for a decision."""
    return Fault(
        code="approval_pending",
        message=f"this needs an approval, and nobody has decided yet: {approval_id}",
        remedy="Make the same call again, unchanged: it waits for the decision, and runs once it is allowed.",
    )


def _interrupted(row: sqlite3.Row) -> tuple[Any, ...]:
    """How a call that a dead process left ends."""
    if row["number"] is not None:
        status, fault, key = "pending", pending_fault(approval_id(row["number"])), None
    else:
        status, fault, key = "interrupted", _INTERRUPTED, row["idempotency_key"]
    answer = ToolResult.model_validate(
        {"id": row["id"], "call_id": row["call_id"], "tool": row["tool"], "status": status, "error": fault}
    )
    end = (time.time(), status, fault.model_dump_json(), answer.model_dump_json(), key)
    return (*end, row["session_id"], row["id"])


def approval_id(number: int) -> str:
    """`a-0012`."""
    return f"a-{number:04d}"


def bounded(arguments: JsonValue) -> str:
    """As JSON; over 64 KiB as digest, size and the first 4 KiB."""
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
