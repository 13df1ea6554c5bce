"""Gateway: open a session, run a call, read a result, close a session. Transports call this; it knows no protocol."""

import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus
from pydantic import ValidationError

from gateway.agent_points import AgentPoints
from gateway.approvals import Approvals
from gateway.calls import ActiveCall
from gateway.errors import Forbidden, NotFound, SandgateError, Unavailable, Unprocessable
from gateway.execution import CallRunner
from gateway.hooks.redact import Redaction
from gateway.journal import Journal, SessionRow, Terminal
from gateway.models import (
    Approval,
    ApprovalDecision,
    Arguments,
    CallRecord,
    CallRequest,
    CloseReport,
    Fault,
    OpenedSession,
    SessionRequest,
    SessionState,
    ToolCall,
    ToolResult,
    TurnRecord,
)
from gateway.outcomes import opening_problem, without_output
from gateway.pipeline import Trail
from gateway.principals import Principal, digest, new_token
from gateway.results import SessionResults
from gateway.sessions import RETRY_SECONDS, SandboxPlaces, Session, Sessions, new_session_id
from gateway.shelf import Shelf
from gateway.signing import SignedUrls
from gateway.terminals import SHELL, SHELL_ENV, SessionTerminal
from gateway.tracing import ended
from gateway.upstreams import Upstreams
from sandboxes import TERMINALS, Pool, Probe, SandboxError, SandboxKind, TerminalSize

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
TIDY_SECONDS = 10.0
NO_HOOKS = ("offload", "permission", "approval")
"""Names in a call's trail that are parts of ours."""
TOOL_POINTS: Final = ("pre_tool_call", "post_tool_call", "filter_output")
OPERATORS_TERMINAL: Final = "Use the operator's token, or the tool bash (with background for what goes on)."


