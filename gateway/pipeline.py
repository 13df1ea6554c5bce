"""Pipeline: the hooks around one call, their order, their limits, and what happens when one breaks.

Every matching hook runs, in list order, at both points. Whatever is not a decision of the point is a broken hook, and
a broken hook closes: before the tool the call does not run, after it the result is withheld.
"""

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream

from gateway.hooks.hook import Continue, Hook, HookContext, Skip
from gateway.matching import matches
from gateway.models import Arguments, DecisionRecord, Stream, ToolResult
from sandboxes import Sink

logger = logging.getLogger(__name__)

HANGING_THREADS: Final = 4
"""A sync hook with this many threads still hanging is not called again."""
SYNC_THREADS: Final = 16
"""How many calls of one sync hook may run at a time; each hook has its own, so none starves another."""


class HookBroken(Exception):
    """A hook raised, was slow, or did not answer with a decision of its point."""

    def __init__(self, hook: str, why: str) -> None:
        super().__init__(f"{hook}: {why}")
        self.hook = hook
        self.why = why


@dataclass(slots=True)
class Registered:
    """A hook with what the operator says of it. `on_failure="open"` lets calls pass where the hook is broken."""

    hook: Hook
    tools: tuple[str, ...] = ("*",)
    timeout_seconds: float = 10.0
    on_failure: Literal["closed", "open"] = "closed"
    hanging: int = 0
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(SYNC_THREADS))

    @property
    def name(self) -> str:
        return self.hook.name


@dataclass(frozen=True, slots=True)
class Passed:
    """The chain went to its end; `arguments` are the last ones."""

    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Stopped:
    """The chain ended early: `skipped`, `hook` (broken) or `invalid` (a rewrite that breaks the schema)."""

    status: Literal["skipped", "hook", "invalid"]
    reason: str
    arguments: Arguments


Validate = Callable[[Arguments], str | None]
Trail = list[DecisionRecord]


class Pipeline:
    """The hooks of one gateway, in their order."""

    def __init__(self, hooks: Sequence[Registered]) -> None:
        self._hooks = tuple(hooks)
        self.matching = functools.lru_cache(maxsize=1024)(self._matching)  # several times a call

    def _matching(self, tool: str, method: str) -> tuple[Registered, ...]:
        """The hooks that have this method and match the tool, in list order."""
        return tuple(one for one in self._hooks if matches(tool, one.tools) and one.hook.overrides(method))

    def hides_output(self, tool: str) -> bool:
        """Whether output may not be shown as it flows: a post hook sees it later and has no filter for it."""
        return any(not one.hook.overrides("filter_output") for one in self.matching(tool, "post_tool_call"))

    async def before(self, ctx: HookContext, validate: Validate, trail: Trail) -> Passed | Stopped:
        """Run `pre_tool_call` of every matching hook; `validate` names what is wrong with rewritten arguments."""
        for one in self.matching(ctx.call.tool, "pre_tool_call"):
            try:
                decision = await self._ask(one, "pre_tool_call", ctx, ctx.call, trail)
            except HookBroken as broken:
                return Stopped("hook", str(broken), ctx.call.arguments)
            match decision:
                case Skip(reason):
                    return Stopped("skipped", reason, ctx.call.arguments)
                case Continue(arguments=dict() as arguments):
                    ctx = replace(ctx, call=ctx.call.model_copy(update={"arguments": arguments}))
                    if wrong := validate(arguments):
                        return Stopped("invalid", f"{one.name} rewrote the arguments: {wrong}", arguments)
        return Passed(ctx.call.arguments)

    async def after(self, ctx: HookContext, result: ToolResult, trail: Trail) -> ToolResult:
        """Run `post_tool_call` of every matching hook, each on the result of the one before. Raises HookBroken."""
        for one in self.matching(ctx.call.tool, "post_tool_call"):
            decision = await self._ask(one, "post_tool_call", ctx, result, trail)
            if isinstance(decision, Continue) and decision.result is not None:
                result = _same_call(one.name, result, decision.result)
        return result

    async def _ask(self, one: Registered, point: str, ctx: HookContext, value: Any, trail: Trail) -> Continue | Skip:
        started = time.perf_counter()
        try:
            decision = _checked(one.name, point, await _call(one, getattr(one.hook, point), ctx, value))
        except HookBroken as broken:
            trail.append(_record(one.name, point, f"broken ({one.on_failure})", broken.why, started))
            if one.on_failure == "open":
                return Continue()
            raise
        reason = decision.reason if isinstance(decision, Skip) else ""
        trail.append(_record(one.name, point, _word(decision), reason, started))
        return decision

    def filtered(self, ctx: HookContext, stream: Stream, sink: Sink) -> "Filtered | None":
        """A sink that passes bytes through every matching `filter_output` to `sink`; None where no hook filters."""
        hooks = self.matching(ctx.call.tool, "filter_output")
        return Filtered(hooks, ctx, stream, sink) if hooks else None


