"""Gateway: open a session, run a call, read a result, close a session. Transports call this; it knows no protocol."""

import errno
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup

from gateway.answer import build_result
from gateway.calls import ActiveCall
from gateway.errors import Forbidden, NotFound, Problem, SandgateError, Unavailable, Unprocessable
from gateway.hooks.hook import HookContext
from gateway.hooks.offload import Offload, Offloaded
from gateway.journal import Journal, SessionRow, Terminal
from gateway.models import (
    STREAMS,
    CallRecord,
    CallRequest,
    CloseReport,
    DecisionRecord,
    Fault,
    OpenedSession,
    SessionRequest,
    SessionState,
    Stream,
    ToolCall,
    ToolResult,
)
from gateway.pipeline import HookBroken, Pipeline, Stopped, Trail
from gateway.principals import Principal, digest, new_token
from gateway.results import SessionResults
from gateway.sandbox_view import SandboxView
from gateway.sessions import RETRY_SECONDS, SandboxPlaces, Session, Sessions, new_session_id
from gateway.spool import Spool, SpoolFolder, Spools
from gateway.toolbox import Toolbox
from gateway.tools.tool import Outcome, Tool, ToolContext
from sandboxes import (
    CommandRefused,
    FileRefused,
    Probe,
    SandboxError,
    SandboxKind,
    SandboxLost,
    SandboxUnavailable,
    Sink,
)
from stores import ResultStore, StoreError

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
TIDY_SECONDS = 10.0
HOOK_RESULT_BYTES = 1 << 20
"""How much of one stream a post hook sees in the result itself; the rest is in `ctx.body`."""
OVERRUN_SECONDS = 5.0
"""A tool that should have ended by itself is cut off this long after its limit."""