class Profiles:
    """Turns a request into a session within its profile. Implemented by `build`, which alone knows settings."""

    def session(self, row: SessionRow, request: SessionRequest) -> Session:
        """Raises Unprocessable naming the field and its bound."""
        raise NotImplementedError

    def refresh(self, session: Session) -> None:
        """Offer the session what its profile has now. Raises Unprocessable where its request names no tool of that."""
        raise NotImplementedError

    def granted(self, principal: Principal, profile: str) -> bool:
        raise NotImplementedError

    def first_granted(self, principal: Principal) -> str:
        """The profile for who names none. Raises NotFound where none is granted."""
        raise NotImplementedError

    def kinds(self) -> Mapping[str, SandboxKind]:
        raise NotImplementedError

    def pools(self) -> Sequence[Pool]:
        raise NotImplementedError

    def lifetime_seconds(self, request: SessionRequest) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Times and sizes of one gateway."""

    replay_seconds: float = 10.0
    stop_seconds: float = 10.0
    records_seconds: float = 30 * 86400.0


class Gateway:
    """The whole program, without a transport. Use it inside `run()`, which owns its tasks."""

    def __init__(
        self,
        *,
        journal: Journal,
        sessions: Sessions,
        places: SandboxPlaces,
        profiles: Profiles,
        runner: CallRunner,
        upstreams: Upstreams,
        approvals: Approvals,
        redaction: Redaction,
        shelf: Shelf,
        urls: SignedUrls,
        options: GatewayOptions,
    ) -> None:
        self.journal = journal
        self.sessions = sessions
        self.places = places
        self.profiles = profiles
        self.runner = runner
        self.upstreams = upstreams
        self.approvals = approvals
        self.redaction = redaction
        self.shelf = shelf
        self.results = shelf.store
        self.agent_points = AgentPoints(runner.pipeline, journal)
        self.urls = urls
        self.options = options
        self.stopping = False
        self._stopped = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._tidied = 0.0
        self._keyed: dict[tuple[str, str], tuple[str, ActiveCall]] = {}
        self._ended: list[tuple[float, Session, ActiveCall]] = []

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Gateway"]:
        """Take up what an earlier process left, then serve until the block ends; calls still running then are given
        `stop_seconds` and end `cancelled`. Open sessions keep their workspaces and go on at the next start."""
        try:
            await self.runner.pipeline.warm_up()
            await self._restore()
            async with self.upstreams.run(), anyio.create_task_group() as tasks:
                self._tasks = await tasks.start(self._hold_calls)
                tasks.start_soon(self._sweep)
                tasks.start_soon(self._take_up)
                for pool in self.profiles.pools():
                    tasks.start_soon(pool.run)
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop()
                    self._stopped.set()
                    tasks.cancel_scope.cancel()
        finally:  # also where the block, or taking up, has failed
            with anyio.CancelScope(shield=True):
                await self.runner.pipeline.aclose()
                for kind in self.profiles.kinds().values():
                    await kind.aclose()
                await self.results.aclose()
                await self.journal.aclose()

    async def _hold_calls(self, *, task_status: TaskStatus[TaskGroup]) -> None:
        """Own the calls until `_stop` has ended them: what cancels whoever runs the gateway would leave them without
        their terminal records."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await self._stopped.wait()
                tasks.cancel_scope.cancel()

    async def _restore(self) -> None:
        interrupted = self.journal.interrupt_unfinished()
        if interrupted:
            logger.warning("%d calls were interrupted by the end of an earlier process", interrupted)
        for row in await self.journal.sessions():
            used = sum(one.bytes for one in await self.journal.results(row.id))
            try:
                session = self.profiles.session(row, SessionRequest.model_validate_json(row.request))
            except (SandgateError, ValidationError) as error:
                logger.warning("session %s cannot go on: %s", row.id, error)
                self.shelf.register(row.id, 0, used)
                if row.state == "open":
                    report = CloseReport(id=row.id, state="closed", reason=f"cannot go on: {error}"[:500])
                    self.journal.end_session(report, time.time())
                continue
            session.state, session.close_report = row.state, row.close_report
            session.sequence = await self.journal.last_sequence(row.id)
            self.shelf.register(row.id, session.limits.results_size, used)
            if row.state == "open":
                session.turns.restore(*await self.journal.turns_left(row.id))
                session.last_used = time.time()  # without a gateway nobody is idle
                await self.shelf.delete_unindexed(row.id)
            if row.state != "open":
                session.closed.set()
            self.sessions.add(session)
        for kind in self.profiles.kinds().values():
            kind.keep([one.id for one in self.sessions.open])

    async def _take_up(self) -> None:
        """Open again the sandboxes that outlived an earlier process; a call that is quicker does so itself."""
        for kind in self.profiles.kinds().values():
            try:
                alive = await kind.survivors()
            except SandboxError as error:
                logger.warning("sandboxes of an earlier process are not looked for yet: %s", error.message)
                continue
            probe = await kind.probe()
            for session in self.sessions.open:
                if session.kind is kind:
                    session.not_enforced = probe.not_enforced
                    if session.id in alive:
                        self._task_group.start_soon(session.take_up)

    async def drain(self, hurry: anyio.Event | None = None) -> None:
        """Accept nothing more; let calls end for `stop_seconds`, or until `hurry`, then cancel them. Returns when all
        have ended."""
        self.stopping = True
        self.approvals.release()
        running = [active for session in self.sessions for active in session.running.values()]
        with anyio.move_on_after(self.options.stop_seconds) as limit:
            async with anyio.create_task_group() as tasks:
                if hurry is not None:
                    tasks.start_soon(_cancel_when, hurry, limit)
                for active in running:
                    await active.done.wait()
                tasks.cancel_scope.cancel()
        for active in running:
            active.cancel("the gateway stops")
        for active in running:
            await active.done.wait()

    @property
    def running(self) -> int:
        """How many calls run now."""
        return sum(len(session.running) for session in self.sessions)

    async def _stop(self) -> None:
        await self.drain()
        self.journal.touch_sessions([(one.id, one.last_used) for one in self.sessions.open])
        left = [await session.suspend() for session in self.sessions.open]
        if any(left):
            logger.info("%d sandboxes go on, until the next start or the end of their sessions' lifetime", sum(left))
        for _, _, active in self._ended:
            active.discard()

    # sessions

    async def open_session(self, principal: Principal, request: SessionRequest) -> OpenedSession:
        """Open a session within its profile; with SandboxHooks its sandbox is ready when this returns.

        Raises Unprocessable, NotFound (no such profile, or not granted), TooMany, Unavailable.
        """
        self._check_running()
        if principal.role == "session":
            raise Forbidden("a session's token opens no sessions", "Use the agent's token.")
        if not self.profiles.granted(principal, request.profile):
            raise NotFound(
                f"no such profile {request.profile[:100]!r}",
                "Name a profile that this token is granted.",
                code="no_such_profile",
            )
        self.sessions.check_room()
        now, token = time.time(), new_token("session")
        row = SessionRow(
            id=new_session_id(),
            token_sha256=digest(token),
            opened_by=principal.role,
            profile=request.profile,
            state="open",
            request=_stored(request),
            created=now,
            last_used=now,
            expires=now + self.profiles.lifetime_seconds(request),
        )
        session = self.profiles.session(row, request)
        await self._check_kind(session)
        if session.sandbox_hooks:
            session.take_place()
        try:
            self.journal.add_session(row)
        except BaseException:
            session.free_place()
            raise
        self.shelf.register(row.id, session.limits.results_size)
        self.sessions.add(session)
        try:
            if session.sandbox_hooks:
                await session.sandbox()
            if session.upstreams:
                await self.upstreams.prepare(session.id, session.upstreams, session.sandbox)
                self.profiles.refresh(session)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._undo_opening(session, error)
            raise opening_problem(error) from error
        return OpenedSession(id=session.id, token=token, session=session.record())

    async def _check_kind(self, session: Session) -> None:
        probe = await session.kind.probe()
        session.not_enforced = probe.not_enforced
        if not probe.works:
            raise Unavailable(
                f"sandbox unavailable: the kind {probe.kind!r} does not work here: {probe.reason}",
                probe.remedy,
                code="sandbox_unavailable",
            )

    async def _undo_opening(self, session: Session, error: BaseException) -> None:
        session.state = "closed"
        self.upstreams.end(session.id)
        report = await session.end("closed", f"not opened: {type(error).__name__}", collect=session.sandbox_alive)
        for left in report.failed:
            logger.error("session %s: %s", session.id, left)
        self.journal.end_session(report, time.time())
        session.close_report = report
        session.closed.set()
        self.sessions.forget([session.id])

    async def close_session(
        self, session: Session, *, state: SessionState = "closed", reason: str = "closed by its client"
    ) -> CloseReport:
        """Cancel what runs, collect, remove the sandbox and the workspace. Again: the same report."""
        if session.state != "open":
            await session.closed.wait()
            assert session.close_report is not None  # set before the event
            return session.close_report
        session.state = "closing"
        with anyio.CancelScope(shield=True):
            running = list(session.running.values())
            for active in running:
                active.cancel("the session is closed")
            for active in running:
                await active.done.wait()
            if session.terminal is not None:
                await session.terminal.aclose()
            self.upstreams.end(session.id)
            try:
                report = await session.end(state, reason)
            except Exception as error:
                logger.exception("closing session %s", session.id)
                report = CloseReport(id=session.id, state=state, reason=reason, failed=(f"internal: {error}",))
            if self.shelf.has_stored(session.id):  # else an object store need not be asked
                await self.shelf.delete_unindexed(session.id)
            session.state, session.close_report = state, report
            session.closed.set()
            self.journal.end_session(report, time.time())  # where it fails, the next start closes it again
            await self.approvals.end_session(session.id)
        return report

    async def probes(self) -> list[Probe]:
        return [await kind.probe() for kind in self.profiles.kinds().values()]

    def accept_upstream(self, name: str) -> None:
        """Let an upstream's changed tools through, in open sessions too. Raises NotFound where nothing waits."""
        self.upstreams.accept(name)
        for session in self.sessions.open:
            if name in session.upstreams:
                self.profiles.refresh(session)

    # terminals

    def check_terminal(self, principal: Principal, session: Session) -> None:
        """Raise where there is none for this principal: Unprocessable for a kind without terminals, Forbidden where
        the session's `bash` is not free, since what is typed passes no hook. The operator is always free."""
        self._check_running()
        session.check_open()
        if not session.kind.opens or TERMINALS in session.kind.lacks:
            raise Unprocessable(
                f"a session of kind {session.kind.name} has no terminal",
                "Use a profile of kind local or docker.",
                code="unsupported_tool",
            )
        if principal.role == "operator":
            return
        if "bash" not in session.tool_names or not session.permissions.frees("bash"):
            raise Forbidden("this session may not run just anything by bash, so it has no terminal", OPERATORS_TERMINAL)
        if any(self.runner.pipeline.matching("bash", point) for point in TOOL_POINTS):
            raise Forbidden("hooks watch over bash here, and a terminal passes none", OPERATORS_TERMINAL)

    async def terminal(self, principal: Principal, session: Session, size: TerminalSize) -> SessionTerminal:
        """The session's terminal, given that size; a shell is started where none runs.

        Raises as `check_terminal` does, TooMany (no place for a sandbox), or what the sandbox raises.
        """
        self.check_terminal(principal, session)
        async with session.terminal_lock:
            terminal = session.terminal
            if terminal is None or terminal.ended.is_set():
                sandbox = await session.sandbox()
                process = await sandbox.start(SHELL, env=SHELL_ENV, terminal=size)
                terminal = session.terminal = SessionTerminal(process)
                self._task_group.start_soon(terminal.run)
                logger.info("a terminal of session %s was opened by %s", session.id, principal.role)
            terminal.resize(size)
            return terminal

    # calls

    async def start_call(
        self, session: Session, request: CallRequest, key: str | None = None, *, streamed: bool = False
    ) -> ActiveCall:
        """Accept a call; its record is written when this returns, and it runs on by itself. `streamed` keeps its whole
        output readable, also where only head and tail would be needed.

        A key that was used before gives the same call (running or answered), never a second run. Raises NotFound
        (closed session), TooMany (no place for a sandbox), Unprocessable (a key used for another request, a
        `hook_context` that would replace a key of the session's).
        """
        self._check_running()
        session.check_open()
        session.check_context(request.hook_context)
        if key is None:
            return self._accept(session, request, None, None, streamed=streamed)
        fingerprint = _fingerprint(request)
        async with session.keys:
            earlier = await self._earlier(session, key, fingerprint)
            return earlier or self._accept(session, request, key, fingerprint, streamed=streamed)

    def _accept(
        self, session: Session, request: CallRequest, key: str | None, fingerprint: str | None, *, streamed: bool
    ) -> ActiveCall:
        session.check_open()  # it may have been closed while an earlier answer was looked for
        call = self._call(session, request)
        tool = self.runner.toolbox.get(call.tool)
        if tool is not None and tool.needs_sandbox and not session.sandbox_alive:
            session.take_place()
        session.sequence = call.sequence
        if turn := session.turns.get(call.turn_id):
            turn.tool_call_counts[call.tool] += 1
        active = self._active(session, call, keyed=key is not None, streamed=streamed)
        session.running[call.id] = active
        try:
            self.journal.accept(call, key, fingerprint)
        except Unavailable:
            session.ended(active)
            active.discard()
            raise
        if key is not None and fingerprint is not None:
            self._keyed[session.id, key] = (fingerprint, active)
        self._task_group.start_soon(self._run, session, active)
        return active

    async def _earlier(self, session: Session, key: str, fingerprint: str) -> ActiveCall | None:
        known = self._keyed.get((session.id, key))
        if known is None and (row := await self.journal.earlier(session.id, key)) is not None:
            known = (row.request_sha256, self._answered(session, row.call, row.answer))
        if known is None:
            return None
        if known[0] != fingerprint:
            raise Unprocessable(
                "this Idempotency-Key was used for another request", "Make a new key for a new call.", code="key_reused"
            )
        return known[1]

    def _answered(self, session: Session, call_id: str, answer: ToolResult | None) -> ActiveCall:
        if answer is None:
            raise Unavailable("the answer to this key is not on record any more", code="answer_gone")
        call = ToolCall(
            id=call_id,
            session_id=session.id,
            sequence=0,
            tool=answer.tool,
            source="builtin",
            arguments={},
            original_arguments={},
            requested_tool=answer.tool,
            call_id=answer.call_id,
        )
        active = ActiveCall(call, self.runner.streams(0), shows_output=True, keyed=True)
        active.finish(answer)
        return active

    def _call(self, session: Session, request: CallRequest) -> ToolCall:
        name, arguments = self.runner.toolbox.resolve(request.tool, request.arguments)
        tool, sequence = self.runner.toolbox.get(name), session.sequence + 1
        return ToolCall(
            id=f"c-{sequence:04d}",
            session_id=session.id,
            sequence=sequence,
            tool=name,
            source=tool.definition.source if tool else "builtin",
            arguments=arguments,
            original_arguments=request.arguments,
            requested_tool=request.tool,
            call_id=request.call_id,
            turn_id=request.turn_id,
            hook_context=request.hook_context,
        )

    def _active(self, session: Session, call: ToolCall, *, keyed: bool, streamed: bool) -> ActiveCall:
        shows = session.raw_stream or not self.runner.pipeline.hides_output(call.tool)
        keep = self.runner.kept_bytes(session, call.tool, streamed=streamed)
        return ActiveCall(call, self.runner.streams(keep), shows_output=shows, keyed=keyed)

    async def _run(self, session: Session, active: ActiveCall) -> None:
        """One call, from its accepted record to its terminal one."""
        trail: Trail = []
        started = time.perf_counter()
        with self.runner.pipeline.spans.call(active.call) as span:
            try:
                end = await self.runner.run(session, active, trail)
            except Exception:
                logger.exception("call %s of session %s", active.call.id, session.id)
                fault = Fault(code="internal", message="the gateway failed", remedy="Its log has the reason.")
                end = Terminal(active.call, without_output(active.call, "internal", fault), trail)
            ended(span, end.result.status, failed=end.result.is_error)
        duration = round((time.perf_counter() - started) * 1000, 3)
        end = self.redaction.terminal(end)
        end = replace(
            end,
            keep_answer=active.keyed,
            result=end.result.model_copy(update={"duration_ms": duration, "hooks": _names(trail)}),
        )
        result = self._recorded(end)
        if active.keyed and result.status == "pending":
            self._forget_key(active)
        session.ended(active)
        active.finish(result)
        if active.streamed or active.keyed:
            self._ended.append((anyio.current_time() + self.options.replay_seconds, session, active))
        else:
            active.discard()

    def _forget_key(self, active: ActiveCall) -> None:
        self._keyed = {key: value for key, value in self._keyed.items() if value[1] is not active}

    def _recorded(self, end: Terminal) -> ToolResult:
        """Write the terminal record; what could not be recorded is not answered as if it were."""
        try:
            self.journal.finish(end)
        except Unavailable:
            logger.exception("call %s of session %s has no terminal record", end.call.id, end.call.session_id)
            fault = Fault(
                code="disk_full",
                message="the call ended, and its record could not be written",
                remedy="See to the disk of the state folder.",
            )
            return without_output(end.call, "disk", fault)
        return end.result

    # calls, seen from outside

    def active_call(self, session: Session, call_id: str) -> ActiveCall | None:
        """The running call, or one that has just ended and can still be replayed."""
        found = session.running.get(call_id)
        if found is not None:
            return found
        return next((one for _, owner, one in self._ended if owner is session and one.call.id == call_id), None)

    async def call_record(self, session: Session, call_id: str) -> CallRecord:
        record = await self.journal.call(session.id, call_id)
        if record is None:
            raise NotFound("no such call", "List the session's calls.")
        return record

    async def turn_record(self, session: Session, turn_id: str) -> TurnRecord:
        record = await self.journal.turn(session.id, turn_id)
        if record is None:
            raise NotFound("no such turn", "Begin one with POST .../turns.")
        return record

    def session_results(self, principal: Principal, session: Session) -> SessionResults:
        return SessionResults(session.id, self.shelf, operator=principal.role == "operator")

    # approvals

    async def decide_approval(self, id: str, decision: ApprovalDecision) -> Approval:
        """Take a person's answer. Edited arguments are checked here as they are when they run, so that whoever edits
        them sees what is wrong. Raises NotFound, Unprocessable."""
        approval = await self.approvals.get(id)
        session = self.sessions.find(Principal("operator"), approval.session_id)
        if decision.decision == "allow" and decision.arguments is not None:
            await self._check_edited(session, approval, decision.arguments)
        session.last_used = time.time()  # the agent has its time to make the call again
        return await self.approvals.decide(approval, decision)

    async def _check_edited(self, session: Session, approval: Approval, arguments: Arguments) -> None:
        if self.runner.toolbox.get(approval.tool) is None:
            raise Unprocessable(f"there is no tool {approval.tool} any more", "Deny it.")
        if wrong := self.runner.toolbox.wrong(approval.tool, arguments):
            raise Unprocessable(f"arguments: {wrong}", "See the tool's schema.")
        ruling = await session.permissions.decide(approval.tool, arguments, arguments)
        if ruling.mode == "deny":
            raise Unprocessable(
                f"arguments: denied by the profile's permission {ruling.pattern!r}",
                "Edit them otherwise, or deny the call.",
                code="permission_denied",
            )

    # housekeeping

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(SWEEP_SECONDS)
            try:
                await self._sweep_once()
            except Exception:  # housekeeping goes on, whatever one round met
                logger.exception("housekeeping")

    async def _sweep_once(self) -> None:
        now, monotonic = time.time(), anyio.current_time()
        for session in self.sessions.open:
            for active in list(session.running.values()):
                self._end_if_left(active, monotonic)
            if not session.busy and now - session.last_used > session.idle_seconds:
                self._task_group.start_soon(self._expire, session, f"idle for {session.idle_seconds:g} s")
            elif now > session.row.expires:
                self._task_group.start_soon(self._expire, session, "its lifetime is over")
        kept = []
        for until, session, active in self._ended:
            if monotonic < until or active.readers:
                kept.append((until, session, active))
            else:
                active.discard()
                self._forget_key(active)
        self._ended = kept
        if monotonic >= self._tidied + TIDY_SECONDS:
            self._tidied = monotonic
            await self._tidy(now)

    def _end_if_left(self, active: ActiveCall, now: float) -> None:
        """The one rule for clients that are gone: a stream without a key ends some time after its last reader left."""
        gone = active.streamed and not active.readers and not active.keyed and active.left is not None
        if gone and now - (active.left or now) > self.options.replay_seconds:
            active.cancel("its client is gone")

    async def _expire(self, session: Session, reason: str) -> None:
        await self.close_session(session, state="expired", reason=reason)

    async def _tidy(self, now: float) -> None:
        await self.approvals.expire_due()
        await self.shelf.delete_expired()
        gone = await self.journal.tidy(now - self.options.records_seconds)
        self.sessions.forget(gone)
        await self.shelf.forget(gone)

    def _check_running(self) -> None:
        if self.stopping or self._tasks is None:
            raise Unavailable(
                "the gateway is stopping",
                "Try again after its restart.",
                code="stopping",
                retry_after_seconds=RETRY_SECONDS,
            )

    @property
    def _task_group(self) -> TaskGroup:
        assert self._tasks is not None  # inside run()
        return self._tasks


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _stored(request: SessionRequest) -> str:
    try:
        return request.model_dump_json()
    except ValueError as error:  # a lone surrogate: JSON can say it, nothing can keep it
        raise Unprocessable("the request holds text that is no Unicode", "Send bytes as base64.") from error


def _fingerprint(request: CallRequest) -> str:
    return hashlib.sha256(json.dumps(request.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _names(trail: Trail) -> tuple[str, ...]:
    hooks = [one.hook for one in trail if one.hook not in NO_HOOKS and one.decision != "continue"]
    return tuple(dict.fromkeys(hooks))
