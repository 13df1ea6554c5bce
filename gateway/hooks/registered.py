"""Registered: a hook with what the operator says of it, and the rules of calling strangers' code."""

import functools
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread

from gateway.errors import SettingsError
from gateway.hooks.hook import FILTER, POINTS, Hook, HookContext, TurnContext
from gateway.inputs import SessionInput, declared_inputs
from gateway.models import Stream

Context = HookContext | TurnContext

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


@dataclass(frozen=True, slots=True)
class Method:
    """A hook's own method at one point. `inputs` are its parameters beyond those of the point."""

    function: Callable[..., Any]
    is_async: bool
    inputs: Mapping[str, type[SessionInput]]

    def bound(self, ctx: Context) -> Callable[..., Any]:
        """The method with its session inputs given, each a copy of its own."""
        if not self.inputs:
            return self.function
        return functools.partial(self.function, **{name: ctx.session.input(kind) for name, kind in self.inputs.items()})


@dataclass(slots=True)
class Registered:
    """A hook with what the operator says of it. `on_failure="open"` lets calls pass where the hook is broken.

    Raises SettingsError where one of its methods could not be called.
    """

    hook: Hook
    tools: tuple[str, ...] = ("*",)
    timeout_seconds: float = 10.0
    on_failure: Literal["closed", "open"] = "closed"
    hanging: int = field(default=0, init=False)
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(SYNC_THREADS), init=False)
    methods: Mapping[str, Method] = field(init=False)

    def __post_init__(self) -> None:
        self.methods = _methods(self.hook)

    @property
    def name(self) -> str:
        return self.hook.name

    @property
    def inputs(self) -> Sequence[type[SessionInput]]:
        """The session inputs that its methods declare."""
        return [kind for method in self.methods.values() for kind in method.inputs.values()]

    async def ask(self, point: str, ctx: Context, value: Any) -> Any:
        """Whatever the hook answers at a point. Raises HookBroken where it raises or is slow."""
        method = self.methods[point]
        if self.hanging >= HANGING_THREADS:
            raise HookBroken(self.name, f"not called: {self.hanging} earlier calls of it still hang")
        try:
            # `fail_after` takes half as long again
            with anyio.CancelScope(deadline=anyio.current_time() + self.timeout_seconds):
                if method.is_async:
                    return await method.bound(ctx)(ctx, value)
                return await self._in_thread(functools.partial(method.bound(ctx), ctx, value))
        except Exception as error:  # strangers' code: whatever it raises is a broken hook
            raise self._raised(error, point, ctx) from error
        raise HookBroken(self.name, f"no answer within {self.timeout_seconds:g} s")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        running = abandoned = False

        def counted() -> Any:
            nonlocal running
            running = True
            try:
                return work()
            finally:
                running = False
                if abandoned:
                    self.hanging -= 1

        try:
            answer = await anyio.to_thread.run_sync(counted, abandon_on_cancel=True, limiter=self.threads)
        except anyio.get_cancelled_exc_class():
            abandoned = running
            self.hanging += abandoned
            raise
        return await answer if isinstance(answer, Awaitable) else answer

    def _raised(self, error: Exception, method: str, ctx: Context) -> HookBroken:
        logger.error("%s of %s raised in session %s", method, self.name, ctx.session.id, exc_info=error)
        return HookBroken(self.name, f"{method} raised {type(error).__name__}; the gateway's log has it")

    async def filtered(
        self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes], broke: Callable[[HookBroken], None]
    ) -> AsyncIterator[bytes]:
        """Bytes through `filter_output`, with the hook's time limit on each step of its own. Where it breaks, `broke`
        is told; then HookBroken, or for an open hook the chunk it held and all the rest, unfiltered."""
        own = _Filter(self.name, chunks, self.timeout_seconds)
        try:
            async for chunk in own.run(self.methods[FILTER].bound(ctx), ctx, stream):
                yield chunk
        except _Upstream as upstream:
            raise upstream.broken from None
        except Exception as error:  # strangers' code: whatever it raises is a broken hook
            broken = error if isinstance(error, HookBroken) else self._raised(error, FILTER, ctx)
            broke(broken)
            if self.on_failure == "closed":
                raise broken from error
            yield own.held
            async for chunk in chunks:
                yield chunk


_END: Final = object()


class _Upstream(BaseException):
    """The hook before this one broke: nothing that a filter may catch."""

    def __init__(self, broken: HookBroken) -> None:
        super().__init__()
        self.broken = broken


class _Filter:
    """One run of a filter, which has its time limit for each chunk, from being given it to asking for the next. `held`
    is what it was given last and has not answered."""

    def __init__(self, hook: str, chunks: AsyncIterator[bytes], seconds: float) -> None:
        self.held = b""
        self._hook = hook
        self._chunks = chunks
        self._seconds = seconds
        self._limit = anyio.CancelScope()
        self._deadline = anyio.current_time() + seconds

    async def run(self, function: Callable[..., Any], ctx: HookContext, stream: Stream) -> AsyncIterator[bytes]:
        output = aiter(function(ctx, stream, self._source()))
        while True:
            with anyio.CancelScope(deadline=self._deadline) as self._limit:
                chunk = await anext(output, _END)
            if self._limit.cancelled_caught or anyio.current_time() > self._deadline:
                raise HookBroken(self._hook, f"{FILTER} asked for no more within {self._seconds:g} s")
            if chunk is _END:
                return
            if not isinstance(chunk, bytes):
                raise HookBroken(self._hook, f"{FILTER} gave {type(chunk).__name__}, not bytes")
            self.held = b""
            given = anyio.current_time()
            yield chunk
            self._deadline += anyio.current_time() - given
            await anyio.lowlevel.checkpoint()  # a filter may give without end, and wait for nothing

    async def _source(self) -> AsyncIterator[bytes]:
        while True:
            self._limit.deadline = math.inf
            try:
                chunk = await anext(self._chunks, None)
            except HookBroken as broken:
                raise _Upstream(broken) from broken
            self._limit.deadline = self._deadline = anyio.current_time() + self._seconds
            if chunk is None:
                return
            self.held = chunk
            yield chunk


def _methods(hook: Hook) -> Mapping[str, Method]:
    for name in dir(hook):
        if name.startswith(("pre_", "post_", "filter_")) and name not in (*POINTS, FILTER):
            raise SettingsError(
                f"{hook.name}: {name} is no point of a hook", f"There are {', '.join((*POINTS, FILTER))}."
            )
    return {point: _method(hook, point) for point in (*POINTS, FILTER) if hook.overrides(point)}


def _method(hook: Hook, point: str) -> Method:
    function, where = getattr(hook, point), f"{hook.name}.{point}"
    given = [one.name for one in inspect.signature(getattr(Hook, point)).parameters.values() if one.kind in _POSITIONAL]
    parameters = list(inspect.signature(function).parameters.values())
    most = len(given) - 1  # without self
    if len(parameters) < most or any(one.kind not in _POSITIONAL for one in parameters[:most]):
        names = ", ".join(given[1:])
        raise SettingsError(f"{where}: takes other parameters than ({names})", f"Write def {point}(self, {names}).")
    is_async = inspect.iscoroutinefunction(function)
    if point == FILTER and (is_async or inspect.isgeneratorfunction(function)):
        raise SettingsError(
            f"{where}: not an async generator", "Write async def with yield: async for chunk in chunks: yield chunk."
        )
    return Method(function, is_async, declared_inputs(function, [one.name for one in parameters[most:]], where))


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