async def _call(one: Registered, method: Callable[..., Any], ctx: HookContext, value: Any) -> Any:
    if one.hanging >= HANGING_THREADS:
        raise HookBroken(one.name, f"not called: {one.hanging} earlier calls of it still hang")
    try:
        with anyio.fail_after(one.timeout_seconds):
            if inspect.iscoroutinefunction(method):
                return await method(ctx, value)
            return await _in_thread(one, functools.partial(method, ctx, value))
    except TimeoutError:
        raise HookBroken(one.name, f"no answer within {one.timeout_seconds:g} s") from None
    except Exception as error:  # strangers' code: whatever it raises is a broken hook
        logger.exception("hook %s raised in call %s of session %s", one.name, ctx.call.id, ctx.session.id)
        raise HookBroken(one.name, f"raised {type(error).__name__}; the gateway's log has it") from error


async def _in_thread(one: Registered, work: Callable[[], Any]) -> Any:
    abandoned = returned = False

    def counted() -> Any:
        nonlocal returned
        try:
            return work()
        finally:
            returned = True
            if abandoned:
                one.hanging -= 1

    try:
        answer = await anyio.to_thread.run_sync(counted, abandon_on_cancel=True, limiter=one.threads)
    except anyio.get_cancelled_exc_class():
        abandoned = not returned
        one.hanging += abandoned
        raise
    return await answer if isinstance(answer, Awaitable) else answer


def _checked(hook: str, point: str, decision: Any) -> Continue | Skip:
    before = point == "pre_tool_call"
    match decision:
        case Continue(arguments=arguments, result=None) if before and (arguments is None or _is_arguments(arguments)):
            return Continue(arguments=arguments)
        case Skip(reason=str() as reason) if before:
            return Skip(reason) if reason.strip() else Skip()
        case Continue(arguments=None, result=result) if not before and (result is None or type(result) is ToolResult):
            return Continue(result=result)
    raise HookBroken(hook, f"{type(decision).__name__} is not a decision of {point}")


def _is_arguments(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _same_call(hook: str, old: ToolResult, new: ToolResult) -> ToolResult:
    if (old.id, old.tool, old.references) != (new.id, new.tool, new.references):
        raise HookBroken(hook, "a result keeps its id, tool and references")
    return new


def _word(decision: Continue | Skip) -> str:
    if isinstance(decision, Skip):
        return "skip"
    return "continue" if decision == Continue() else "rewrite"


def _record(hook: str, point: str, decision: str, reason: str, started: float) -> DecisionRecord:
    return DecisionRecord(
        hook=hook,
        point=point,
        decision=decision,
        reason=reason[:2000],
        duration_ms=round((time.perf_counter() - started) * 1000, 3),
    )


class Filtered:
    """Bytes through the filters of a chain of hooks.

    A filter that raises breaks its hook: nothing more reaches the sink, `failure` names it, and the program goes on
    with its output dropped.
    """

    def __init__(self, hooks: Sequence[Registered], ctx: HookContext, stream: Stream, sink: Sink) -> None:
        self._hooks = hooks
        self._ctx = ctx
        self._stream = stream
        self._sink = sink
        self._send, self._receive = anyio.create_memory_object_stream[bytes](0)
        self.failure: HookBroken | None = None

    async def write(self, chunk: bytes) -> None:
        if self.failure is None:
            with contextlib.suppress(anyio.BrokenResourceError):
                await self._send.send(chunk)

    async def run(self) -> None:
        """Move bytes until `end`; run it beside the program."""
        chunks = _received(self._receive)
        for one in self._hooks:
            chunks = _guarded(one, self._ctx, self._stream, chunks)
        try:
            async for chunk in chunks:
                await self._sink.write(chunk)
        except HookBroken as broken:
            self.failure = broken
        finally:
            self._receive.close()

    def end(self) -> None:
        """Say that no more bytes come; `run` then lets the filters finish."""
        self._send.close()


async def _received(stream: MemoryObjectReceiveStream[bytes]) -> AsyncIterator[bytes]:
    async for chunk in stream:
        yield chunk


async def _guarded(
    one: Registered, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    try:
        async for chunk in one.hook.filter_output(ctx, stream, chunks):
            if not isinstance(chunk, bytes):
                raise HookBroken(one.name, f"filter_output gave {type(chunk).__name__}, not bytes")
            yield chunk
    except HookBroken:
        raise
    except Exception as error:  # strangers' code: whatever it raises is a broken hook
        logger.exception("filter_output of %s raised in call %s of session %s", one.name, ctx.call.id, ctx.session.id)
        raise HookBroken(one.name, f"filter_output raised {type(error).__name__}; the gateway's log has it") from error
