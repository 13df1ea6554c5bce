"""The docker kind's own figures, beside the engine's exec and a plain container of the same options."""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import docker
import psutil

from sandboxes import Capture, Pool, PoolSize, Sandbox, SandboxSpec
from sandboxes.container import DEFAULT_IMAGE, Container, container_name, container_options
from sandboxes.docker import AnySandbox, DockerKind, Engine
from tests.bench.figures import Figure, at_least, at_most, shown
from tests.bench.sandbox import COMMAND, alternating, plain

OPENINGS = 15
LIVE = 50
CALLS = 2000
EXECS = 40


def measure_docker() -> list[Figure]:
    """Empty with the reason where Docker does not work here."""
    return anyio.run(_measure, backend_options={"use_uvloop": True})


async def _measure() -> list[Figure]:
    async with _kind() as kind:
        probe = await kind.probe()
        if not probe.works:
            return [Figure("docker sandbox", float("nan"), "ms", note=f"not measured: {probe.reason}")]
        return [
            *await _commands(kind),
            *await _cold(kind),
            *await _warm(kind),
            *await _closing(kind),
            *await _growth(kind),
            *await _memory(kind),
        ]


@asynccontextmanager
async def _kind() -> AsyncIterator[DockerKind]:
    with tempfile.TemporaryDirectory() as folder:
        kind = DockerKind(Engine(Path(folder), instance=f"bench-{os.getpid()}"))
        try:
            yield kind
        finally:
            await kind.aclose()


async def say_hi(sandbox: Sandbox) -> None:
    stdout = Capture(1 << 20)
    await sandbox.exec(COMMAND, stdout=stdout, stderr=Capture(1 << 20))
    if stdout.text() != "hi\n":
        raise RuntimeError(f"unexpected output: {stdout.text()!r}")


async def _commands(kind: DockerKind) -> list[Figure]:
    sandbox = await kind.open(SandboxSpec("commands"))

    async def ours() -> None:
        await say_hi(sandbox)

    plain_ms, ours_ms = await alternating(plain, ours)
    engine_ms = await anyio.to_thread.run_sync(_exec_run, container_name(kind.engine.instance, "commands"))
    await kind.destroy("commands")
    return [
        shown("sh -c 'echo hi' in the docker sandbox", ours_ms, "ms"),
        at_most("docker sandbox / plain subprocess, p50", ours_ms / plain_ms, "x", 2.5),
        at_least("docker SDK's exec_run / docker sandbox, p50", engine_ms / ours_ms, "x", 30, f"{engine_ms:.1f} ms"),
    ]


def _exec_run(name: str) -> float:
    """The median of the SDK's own way into the same container, in ms."""
    client = docker.from_env()
    container, times = client.containers.get(name), []
    for _ in range(EXECS):
        started = time.perf_counter()
        answer = container.exec_run(COMMAND)
        times.append((time.perf_counter() - started) * 1000)
        if answer.output != b"hi\n":
            raise RuntimeError(f"unexpected output: {answer.output!r}")
    client.close()
    return statistics.median(times)


async def _cold(kind: DockerKind) -> list[Figure]:
    """An opening, up to the runner's word, beside a container of the very same options that only sleeps."""
    ours, theirs = [], []
    for number in range(OPENINGS):
        ours.append(await _took(kind.open(SandboxSpec(f"cold-{number}"))))
        await kind.destroy(f"cold-{number}")
        theirs.append(await _took(_docker_run(kind.engine, f"plain-{number}")))
        await kind.engine.remove(container_name(kind.engine.instance, f"plain-{number}"))
    ours_ms, theirs_ms = statistics.median(ours), statistics.median(theirs)
    note = f"{ours_ms:.0f} ms to {theirs_ms:.0f}"
    return [
        at_most("docker sandbox opened, cold / docker run of the same options", ours_ms / theirs_ms, "x", 1.3, note)
    ]


async def _docker_run(engine: Engine, session_id: str) -> None:
    with tempfile.TemporaryDirectory() as channel:
        one = Container(engine.instance, session_id, DEFAULT_IMAGE, Path(channel))
        name = container_name(engine.instance, session_id)
        await engine.create({**container_options(one), "Entrypoint": ["sleep", "60"]}, name)
        await engine.ask(lambda api: api.start(name))


