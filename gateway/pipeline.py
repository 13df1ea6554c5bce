"""Pipeline: the hooks around one call, their order, their limits, and what happens when one breaks.

Every matching hook runs, in list order, at both points. Whatever is not a decision of the point is a broken hook, and
a broken hook closes: before the tool the call does not run, after it the result is withheld.
"""

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar, get_args

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream
from pydantic import TypeAdapter, ValidationError

from gateway.errors import SettingsError
from gateway.hooks.hook import (
    FILTER,
    NO_QUESTION,
    Accept,
    After,
    AnyDecision,
    Ask,
    Before,
    Continue,
    Hook,
    HookContext,
    Reject,
    Retry,
    Skip,
    Stop,
)
from gateway.hooks.registered import Context, HookBroken, Registered
from gateway.matching import matches
from gateway.models import Arguments, DecisionRecord, Question, Stream, ToolResult
from gateway.tracing import Spans, ended
from sandboxes import Sink

logger = logging.getLogger(__name__)

WARM_UP_SECONDS: Final = 60.0
CLOSE_SECONDS: Final = 10.0
MOST_REASON: Final = 10_000
"""Characters of a reason that an agent reads; the record keeps 2,000."""
_ARGUMENTS: Final[TypeAdapter[Arguments]] = TypeAdapter(Arguments)

Decision = TypeVar("Decision")


@dataclass(frozen=True, slots=True)
class Passed:
    """The chain went to its end; `arguments` are the last ones, `questions` what hooks want a person to decide."""

    arguments: Arguments
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """The chain ended early: `skipped`, `hook` (broken) or `invalid` (a rewrite that breaks the schema)."""

    status: Literal["skipped", "hook", "invalid"]
    reason: str
    arguments: Arguments


Validate = Callable[[Arguments], str | None]
Trail = list[DecisionRecord]


@dataclass(frozen=True, slots=True)
class Check(Generic[Decision]):
    """What a point takes for a decision: `read` gives None for anything else; `passes` is that of an open hook."""

    read: Callable[[Any], Decision | None]
    passes: Decision


class Pipeline:
    """The hooks of one gateway, in their order. Use `warm_up` before the first call and `aclose` after the last."""

    def __init__(self, hooks: Sequence[Registered], spans: Spans | None = None) -> None:
        self.hooks = tuple(hooks)
        self.spans = spans or Spans()
        self.matching = functools.lru_cache(maxsize=1024)(self._matching)  # several times a call
        self._warm: list[Hook] = []

    def _matching(self, tool: str, method: str) -> tuple[Registered, ...]:
        """The hooks that have this method and match the tool, in list order."""
        return tuple(one for one in self.hooks if method in one.methods and matches(tool, one.tools))

    async def warm_up(self) -> None:
        """Call `warm_up` of each hook object, in list order. Raises SettingsError where one fails; what was warm is
        then closed by `aclose`."""
        for hook in dict.fromkeys(one.hook for one in self.hooks):
            if hook.overrides("warm_up"):
                try:
                    with anyio.fail_after(WARM_UP_SECONDS):
                        await _run(hook.warm_up)
                except Exception as error:  # strangers' code: it is told by name, and nothing starts
                    raise SettingsError(
                        f"hooks: {hook.name}: warm_up raised {type(error).__name__}: {error}", "Mend the hook."
                    ) from error
            self._warm.append(hook)

    async def aclose(self) -> None:
        """Call `close` of each hook object that is warm, the last first; an error is logged, and stops no other."""
        while self._warm:
            hook = self._warm.pop()
            if hook.overrides("close"):
                try:
                    with anyio.fail_after(CLOSE_SECONDS):
                        await _run(hook.close)
                except Exception:  # strangers' code
                    logger.exception("close of the hook %s", hook.name)

    def having(self, point: str) -> tuple[Registered, ...]:
        """The hooks that have this method, whatever tools they are for."""
        return tuple(one for one in self.hooks if point in one.methods)

    def hides_output(self, tool: str) -> bool:
        """Whether output may not be shown as it flows: a post hook sees it later and has no filter for it."""
        return any(FILTER not in one.methods for one in self.matching(tool, "post_tool_call"))

    async def before(self, ctx: HookContext, validate: Validate, trail: Trail) -> Passed | Stopped:
        """Run `pre_tool_call` of every matching hook; `validate` names what is wrong with rewritten arguments."""
        questions: tuple[Question, ...] = ()
        for one in self.matching(ctx.call.tool, "pre_tool_call"):
            own = _own(ctx)
            try:
                decision = await self.ask(one, "pre_tool_call", own, own.call, _BEFORE, trail)
            except HookBroken as broken:
                return Stopped("hook", str(broken), ctx.call.arguments)
            if isinstance(decision, Skip):
                return Stopped("skipped", decision.reason, ctx.call.arguments)
            if isinstance(decision, Ask):
                questions += (Question(asked_by=one.name, question=decision.question),)
            if decision.arguments is not None:
                ctx = replace(ctx, call=ctx.call.model_copy(update={"arguments": decision.arguments}))
                if wrong := validate(decision.arguments):
                    return Stopped("invalid", f"{one.name} rewrote the arguments: {wrong}", decision.arguments)
        return Passed(ctx.call.arguments, questions)

    async def after(self, ctx: HookContext, result: ToolResult, trail: Trail) -> ToolResult:
        """Run `post_tool_call` of every matching hook, each on the result of the one before. Raises HookBroken."""
        for one in self.matching(ctx.call.tool, "post_tool_call"):
            given = result
            if given.structured is not None:
                given = given.model_copy(update={"structured": _copied(given.structured)})
            check = Check(functools.partial(_after, given=given), Continue())
            decision = await self.ask(one, "post_tool_call", _own(ctx), given, check, trail)
            result = decision.result or result
        return result

    async def ask(
        self, one: Registered, point: str, ctx: Context, value: Any, check: Check[Decision], trail: Trail
    ) -> Decision:
        """One hook's decision, recorded. Raises HookBroken."""
        with self.spans.hook(one.name, type(one.hook).__name__, point, ctx) as span:
            started = time.perf_counter()
            try:
                answer = await one.ask(point, ctx, value)
                if (decision := check.read(answer)) is None:
                    raise HookBroken(one.name, f"{_shown(answer)} is not a decision of {point}")
            except HookBroken as broken:
                trail.append(_record(one.name, point, f"broken ({one.on_failure})", broken.why, started))
                ended(span, "broken", failed=True)
                if one.on_failure == "open":
                    return check.passes
                raise
            record = _record(one.name, point, _word(decision), _reason(decision), started)
            trail.append(record)
            ended(span, record.decision, failed=False)
        return decision

    def filtered(self, ctx: HookContext, stream: Stream, sink: Sink, trail: Trail) -> "Filtered | None":
        """A sink that passes bytes through every matching `filter_output` to `sink`; None where no hook filters."""
        hooks = self.matching(ctx.call.tool, FILTER)
        return Filtered(hooks, ctx, stream, sink, trail) if hooks else None