class Profiles:
    """Turns a request into a session within its profile. Implemented by `build`, which alone knows settings."""

    def session(self, row: SessionRow, request: SessionRequest) -> Session:
        """Raises Unprocessable naming the field and its bound."""
        raise NotImplementedError

    def granted(self, principal: Principal, profile: str) -> bool:
        raise NotImplementedError

    def kinds(self) -> Mapping[str, SandboxKind]:
        raise NotImplementedError

    def lifetime_seconds(self, request: SessionRequest) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Times and sizes of one gateway."""

    replay_seconds: float = 10.0
    stop_seconds: float = 10.0
    retention_seconds: float = 86400.0
    records_seconds: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Body:
    """The whole output of a call, as `post_tool_call` reads it."""

    spools: Spools

    def size(self, stream: Stream) -> int:
        return self.spools[stream].kept

    async def read(self, stream: Stream, start: int, end: int) -> bytes:
        return await self.spools[stream].read(start, end)


class Gateway:
    """The whole program, without a transport. Use it inside `run()`, which owns its tasks."""

    def __init__(
        self,
        *,
        journal: Journal,
        sessions: Sessions,
        places: SandboxPlaces,
        profiles: Profiles,
        pipeline: Pipeline,
        toolbox: Toolbox,
        offload: Offload,
        results: ResultStore,
        spools: SpoolFolder,
        options: GatewayOptions,
    ) -> None:
        self.journal = journal
        self.sessions = sessions
        self.places = places
        self.profiles = profiles
        self.pipeline = pipeline
        self.toolbox = toolbox
        self.results = results
        self.options = options
        self.stopping = False
        self._offload = offload
        self._spools = spools
        self._tasks: TaskGroup | None = None
        self._tidied = 0.0
        self._keyed: dict[tuple[str, str], tuple[str, ActiveCall]] = {}
        self._ended: list[tuple[float, Session, ActiveCall]] = []

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Gateway"]:
        """Take up what an earlier process left, then serve until the block ends; calls still running then are given
        `stop_seconds` and end `cancelled`. Open sessions keep their workspaces and go on at the next start."""
        try:
            await self._restore()
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._sweep)
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop()
                    tasks.cancel_scope.cancel()
        finally:  # also where the block, or taking up, has failed
            with anyio.CancelScope(shield=True):
                for kind in self.profiles.kinds().values():
                    await kind.aclose()
                await self.results.aclose()
                await self.journal.aclose()

    async def _restore(self) -> None:
        interrupted = self.journal.interrupt_unfinished()
        if interrupted:
            logger.warning("%d calls were interrupted by the end of an earlier process", interrupted)
        for row in await self.journal.sessions():
            try:
                session = self.profiles.session(row, SessionRequest.model_validate_json(row.request))
            except SandgateError as error:
                logger.warning("session %s cannot go on: %s", row.id, error.message)
                if row.state == "open":
                    self.journal.end_session(CloseReport(id=row.id, state="closed", reason=error.message), time.time())
                continue
            session.state, session.close_report = row.state, row.close_report
            session.sequence = await self.journal.last_sequence(row.id)
            rows = await self.journal.results(row.id)
            session.results_bytes = sum(one.bytes for one in rows)
            if row.state == "open":
                await self._delete_unindexed(row.id, {one.key for one in rows})
            if row.state != "open":
                session.closed.set()
            self.sessions.add(session)

    async def _delete_unindexed(self, session_id: str, known: set[str]) -> None:
        """What an earlier process stored and did not live to index: nobody has its reference."""
        try:
            for stored in await self.results.list(session_id):
                if stored.key not in known:
                    await self.results.delete(session_id, stored.key)
        except StoreError as error:
            logger.warning("results of session %s could not be looked at: %s", session_id, error)

    async def drain(self) -> None:
        """Accept nothing more; let calls end for `stop_seconds`, then cancel them. Returns when all have ended."""
        self.stopping = True
        running = [active for session in self.sessions for active in session.running.values()]
        with anyio.move_on_after(self.options.stop_seconds):
            for active in running:
                await active.done.wait()
        for active in running:
            active.cancel()
        for active in running:
            await active.done.wait()

    async def _stop(self) -> None:
        await self.drain()
        self.journal.touch_sessions([(one.id, one.last_used) for one in self.sessions.open])
        for session in self.sessions.open:
            await session.suspend()
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
            raise NotFound("no such profile", "Name a profile that this token is granted.", code="no_such_profile")
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
        self.journal.add_session(row)
        self.sessions.add(session)
        try:
            if session.sandbox_hooks:
                await session.sandbox()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._undo_opening(session, error)
            raise _opening_problem(error) from error
        return OpenedSession(id=session.id, token=token, session=session.record())

    async def _check_kind(self, session: Session) -> None:
        probe = await session.kind.probe()
        if not probe.works:
            raise Unavailable(
                f"sandbox unavailable: the kind {probe.kind!r} does not work here: {probe.reason}",
                probe.remedy,
                code="sandbox_unavailable",
            )
        if session.sandbox_hooks:
            self.places.check()

    async def _undo_opening(self, session: Session, error: BaseException) -> None:
        session.state = "closed"
        try:
            await session.kind.destroy(session.id)
        except SandboxError as left:
            logger.error("session %s: %s", session.id, left.message)
        report = CloseReport(id=session.id, state="closed", reason=f"not opened: {type(error).__name__}")
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
                active.cancel()
            for active in running:
                await active.done.wait()
            try:
                report = await session.end(state, reason)
            except Exception as error:
                logger.exception("closing session %s", session.id)
                report = CloseReport(id=session.id, state=state, reason=reason, failed=(f"internal: {error}",))
            self.journal.end_session(report, time.time())
            session.state, session.close_report = state, report
            session.closed.set()
        return report

    async def probes(self) -> list[Probe]:
        return [await kind.probe() for kind in self.profiles.kinds().values()]

    # calls

    async def start_call(
        self, session: Session, request: CallRequest, key: str | None = None, *, streamed: bool = False
    ) -> ActiveCall:
        """Accept a call; its record is written when this returns, and it runs on by itself. `streamed` keeps its whole
        output readable, also where only head and tail would be needed.

        A key that was used before gives the same call (running or answered), never a second run. Raises NotFound
        (closed session), TooMany (no place for a sandbox), Unprocessable (a key used for another request).
        """
        self._check_running()
        session.check_open()
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
        tool = self.toolbox.get(call.tool)
        if tool is not None and tool.needs_sandbox and not session.sandbox_alive:
            self.places.check()
        session.sequence = call.sequence
        active = self._active(session, call, keyed=key is not None, streamed=streamed)
        session.running[call.id] = active
        try:
            self.journal.accept(call, key, fingerprint)
        except BaseException:
            del session.running[call.id]
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
        active = ActiveCall(call, self._streams(0), shows_output=True, keyed=True)
        active.finish(answer)
        return active

    def _call(self, session: Session, request: CallRequest) -> ToolCall:
        name, arguments = self.toolbox.resolve(request.tool, request.arguments)
        tool, sequence = self.toolbox.get(name), session.sequence + 1
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
        )

    def _active(self, session: Session, call: ToolCall, *, keyed: bool, streamed: bool) -> ActiveCall:
        shows = session.raw_stream or not self.pipeline.hides_output(call.tool)
        keep = max(session.limits.output, HOOK_RESULT_BYTES)
        if streamed or self._offload.may_store(call.tool) or self.pipeline.matching(call.tool, "post_tool_call"):
            keep = max(keep, session.limits.results_size - session.results_bytes)
        return ActiveCall(call, self._streams(keep), shows_output=shows, keyed=keyed)

    def _streams(self, keep: int) -> dict[Stream, Spool]:
        return {stream: self._spools.new(keep=keep) for stream in STREAMS}

    async def _run(self, session: Session, active: ActiveCall) -> None:
        """One call, from its accepted record to its terminal one."""
        trail: Trail = []
        started = time.perf_counter()
        try:
            end = await self._to_the_end(session, active, trail)
        except Exception:
            logger.exception("call %s of session %s", active.call.id, session.id)
            fault = Fault(code="internal", message="the gateway failed", remedy="Its log has the reason.")
            end = Terminal(active.call, _plain(active.call, "internal", fault), trail)
        duration = round((time.perf_counter() - started) * 1000, 3)
        end = replace(
            end,
            keep_answer=active.keyed,
            result=end.result.model_copy(update={"duration_ms": duration, "hooks": _names(trail)}),
        )
        try:
            self.journal.finish(end)
        finally:
            session.results_bytes += sum(row.bytes for row in end.results)
            session.ended(active)
            active.finish(end.result)
        if active.streamed or active.keyed:
            self._ended.append((anyio.current_time() + self.options.replay_seconds, session, active))
        else:
            active.discard()

    async def _to_the_end(self, session: Session, active: ActiveCall, trail: Trail) -> Terminal:
        outcome, call, failure = Outcome("cancelled", code="cancelled", message="cancelled"), active.call, None
        with active.scope:
            async with session.parallel:
                call, outcome, failure = await self._let_run(session, active, trail)
        if call.arguments is not active.call.arguments:
            active.call = call
        result = await build_result(call, outcome, active.spools, HOOK_RESULT_BYTES)
        raw = _raw_digest(active.spools)
        if outcome.status in ("skipped", "denied", "invalid", "hook"):
            return Terminal(call, result, trail, raw)
        if failure is None:
            try:
                final = await self.pipeline.after(self._hook_context(session, call, Body(active.spools)), result, trail)
                return await self._offloaded(session, active, result, final, trail, raw)
            except HookBroken as broken:
                failure = broken
        return await self._withheld(active, failure, trail, raw)

    async def _let_run(
        self, session: Session, active: ActiveCall, trail: Trail
    ) -> tuple[ToolCall, Outcome, HookBroken | None]:
        call = active.call
        tool = self.toolbox.get(call.tool)
        if tool is None or call.tool not in {one.name for one in session.tools}:
            return (
                call,
                _invalid(
                    "unknown_tool",
                    f"no such tool: {call.tool[:200]}",
                    f"This session has: {', '.join(one.name for one in session.tools)}.",
                ),
                None,
            )
        if wrong := self.toolbox.wrong(call.tool, call.arguments):
            return call, _invalid("invalid_arguments", wrong, "See the tool's schema."), None
        passed = await self.pipeline.before(
            self._hook_context(session, call), lambda new: self.toolbox.wrong(call.tool, new), trail
        )
        call = call.model_copy(update={"arguments": passed.arguments})
        if isinstance(passed, Stopped):
            return call, _stopped(passed), None
        if session.permissions.decide(call.tool) == "deny":
            trail.append(DecisionRecord(hook="permission", point="pre_tool_call", decision="deny"))
            return (
                call,
                Outcome(
                    "denied",
                    code="permission_denied",
                    message=f"not allowed here: {call.tool}",
                    remedy="Do it another way, or ask the operator.",
                ),
                None,
            )
        outcome, failure = await self._run_tool(session, active, call, tool)
        return call, outcome, failure

    async def _run_tool(
        self, session: Session, active: ActiveCall, call: ToolCall, tool: Tool
    ) -> tuple[Outcome, HookBroken | None]:
        ctx = self._hook_context(session, call)
        filters = {
            stream: one
            for stream in STREAMS
            if (one := self.pipeline.filtered(ctx, stream, active.spools[stream])) is not None
        }
        if not filters:
            return await self._guarded(session, call, tool, active.spools), None
        async with anyio.create_task_group() as tasks:
            for one in filters.values():
                tasks.start_soon(one.run)
            try:
                outcome = await self._guarded(session, call, tool, {**active.spools, **filters})
            finally:
                for one in filters.values():
                    one.end()
        return outcome, next((one.failure for one in filters.values() if one.failure), None)

    async def _guarded(self, session: Session, call: ToolCall, tool: Tool, sinks: Mapping[Stream, Sink]) -> Outcome:
        """Run the tool; what it raises becomes a status."""
        ctx = ToolContext(
            session=session.info(call.turn_id),
            sandbox=session.sandbox,
            hook_sandbox=SandboxView(session.sandbox),
            stdout=sinks["stdout"],
            stderr=sinks["stderr"],
            results=SessionResults(session.id, self.results, self.journal),
            timeout_seconds=session.limits.call_seconds,
            max_timeout_seconds=session.limits.max_call_seconds,
        )
        try:
            with anyio.fail_after(session.limits.max_call_seconds + OVERRUN_SECONDS):
                return await tool.run(call.arguments, ctx)
        except Exception as error:  # strangers' tools: whatever they raise is this call's end, not ours
            return _failed(error, call)

    def _hook_context(self, session: Session, call: ToolCall, body: Body | None = None) -> HookContext:
        return HookContext(
            session=session.info(call.turn_id),
            call=call,
            tools=session.tools,
            sandbox=SandboxView(session.sandbox),
            body=body,
        )

    async def _offloaded(
        self, session: Session, active: ActiveCall, built: ToolResult, final: ToolResult, trail: Trail, raw: str
    ) -> Terminal:
        spools = active.spools
        if final.content != built.content:
            spools = await self._respooled(active, final)
        done = await self._offload.apply(active.call, final, spools, show_uri=session.show_store_uri)
        done = await self._bounded(session, done, spools)
        trail.extend(done.decisions)
        return Terminal(active.call, done.result, trail, raw, done.rows)

    async def _respooled(self, active: ActiveCall, final: ToolResult) -> Spools:
        """A hook replaced the content: what the program wrote is gone, and the new content takes its place."""
        spools = self._streams(keep=sum(4 * len(block.text) for block in final.content) + 1)
        for block in final.content:
            await spools[block.stream or "stdout"].write(block.text.encode(errors="replace"))
        active.replace_spools(spools)
        return spools

    async def _bounded(self, session: Session, done: Offloaded, spools: Spools) -> Offloaded:
        """What stayed in the answer is cut to the session's `output` a stream."""
        stored = {one.stream for one in done.result.references}
        limit, blocks, cut = session.limits.output, [], done.result.truncated and not stored
        for block in done.result.content:
            text = block.text
            if (block.stream or "stdout") not in stored and len(text.encode(errors="replace")) > limit:
                half, cut = limit // 2, True
                encoded = text.encode(errors="replace")
                text = (
                    f"{encoded[:half].decode(errors='ignore')}\n... {len(encoded) - 2 * half:,} bytes left out ...\n"
                    f"{encoded[-half:].decode(errors='ignore')}"
                )
            blocks.append(block.model_copy(update={"text": text}))
        truncated = cut or any(spools[stream].truncated for stream in STREAMS)
        return replace(done, result=done.result.model_copy(update={"content": tuple(blocks), "truncated": truncated}))

    async def _withheld(self, active: ActiveCall, broken: HookBroken, trail: Trail, raw: str) -> Terminal:
        """A hook broke after the tool ran: the caller sees nothing, the operator can read it until retention ends."""
        rows = []
        for stream in STREAMS:
            if active.spools[stream].total:
                try:
                    rows.append(
                        replace(await self._offload.keep(active.call, stream, active.spools[stream]), withheld=1)
                    )
                except StoreError as error:
                    logger.warning("call %s: withheld output not stored: %s", active.call.id, error)
        fault = Fault(
            code="hook_failed",
            message=f"the tool ran, but a hook broke: {broken.hook}: {broken.why}",
            remedy="The output is withheld; the operator can read it.",
        )
        return Terminal(active.call, _plain(active.call, "hook", fault), trail, raw, rows)

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

    def session_results(self, principal: Principal, session: Session) -> SessionResults:
        return SessionResults(session.id, self.results, self.journal, operator=principal.role == "operator")

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
            if not session.running and now - session.last_used > session.idle_seconds:
                self._task_group.start_soon(self._expire, session, f"idle for {session.idle_seconds:g} s")
            elif now > session.row.expires:
                self._task_group.start_soon(self._expire, session, "its lifetime is over")
        kept = []
        for until, session, active in self._ended:
            if monotonic < until or active.readers:
                kept.append((until, session, active))
            else:
                active.discard()
                self._keyed = {key: value for key, value in self._keyed.items() if value[1] is not active}
        self._ended = kept
        if monotonic >= self._tidied + TIDY_SECONDS:
            self._tidied = monotonic
            await self._tidy(now)

    def _end_if_left(self, active: ActiveCall, now: float) -> None:
        """The one rule for clients that are gone: a stream without a key ends some time after its last reader left."""
        gone = active.streamed and not active.readers and not active.keyed and active.left is not None
        if gone and now - (active.left or now) > self.options.replay_seconds:
            active.cancel()

    async def _expire(self, session: Session, reason: str) -> None:
        await self.close_session(session, state="expired", reason=reason)

    async def _tidy(self, now: float) -> None:
        for row in await self.journal.expired_results(now):
            try:
                await self.results.delete(row.session_id, row.key)
            except StoreError as error:
                logger.warning("expired result %s of %s not deleted: %s", row.key, row.session_id, error)
                continue
            self.journal.mark_deleted([row], now)
        self.sessions.forget(await self.journal.tidy(now - self.options.records_seconds))

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


