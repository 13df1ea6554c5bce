"""Limits: what the kernel enforces here, and what `not_enforced` names instead."""

import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandboxes import LocalKind, SandboxSpec
from sandboxes.local import LocalSandbox
from sandboxes.machine import nproc_is_per_namespace
from sandboxes.sandbox import Limits
from tests.sandboxes.support import FORKS_FOR_EVER, first_refusal, host_processes, python, run, sh

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

SMALL = Limits(memory=128 << 20, cpus=0.5, processes=48, workspace_size=16 << 20)


@pytest.fixture
async def small(kind: LocalKind) -> LocalSandbox:
    return await kind.open(SandboxSpec("small", limits=SMALL))


@pytest.fixture(params=["rlimits"])
async def plain(tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    """A sandbox whose limits are rlimits alone, as for an ordinary user without delegation."""
    kind = LocalKind(tmp_path / "state", instance=f"test-{secrets.token_hex(4)}", rlimits_only=True)
    yield await kind.open(SandboxSpec("small", limits=SMALL))
    await kind.aclose()


async def test_not_enforced_is_named(small: LocalSandbox, plain: LocalSandbox, kind: LocalKind) -> None:
    """A70, for limits: the probe, and the sandbox itself, name what this machine cannot give."""
    assert (await kind.probe()).not_enforced == small.not_enforced
    assert "workspace_size: per file only" in small.not_enforced
    assert plain.not_enforced == ("memory: per process only", "cpus: not limited", "workspace_size: per file only")


async def test_jobs_that_have_ended_make_room_where_processes_are_few(kind: LocalKind) -> None:
    """Each keeps a process for what it wrote, until another needs it."""
    sandbox = await kind.open(SandboxSpec("few", limits=Limits(processes=4)))
    for number in range(20):
        await sandbox.jobs.start(f"j-{number}", ["echo", str(number)])
        with anyio.fail_after(10):
            while (output := await sandbox.jobs.read(f"j-{number}")).job.exit is None:
                await anyio.sleep(0.02)
        assert output.data == b"%d\n" % number
    assert 1 <= len(await sandbox.jobs.list()) < 16


BOMB = "bomb() { bomb | bomb & bomb; }; bomb"


@pytest.mark.parametrize("which", ["small", "plain"])
async def test_fork_bomb_ends_and_a_neighbour_answers(
    which: str, kind: LocalKind, request: pytest.FixtureRequest, small: LocalSandbox, plain: LocalSandbox
) -> None:
    """A13, R69: it is bounded, named, over with its call, and another session goes on meanwhile."""
    sandbox = small if which == "small" else plain
    neighbour = await kind.open(SandboxSpec("neighbour"))
    async with await sandbox.start(["sh", "-c", BOMB, "bomb-A13"]) as bomb:
        await anyio.sleep(0.3)
        assert len(host_processes("bomb-A13")) <= SMALL.processes + 8
        with anyio.fail_after(2):
            assert (await sh(neighbour, "echo on")).text == "on\n"
        await bomb.kill()
        with anyio.fail_after(5):
            await bomb.wait()
    assert host_processes("bomb-A13") == []
    assert (await sh(sandbox, "echo on")).text == "on\n"


async def test_used_up_processes_are_named(small: LocalSandbox) -> None:
    """A13: the reason is `pids` where the program failed for it, or the start is refused with EAGAIN."""
    code = """
import os, sys, time
try:
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(20); os._exit(0)
except OSError:
    sys.exit(3)
"""
    ran = await python(small, code)
    assert (ran.exit.how, ran.exit.code) == (("pids", 3) if "pids" in _controllers(small) else ("exit", 3))
    async with await small.start(["python3", "-c", FORKS_FOR_EVER]):
        assert (await first_refusal(small)).code == "EAGAIN"
    assert (await sh(small, "echo on")).text == "on\n"


async def test_memory_hog_is_named_and_the_sandbox_goes_on(small: LocalSandbox) -> None:
    """A14: in the first and in the second call; F03, F46."""
    if "memory" not in _controllers(small):
        pytest.skip("no memory control group here: named in not_enforced, tested above")
    for _ in range(2):
        ran = await python(small, "x = bytearray(300 << 20); print(len(x))")
        assert (ran.exit.how, ran.exit.code) == ("oom", 9)
        assert (await sh(small, "echo on")).text == "on\n"


async def test_memory_of_a_grandchild_is_a_note(small: LocalSandbox) -> None:
    if "memory" not in _controllers(small):
        pytest.skip("no memory control group here")
    ran = await sh(small, "python3 -c 'x = bytearray(300 << 20)'; echo on")
    assert (ran.exit.how, ran.exit.code, ran.text) == ("exit", 0, "on\n")
    assert "memory" in ran.exit.notes[0]


async def test_memory_is_bounded_for_each_process_by_rlimits(plain: LocalSandbox) -> None:
    ran = await python(plain, "x = bytearray(300 << 20)")
    assert ran.exit.code == 1
    assert b"MemoryError" in ran.err


async def test_cpu_is_bounded(small: LocalSandbox) -> None:
    """A15: half a core, measured by the program's own clock."""
    if "cpu" not in _controllers(small):
        pytest.skip("no cpu control group here: named in not_enforced, tested above")
    code = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    assert float((await python(small, code)).text) < 1.5 * 0.65


async def test_a_file_cannot_outgrow_the_workspace(small: LocalSandbox) -> None:
    """A16, A18, F02: the size is enforced for each file; the whole is named as not enforced."""
    ran = await sh(small, "dd if=/dev/zero of=big bs=1M count=100; ls -l big; truncate -s 1T sparse")
    assert ran.exit.code != 0
    (entry,) = [entry for entry in (await small.list()).entries if entry.path == "big"]
    assert entry.size <= SMALL.workspace_size


async def test_tmp_is_small(small: LocalSandbox) -> None:
    """A16: nothing of the host's disk or memory beyond it."""
    ran = await sh(
        small,
        "dd if=/dev/zero of=/tmp/a bs=1M count=15; dd if=/dev/zero of=/dev/shm/a bs=1M count=15; "
        "df -m --output=size /tmp /dev/shm | tail -2",
    )
    assert [int(line) for line in ran.text.split()] == [32, 32]


async def test_nproc_counts_only_the_sandbox(kind: LocalKind, tmp_path: Path) -> None:
    """F43 does not hold inside a user namespace since Linux 5.14: two full sandboxes of one uid do not add up."""
    if not nproc_is_per_namespace():
        pytest.skip("before Linux 5.14")
    one = LocalKind(
        tmp_path / "one", instance=f"test-{secrets.token_hex(4)}", rlimits_only=True, uids=range(60998, 60999)
    )
    two = LocalKind(
        tmp_path / "two", instance=f"test-{secrets.token_hex(4)}", rlimits_only=True, uids=range(60998, 60999)
    )
    try:
        first, second = [await kind.open(SandboxSpec("s", limits=SMALL)) for kind in (one, two)]
        script = "for i in $(seq 40); do sleep 300.43 & done; echo forty; sleep 1"
        async with await first.start(["sh", "-c", script]) as running:
            assert await running.stdout.receive() == b"forty\n"
            assert (await sh(second, script.replace("sleep 1", ""))).text == "forty\n"
            assert (await sh(second, "for i in $(seq 100); do sleep 300.43 & done")).exit.code != 0
    finally:
        await one.aclose()
        await two.aclose()


async def test_core_files_and_open_files_are_bounded(small: LocalSandbox) -> None:
    """F02."""
    assert (await sh(small, "ulimit -c; ulimit -n; ulimit -Hn; umask")).text.split() == ["0", "1024", "1024", "0022"]


async def test_many_calls_are_not_slowed_by_counters(small: LocalSandbox) -> None:
    started = time.monotonic()
    for _ in range(20):
        assert (await run(small, "true")).exit.notes == ()
    assert time.monotonic() - started < 3


def _controllers(sandbox: LocalSandbox) -> set[str]:
    return {
        name
        for name, counted in (("memory", sandbox.counters().oom), ("pids", sandbox.counters().pids))
        if counted >= 0
    } | ({"cpu"} if "cpus: not limited" not in sandbox.not_enforced else set())


def test_release_numbers_are_read() -> None:
    assert nproc_is_per_namespace("5.14.0-1-amd64")
    assert nproc_is_per_namespace("6.18.44-fc-v595")
    assert not nproc_is_per_namespace("5.10.0")
    assert not nproc_is_per_namespace("odd")
    assert os.cpu_count()
