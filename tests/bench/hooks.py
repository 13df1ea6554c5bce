"""What hooks add to a call: a gateway in this process, a tool that does nothing, no hooks beside ten."""

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread

from gateway.gateway import Gateway
from gateway.hooks.hook import Continue, Hook, HookContext
from gateway.models import ToolCall, ToolResult
from gateway.sessions import Session
from tests.bench.figures import Figure, at_most, shown
from tests.gateway.conftest import called, opened, running

HOOKS = 10
CALLS = 600
BLOCK = 50


class Async(Hook):
    """At both points."""

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        return Continue()


class Sync(Hook):
    """At one point, so that ten of them are ten hops to a thread."""

    def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()


async def nothing() -> str:
    """Do nothing."""
    return "done"


def measure_hooks() -> list[Figure]:
    return anyio.run(_measure, backend_options={"use_uvloop": True})


async def _measure() -> list[Figure]:
    async with AsyncExitStack() as stack:
        none, ten_async, ten_sync = [await _caller(stack, kind) for kind in (None, Async, Sync)]
        bare, with_async, with_sync, threads = await _medians(none, ten_async, ten_sync, _ten_threads)
    return [
        shown("a call that does nothing, in process, no hooks, p50", bare, "ms"),
        at_most("ten async no-op hooks at both points add, p50", with_async - bare, "ms", 0.6),
        at_most(
            "ten sync no-op hooks add / ten bare to_thread.run_sync, p50",
            (with_sync - bare) / threads,
            "x",
            2.0,
            f"{with_sync - bare:.2f} ms",
        ),
    ]


async def _caller(stack: AsyncExitStack, kind: type[Hook] | None) -> Callable[[], Awaitable[None]]:
    """A gateway with ten hooks of that kind, and what calls it once."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    gateway: Gateway = await stack.enter_async_context(
        running(
            folder / "state",
            profiles={"default": {"kind": "none"}},
            tools=[{"use": f"{__name__}:nothing"}],
            hooks=[{"use": f"{__name__}:{kind.__name__}"}] * HOOKS if kind else [],
        )
    )
    session: Session = await opened(gateway)

    async def call() -> None:
        result = await called(gateway, session, "nothing")
        if result.text != "done":
            raise RuntimeError(result.text)

    return call


async def _ten_threads() -> None:
    for _ in range(HOOKS):
        await anyio.to_thread.run_sync(int)


async def _medians(*works: Callable[[], Awaitable[None]]) -> list[float]:
    """In ms, in blocks in turn, so that a drift of the machine meets all alike."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(CALLS // BLOCK):
        for work, into in zip(works, times, strict=True):
            for _ in range(BLOCK):
                started = time.perf_counter()
                await work()
                into.append((time.perf_counter() - started) * 1000)
    return [statistics.median(one) for one in times]