async def _run(work: Callable[[], Any]) -> None:
    if inspect.iscoroutinefunction(work):
        await work()
    else:
        await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


def _own(ctx: HookContext) -> HookContext:
    """The context with a call of the hook's own, so that what it changes in place changes nothing."""
    arguments = {"arguments": _copied(ctx.call.arguments), "original_arguments": _copied(ctx.call.original_arguments)}
    call = ctx.call.model_copy(update=arguments)
    return HookContext(ctx.session, call, ctx.tools, ctx.sandbox, ctx.turn, ctx.body)  # `replace` takes twice as long


def _copied(value: Any) -> Any:
    """A deep copy of JSON; `copy.deepcopy` takes five times as long."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value


def _shown(answer: Any) -> str:
    kind = type(answer)
    return f"{kind.__name__} with these values" if kind in get_args(AnyDecision) else kind.__name__


def _before(answer: Any) -> Before | None:
    match answer:
        case Continue(arguments=None, result=None, user_content=None):
            return answer
        case Continue(arguments=dict() as arguments, result=None, user_content=None):
            try:
                return Continue(arguments=_ARGUMENTS.validate_python(arguments))
            except (ValidationError, RecursionError):  # not JSON, or JSON without an end
                return None
        case Skip(reason=str() as reason):
            return Skip(reason[:MOST_REASON]) if reason.strip() else Skip()
        case Ask(question=str() as question, arguments=arguments):
            shown = question[:MOST_REASON] if question.strip() else NO_QUESTION
            rewrite = _before(Continue(arguments=arguments))
            return Ask(shown, rewrite.arguments) if isinstance(rewrite, Continue) else None
    return None


_BEFORE: Final[Check[Before]] = Check(_before, Continue())


def _after(answer: Any, given: ToolResult) -> After | None:
    match answer:
        case Continue(arguments=None, result=None, user_content=None):
            return answer
        case Continue(arguments=None, user_content=None, result=result) if type(result) is ToolResult and _same_call(
            given, result
        ):
            return answer
    return None


def _same_call(old: ToolResult, new: ToolResult) -> bool:
    return (old.id, old.call_id, old.tool, old.references) == (new.id, new.call_id, new.tool, new.references)


def _word(decision: object) -> str:
    match decision:
        case Continue(arguments=None, result=None, user_content=None):
            return "continue"
        case Continue() | Accept(replacement=str() | tuple()):
            return "rewrite"
    return type(decision).__name__.lower()


def _reason(decision: object) -> str:
    match decision:
        case Skip(text) | Ask(text) | Stop(text) | Retry(text) | Reject(text):
            return text
    return ""


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

    A filter that breaks closes: nothing more reaches the sink, `failure` names it, and the program goes on with its
    output dropped. An open one is left out from there on.
    """

    def __init__(self, hooks: Sequence[Registered], ctx: HookContext, stream: Stream, sink: Sink, trail: Trail) -> None:
        self._hooks = hooks
        self._ctx = ctx
        self._stream = stream
        self._sink = sink
        self._trail = trail
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
            chunks = one.filtered(self._ctx, self._stream, chunks, functools.partial(self._broke, one))
        try:
            async for chunk in chunks:
                await self._sink.write(chunk)
        except HookBroken as broken:
            self.failure = broken
        finally:
            self._receive.close()

    def _broke(self, one: Registered, broken: HookBroken) -> None:
        self._trail.append(_record(broken.hook, FILTER, f"broken ({one.on_failure})", broken.why, time.perf_counter()))

    def end(self) -> None:
        """Say that no more bytes come; the filters then have each their time to give what they still hold."""
        self._send.close()


async def _received(stream: MemoryObjectReceiveStream[bytes]) -> AsyncIterator[bytes]:
    async for chunk in stream:
        yield chunk