def _stored(request: SessionRequest) -> str:
    try:
        return request.model_dump_json()
    except ValueError as error:  # a lone surrogate: JSON can say it, nothing can keep it
        raise Unprocessable("the request holds text that is no Unicode", "Send bytes as base64.") from error


def _fingerprint(request: CallRequest) -> str:
    return hashlib.sha256(json.dumps(request.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _raw_digest(spools: Spools) -> str:
    return hashlib.sha256(" ".join(spools[stream].sha256 for stream in STREAMS).encode()).hexdigest()


def _names(trail: Trail) -> tuple[str, ...]:
    hooks = [one.hook for one in trail if one.hook not in ("offload", "permission") and one.decision != "continue"]
    return tuple(dict.fromkeys(hooks))


def _plain(call: ToolCall, status: str, fault: Fault) -> ToolResult:
    return ToolResult.model_validate(
        {"id": call.id, "call_id": call.call_id, "tool": call.tool, "status": status, "error": fault}
    )


def _invalid(code: str, message: str, remedy: str) -> Outcome:
    return Outcome("invalid", code=code, message=message, remedy=remedy)


def _stopped(stopped: Stopped) -> Outcome:
    match stopped.status:
        case "skipped":
            return Outcome("skipped", code="tool_skipped", message=stopped.reason)
        case "invalid":
            return Outcome(
                "invalid",
                code="invalid_arguments",
                message=stopped.reason,
                remedy="The hook is at fault, not the caller.",
            )
        case "hook":
            return Outcome(
                "hook",
                code="hook_failed",
                message=f"the tool did not run, a hook broke: {stopped.reason}",
                remedy='Mend the hook, or declare it on_failure = "open".',
            )


def _failed(error: Exception, call: ToolCall) -> Outcome:
    """What an exception out of a tool means."""
    match error:
        case SandboxLost():
            files = "its files are lost" if error.files_lost else "its files are still there"
            return Outcome(
                "sandbox_lost",
                code="sandbox_lost",
                message=f"{error.message}; {files}",
                remedy="The next call gets a new sandbox.",
            )
        case SandboxUnavailable():
            return Outcome("engine", code="sandbox_unavailable", message=error.message, remedy=error.remedy)
        case CommandRefused(code="E2BIG" | "EINVAL"):
            return _invalid("invalid_arguments", error.message, error.remedy)
        case CommandRefused(code="EAGAIN"):
            return Outcome("pids", code="command_failed", message=error.message, remedy=error.remedy)
        case CommandRefused():
            return Outcome("failed", code="command_failed", message=error.message, remedy=error.remedy)
        case FileRefused(code="disk_full"):
            return Outcome("disk", code="disk_full", message=error.message, remedy=error.remedy)
        case FileRefused():
            return Outcome("failed", code=error.code, message=error.message, remedy=error.remedy)
        case Problem(code="session_closed"):
            return Outcome("cancelled", code="cancelled", message=error.message, remedy=error.remedy)
        case Problem():
            return Outcome("failed", code=error.code, message=error.message, remedy=error.remedy)
        case TimeoutError():
            return Outcome("timeout", code="tool_timeout", message="the tool did not end within its limit")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Outcome(
                "disk",
                code="disk_full",
                message="the gateway's own disk is full",
                remedy="Free space in the state folder.",
            )
    logger.error("tool %s failed in call %s of session %s", call.tool, call.id, call.session_id, exc_info=error)
    return Outcome(
        "failed",
        code="capability_execution_failed",
        message=f"the tool raised {type(error).__name__}",
        remedy="The gateway's log has the reason.",
    )


def _opening_problem(error: BaseException) -> BaseException:
    match error:
        case SandboxUnavailable():
            return Unavailable(f"sandbox unavailable: {error.message}", error.remedy, code="sandbox_unavailable")
        case SandboxError():
            return Unprocessable(
                f"the sandbox could not be prepared: {error.message}",
                error.remedy,
                code=getattr(error, "code", "sandbox_lost"),
            )
        case SandgateError():
            return error
        case Exception():
            return Unavailable(
                f"a SandboxHook failed: {type(error).__name__}: {error}",
                "Nothing is left of the session.",
                code="sandbox_hook_failed",
            )
    return error
