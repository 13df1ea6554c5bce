"""CallRunner: one call, from its accepted record to what its terminal one will say."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio

from gateway.answer import bounded, build_result
from gateway.approvals import Approvals
from gateway.calls import ActiveCall
from gateway.errors import Problem, TooMany
from gateway.hooks.hook import HookContext
from gateway.hooks.offload import Offload
from gateway.hooks.permission import Ruling
from gateway.hooks.registered import HookBroken
from gateway.journal import Terminal
from gateway.models import (
    DID_NOT_RUN,
    STREAMS,
    Approval,
    Arguments,
    DecisionRecord,
    Fault,
    Question,
    Stream,
    TextBlock,
    ToolCall,
    ToolResult,
)
from gateway.outcomes import (
    denied_outcome,
    failed_outcome,
    invalid,
    stopped_outcome,
    unapproved_outcome,
    unknown_tool,
    without_output,
)
from gateway.pipeline import Pipeline, Stopped, Trail
from gateway.references import resolved
from gateway.results import SessionResults
from gateway.sandbox_view import SandboxView
from gateway.sessions import Session
from gateway.shelf import Shelf
from gateway.spool import SpoolFolder, Spools
from gateway.toolbox import Toolbox
from gateway.tools.tool import Outcome, Tool, ToolContext
from sandboxes import Sink

logger = logging.getLogger(__name__)

HOOK_RESULT_BYTES = 1 << 20
"""How much of one stream a post hook sees in the result itself; the rest is in `ctx.body`."""
OVERRUN_SECONDS = 5.0
"""A tool that should have ended by itself is cut off this long after its limit."""


@dataclass(frozen=True, slots=True)
class Body:
    """The whole output of a call, as `post_tool_call` reads it."""

    spools: Spools

    def size(self, stream: Stream) -> int:
        return self.spools[stream].kept

    async def read(self, stream: Stream, start: int, end: int) -> bytes:
        return await self.spools[stream].read(start, end)


@dataclass(frozen=True, slots=True)
class Judged:
    """What is to become of a call: `refused`, or asked about first, or it runs. `asked` are the arguments that it came
    with, in our spelling."""

    call: ToolCall
    refused: Outcome | None = None
    questions: tuple[Question, ...] = ()
    asked: Arguments = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.refused is None and not self.questions


@dataclass(frozen=True, slots=True)
class CallRunner:
    """Validation, hooks before, permission, the tool, hooks after, offloading; in this order, for every call."""

    pipeline: Pipeline
    toolbox: Toolbox
    approvals: Approvals
    offload: Offload
    shelf: Shelf
    spools: SpoolFolder

    def streams(self, keep: int) -> Spools:
        """New spools, each of which keeps that many bytes readable."""
        return {stream: self.spools.new(keep=keep) for stream in STREAMS}

    def kept_bytes(self, session: Session, tool: str, *, streamed: bool) -> int:
        """How much of a stream somebody may want to read back: all that may be stored, else head and tail."""
        keep = max(session.limits.output, HOOK_RESULT_BYTES)
        if streamed or self.offload.may_store(tool) or self.pipeline.matching(tool, "post_tool_call"):
            keep = max(keep, self.shelf.room(session.id))
        return keep

    async def run(self, session: Session, active: ActiveCall, trail: Trail) -> Terminal:
        outcome, judged, failure = None, Judged(active.call), None
        with active.scope:
            async with session.parallel:
                judged = await self._judged(session, active.call, trail)
                if judged.runs:
                    outcome, failure = await self._run_tool(session, active, judged.call, trail)
            if judged.questions:  # what waits for a person takes no place of those that run
                judged = await self._approved(session, judged, trail, active.tell)
                if judged.runs:
                    async with session.parallel:
                        outcome, failure = await self._run_tool(session, active, judged.call, trail)
        call, outcome = judged.call, outcome or judged.refused
        if outcome is None:
            outcome = Outcome("cancelled", code="cancelled", message=active.reason)
        if call.arguments is not active.call.arguments:
            active.call = call
        result = await build_result(call, outcome, active.spools, HOOK_RESULT_BYTES)
        raw = _raw_digest(active.spools)
        if outcome.status == "hook" or outcome.status in DID_NOT_RUN:
            return Terminal(call, result, trail, raw)
        if failure is None:
            try:
                final = await self.pipeline.after(self._hook_context(session, call, Body(active.spools)), result, trail)
                return await self._offloaded(session, active, result, final, trail, raw)
            except HookBroken as broken:
                failure = broken
        return await self._withheld(active, result, failure, trail, raw)

    async def _judged(self, session: Session, call: ToolCall, trail: Trail) -> "Judged":
        """Validation, hooks before, permission."""
        if self.toolbox.get(call.tool) is None or call.tool not in session.tool_names:
            return Judged(call, unknown_tool(call, session.tools))
        try:
            arguments = await resolved(call.arguments, SessionResults(session.id, self.shelf))
        except Problem as problem:
            return Judged(call, invalid(problem.code, problem.message, problem.remedy))
        call = call.model_copy(update={"arguments": arguments})
        if wrong := self.toolbox.wrong(call.tool, call.arguments):
            return Judged(call, invalid("invalid_arguments", wrong, "See the tool's schema."))
        asked = call.arguments
        passed = await self.pipeline.before(
            self._hook_context(session, call), lambda new: self.toolbox.wrong(call.tool, new), trail
        )
        if passed.arguments is not asked:
            call = call.model_copy(update={"arguments": passed.arguments})
        if isinstance(passed, Stopped):
            return Judged(call, stopped_outcome(passed))
        ruling = await session.permissions.decide(call.tool, asked, call.arguments)
        if ruling.mode == "deny":
            trail.append(_ruled(ruling))
            return Judged(call, denied_outcome(call, ruling))
        if ruling.mode == "ask":
            trail.append(_ruled(ruling))
            return Judged(call, questions=(*passed.questions, _question(call, ruling)), asked=asked)
        return Judged(call, questions=passed.questions, asked=asked)

    async def _approved(
        self, session: Session, judged: "Judged", trail: Trail, tell: Callable[[str], None]
    ) -> "Judged":
        """Let a person decide; arguments that they edited are checked as the first ones were, hooks aside."""
        call, started = judged.call, time.perf_counter()
        try:
            approval = await self.approvals.ask(call, judged.asked, judged.questions, tell)
        except TooMany as problem:
            return Judged(call, Outcome("denied", code=problem.code, message=problem.message, remedy=problem.remedy))
        trail.append(_answered(approval, started))
        if approval.state != "allowed":
            return Judged(call, unapproved_outcome(approval))
        if self.toolbox.get(call.tool) is None:  # an upstream took it back meanwhile
            return Judged(call, unknown_tool(call, session.tools))
        if not isinstance(approval.edited_arguments, dict):
            return Judged(call)
        call = call.model_copy(update={"arguments": approval.edited_arguments})
        if wrong := self.toolbox.wrong(call.tool, call.arguments):
            return Judged(call, invalid("invalid_arguments", f"edited by {approval.id}: {wrong}", "Ask again."))
        ruling = await session.permissions.decide(call.tool, call.arguments, call.arguments)
        return Judged(call, denied_outcome(call, ruling) if ruling.mode == "deny" else None)

    async def _run_tool(
        self, session: Session, active: ActiveCall, call: ToolCall, trail: Trail
    ) -> tuple[Outcome, HookBroken | None]:
        tool = self.toolbox.get(call.tool)
        assert tool is not None  # or it was refused
        ctx = self._hook_context(session, call)
        filters = {
            stream: one
            for stream in STREAMS
            if (one := self.pipeline.filtered(ctx, stream, active.spools[stream], trail)) is not None
        }
        if not filters:
            return await self._guarded(session, active, call, tool, active.spools), None
        async with anyio.create_task_group() as tasks:
            for one in filters.values():
                tasks.start_soon(one.run)
            try:
                outcome = await self._guarded(session, active, call, tool, {**active.spools, **filters})
            finally:
                for one in filters.values():
                    one.end()
        return outcome, next((one.failure for one in filters.values() if one.failure), None)

    async def _guarded(
        self, session: Session, active: ActiveCall, call: ToolCall, tool: Tool, sinks: Mapping[Stream, Sink]
    ) -> Outcome:
        """Run the tool; what it raises becomes a status."""
        ctx = ToolContext(
            session=session.info(call.turn_id, call.hook_context),
            call_id=call.id,
            sandbox=session.sandbox,
            hook_sandbox=SandboxView(session.sandbox, is_executable=session.kind.opens),
            stdout=sinks["stdout"],
            stderr=sinks["stderr"],
            results=SessionResults(session.id, self.shelf),
            timeout_seconds=session.limits.call_seconds,
            max_timeout_seconds=session.limits.max_call_seconds,
            job_offsets=session.job_offsets,
            tell=active.tell,
        )
        try:
            with anyio.fail_after(session.limits.max_call_seconds + OVERRUN_SECONDS):
                return await tool.run(call.arguments, ctx)
        except Exception as error:  # strangers' tools: whatever they raise is this call's end, not ours
            return failed_outcome(error, call)

    def _hook_context(self, session: Session, call: ToolCall, body: Body | None = None) -> HookContext:
        turn = session.turns.get(call.turn_id)
        return HookContext(
            session=session.info(call.turn_id, call.hook_context),
            turn=turn.info() if turn else None,
            call=call,
            tools=session.tools,
            sandbox=SandboxView(session.sandbox, is_executable=session.kind.opens),
            body=body,
        )

    async def _offloaded(
        self, session: Session, active: ActiveCall, built: ToolResult, final: ToolResult, trail: Trail, raw: str
    ) -> Terminal:
        spools = active.spools
        if final.content != built.content:
            spools = await self._respooled(active, final)
        ctx = self._hook_context(session, active.call)
        done = await self.offload.apply(ctx, final, spools, show_uri=session.show_store_uri)
        result = bounded(done.result, session.limits.output, cut=any(spools[stream].truncated for stream in STREAMS))
        trail.extend(done.decisions)
        return Terminal(active.call, result, trail, raw, done.rows)

    async def _respooled(self, active: ActiveCall, final: ToolResult) -> Spools:
        """A hook replaced the content: what the program wrote is gone, and the new content takes its place."""
        texts = [block for block in final.content if isinstance(block, TextBlock)]
        spools = self.streams(keep=sum(4 * len(block.text) for block in texts) + 1)
        for block in texts:
            await spools[block.stream or "stdout"].write(block.text.encode(errors="replace"))
        active.replace_spools(spools)
        return spools

    async def _withheld(
        self, active: ActiveCall, built: ToolResult, broken: HookBroken, trail: Trail, raw: str
    ) -> Terminal:
        """A hook broke after the tool ran: the caller sees nothing, the operator can read it until retention ends."""
        rows = await self.offload.withhold(active.call, built, active.spools)
        fault = Fault(
            code="hook_failed",
            message=f"the tool ran, but a hook broke: {broken.hook}: {broken.why}",
            remedy="The output is withheld; the operator can read it.",
        )
        return Terminal(active.call, without_output(active.call, "hook", fault), trail, raw, rows)


def _ruled(ruling: Ruling) -> DecisionRecord:
    return DecisionRecord(hook="permission", point="pre_tool_call", decision=ruling.mode, reason=ruling.pattern)


def _question(call: ToolCall, ruling: Ruling) -> Question:
    rule = f", by the rule {ruling.pattern!r}" if ruling.pattern else ""
    if not ruling.certain:
        rule = f" Whether the rule {ruling.pattern!r} is about it cannot be told by reading it."
    return Question(asked_by="permission", question=f"may {call.tool} run?{rule}")


def _answered(approval: Approval, started: float) -> DecisionRecord:
    edited = " (edited)" if approval.edited_arguments is not None else ""
    return DecisionRecord(
        hook="approval",
        point="pre_tool_call",
        decision=approval.state,
        reason=f"{approval.id}{edited}" + (f": {approval.reason}" if approval.reason else ""),
        duration_ms=round((time.perf_counter() - started) * 1000, 3),
    )


def _raw_digest(spools: Spools) -> str:
    return hashlib.sha256(" ".join(spools[stream].sha256 for stream in STREAMS).encode()).hexdigest()
