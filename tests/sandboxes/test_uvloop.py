"""The channel on uvloop, the loop of the server."""

import secrets
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandboxes import Exit, LocalKind, SandboxLost, SandboxSpec
from sandboxes.container import BASE_IMAGE
from sandboxes.docker import DockerKind, Engine
from sandboxes.local import LocalSandbox
from tests.sandboxes.support import host_processes, read, run, sh

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": True}


async def test_programs_run(local: LocalSandbox) -> None:
    for _ in range(20):
        ran = await sh(local, "echo out; echo err >&2; exit 3")
        assert (ran.exit, ran.out, ran.err) == (Exit("exit", 3), b"out\n", b"err\n")


async def test_streams_of_any_size_pass(local: LocalSandbox) -> None:
    ran = await run(local, "cat", stdin=b"x" * (5 << 20), max_bytes=6 << 20)
    assert len(ran.out) == 5 << 20


async def test_timeout_and_cancellation_kill(local: LocalSandbox) -> None:
    assert (await sh(local, "echo x; sleep 300.77", timeout=0.2)).out == b"x\n"
    with anyio.move_on_after(0.2):
        await sh(local, "setsid sleep 300.77 & sleep 300.77")
    assert host_processes("300.77") == []


async def test_files_pass(local: LocalSandbox) -> None:
    await local.write("a", b"y" * 1_000_000)
    assert await read(local, "a") == b"y" * 1_000_000
    await local.remove("a")
    assert (await local.list()).entries == ()


async def test_loss_is_told(local: LocalSandbox, kind: LocalKind) -> None:
    async with await local.start(["sleep", "300.78"]) as process:
        await local.aclose()
        with pytest.raises(SandboxLost):
            await process.wait()
    assert (await sh(await kind.open(SandboxSpec("next")), "echo on")).text == "on\n"


@pytest.mark.needs("docker")
async def test_the_engines_exec_serves(tmp_path: Path) -> None:
    kind = DockerKind(Engine(tmp_path, instance=f"test-{secrets.token_hex(4)}"), image=BASE_IMAGE)
    sandbox = await kind.open(SandboxSpec("s"))
    assert sandbox.channel == "engine"
    ran = await sh(sandbox, "echo out; echo err >&2; exit 3")
    assert (ran.exit, ran.out, ran.err) == (Exit("exit", 3), b"out\n", b"err\n")
    assert len((await run(sandbox, "cat", stdin=b"x" * (5 << 20), max_bytes=6 << 20)).out) == 5 << 20
    assert (await run(sandbox, "true", stdin=b"x" * (5 << 20))).exit == Exit("exit", 0)
    await sandbox.write("a", b"y" * 1_000_000)
    assert await read(sandbox, "a") == b"y" * 1_000_000
    assert (await sh(sandbox, "echo x; sleep 300.79", timeout=1)).out == b"x\n"
    async with await sandbox.start(["sleep", "300.79"]) as process:
        await sandbox.aclose()
        with pytest.raises(SandboxLost):
            await process.wait()
    await kind.aclose()
