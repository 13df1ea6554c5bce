"""The sandbox's own figures, at its interface: a command beside a plain subprocess, and a cold opening."""

import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from sandboxes import Capture, LocalKind, Sandbox, SandboxSpec
from tests.bench.figures import Figure, at_most, shown

CALLS = 300
OPENINGS = 20
COMMAND = ["sh", "-c", "echo hi"]


def measure_sandbox() -> list[Figure]:
    return anyio.run(_measure, backend_options={"use_uvloop": True})


async def _measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        kind = LocalKind(Path(folder), instance="bench")
        try:
            return [*await _commands(kind), *await _openings(kind)]
        finally:
            await kind.aclose()


async def _commands(kind: LocalKind) -> list[Figure]:
    sandbox = await kind.open(SandboxSpec("bench"))

    async def ours() -> None:
        stdout = Capture(1 << 20)
        await sandbox.exec(COMMAND, stdout=stdout, stderr=Capture(1 << 20))
        if stdout.text() != "hi\n":
            raise RuntimeError(f"unexpected output: {stdout.text()!r}")

    plain_ms, ours_ms = await alternating(plain, ours)
    await _end(kind, sandbox)
    return [
        shown("plain subprocess.run of sh -c 'echo hi'", plain_ms, "ms"),
        shown("the same in the local sandbox", ours_ms, "ms"),
        at_most("local sandbox / plain subprocess, p50", ours_ms / plain_ms, "x", 2.0),
    ]


async def plain() -> None:
    subprocess.run(COMMAND, capture_output=True, check=True)


async def alternating(
    first: Callable[[], Awaitable[None]], second: Callable[[], Awaitable[None]], block: int = 50
) -> tuple[float, float]:
    """Medians in ms of `CALLS` runs each, in blocks in turn, so that a drift of the machine meets both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(CALLS // block):
        for work, into in zip((first, second), times, strict=True):
            await work()
            for _ in range(block):
                started = time.perf_counter()
                await work()
                into.append((time.perf_counter() - started) * 1000)
    return statistics.median(times[0]), statistics.median(times[1])


async def _openings(kind: LocalKind) -> list[Figure]:
    times = []
    for number in range(OPENINGS):
        started = time.perf_counter()
        sandbox = await kind.open(SandboxSpec(f"bench-{number}"))
        times.append((time.perf_counter() - started) * 1000)
        await _end(kind, sandbox)
    return [at_most("local sandbox opened, cold, p50", statistics.median(times), "ms", 60.0)]


async def _end(kind: LocalKind, sandbox: Sandbox) -> None:
    await sandbox.aclose()
    await kind.destroy(sandbox.session_id)