async def _warm(kind: DockerKind) -> list[Figure]:
    """From the pool, up to the output of a session's first command."""
    pool, times = Pool(kind, SandboxSpec("any"), PoolSize(OPENINGS), _Places()), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run)
        while pool.ready < OPENINGS:
            await anyio.sleep(0.05)
        for number in range(OPENINGS):
            times.append(await _took(_first_output(pool, f"warm-{number}")))
        tasks.cancel_scope.cancel()
    for number in range(OPENINGS):
        await kind.destroy(f"warm-{number}")
    return [at_most("docker sandbox from the pool, to its first output, p50", statistics.median(times), "ms", 20)]


async def _first_output(pool: Pool, session_id: str) -> None:
    await say_hi(await pool.open(SandboxSpec(session_id)))


class _Places:
    def take_spare(self) -> bool:
        return True

    def give_back(self) -> None:
        pass

    def lend_from(self, pool: Pool) -> None:
        pass


async def _closing(kind: DockerKind) -> list[Figure]:
    """Until container, volumes and channel folder are gone; with a workspace on disk, which has volumes."""
    disk, times = DockerKind(kind.engine, storage="disk"), []
    for number in range(OPENINGS):
        await say_hi(await disk.open(SandboxSpec(f"closed-{number}")))
        times.append(await _took(disk.destroy(f"closed-{number}")))
        left = [*await kind.engine.left(), *kind.engine.meeting("any").folder.parent.iterdir()]
        if left:
            raise RuntimeError(f"left behind: {left}")
    p95 = statistics.quantiles(times, n=20)[-1]
    return [at_most("docker sandbox closed and gone, p95", p95, "ms", 1000, f"p50 {statistics.median(times):.0f}")]


async def _growth(kind: DockerKind) -> list[Figure]:
    sandbox = await kind.open(SandboxSpec("growth"))
    await _many(sandbox, CALLS // 10)
    before = _held(sandbox)
    await _many(sandbox, CALLS)
    after = _held(sandbox)
    await kind.destroy("growth")
    grown = sum(max(one - other, 0) for one, other in zip(after, before, strict=True))
    note = "descriptors, threads, processes: {}, {}, {}".format(*after)
    return [at_most(f"docker sandbox after {CALLS:,} calls: what has grown", grown, "", 0, note)]


async def _many(sandbox: Sandbox, calls: int) -> None:
    async def some() -> None:
        for _ in range(calls // 8):
            await say_hi(sandbox)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(some)


def _held(sandbox: AnySandbox) -> tuple[int, int, int]:
    """Descriptors and threads of this process, and processes of the sandbox."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_inside(sandbox))


def _inside(sandbox: AnySandbox) -> list[psutil.Process]:
    first = psutil.Process(sandbox.pid)
    return [first, *first.children(recursive=True)]


async def _memory(kind: DockerKind) -> list[Figure]:
    """What is private to runner and slots, in each of many live sandboxes with one slot busy; the program aside."""
    sandboxes = [await kind.open(SandboxSpec(f"live-{number}")) for number in range(LIVE)]
    processes = [await one.start(["sleep", "600"]) for one in sandboxes]
    try:
        sizes = [sum(map(_private_bytes, _inside(one))) / 1e6 for one in sandboxes]
    except PermissionError:
        return [Figure("docker sandbox: private memory", float("nan"), "MB", note="not measured: needs root")]
    finally:
        for process in processes:
            await process.aclose()
        async with anyio.create_task_group() as tasks:
            for one in sandboxes:
                tasks.start_soon(kind.destroy, one.session_id)
    note = f"p50 {statistics.median(sizes):.1f} MB"
    return [at_most(f"{LIVE} live docker sandboxes: private memory of the largest", max(sizes), "MB", 10, note)]


def _private_bytes(process: psutil.Process) -> int:
    if process.name() == "sleep":
        return 0
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def _took(work: Awaitable[object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000
