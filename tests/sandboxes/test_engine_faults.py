"""What is told when the engine is stopped, killed or away: on an engine of our own, with commands through its exec."""

import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from sandboxes import LocalKind, SandboxSpec, SandboxUnavailable
from sandboxes.container import BASE_IMAGE
from sandboxes.docker import DockerKind, Engine
from tests.sandboxes.private_engine import PrivateEngine
from tests.sandboxes.support import sh

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.needs("docker", "root"),
    pytest.mark.xdist_group("engine faults"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def engine_of_our_own() -> Iterator[PrivateEngine]:
    engine = PrivateEngine()
    yield engine
    engine.close()


@pytest.fixture
async def docker(
    engine_of_our_own: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DockerKind]:
    """A kind over it, which leaves nothing behind."""
    monkeypatch.setenv("DOCKER_HOST", engine_of_our_own.url)
    monkeypatch.setattr("sandboxes.docker._ENGINE_SECONDS", 4)
    kind = DockerKind(Engine(tmp_path / "state", instance=f"test-{secrets.token_hex(4)}"), image=BASE_IMAGE)
    yield kind
    engine_of_our_own.send(signal.SIGCONT)
    engine_of_our_own.start()
    await kind.destroy("s")
    await kind.aclose()
    assert engine_of_our_own.left() == []


async def test_an_engine_that_is_killed_ends_the_call_with_its_name(
    docker: DockerKind, engine_of_our_own: PrivateEngine, kind: LocalKind
) -> None:
    """A61, F24, R16: the end of its stream is no end of the program; another kind's session goes on, and so does this
    one when the engine is back."""
    local = await kind.open(SandboxSpec("local"))
    sandbox = await docker.open(SandboxSpec("s"))
    async with await sandbox.start(["sh", "-c", "echo begun; sleep 300"]) as process:
        assert await process.stdout.receive() == b"begun\n"
        engine_of_our_own.send(signal.SIGKILL)
        with anyio.fail_after(20), pytest.raises(SandboxUnavailable) as error:
            await process.wait()
    assert error.value.remedy
    with pytest.raises(SandboxUnavailable):
        await sh(sandbox, "true")
    assert (await sh(local, "echo on")).text == "on\n"
    engine_of_our_own.start()
    await sandbox.aclose()
    assert (await sh(await docker.open(SandboxSpec("s")), "echo on")).text == "on\n"


async def test_an_engine_that_hangs_is_told_in_time(
    docker: DockerKind, engine_of_our_own: PrivateEngine, kind: LocalKind
) -> None:
    """R17: every request has a deadline, and threads of its own, so nobody else waits; it works again afterwards."""
    local = await kind.open(SandboxSpec("local"))
    sandbox = await docker.open(SandboxSpec("s"))
    told: list[str] = []

    async def call() -> None:
        with pytest.raises(SandboxUnavailable) as error:
            await sh(sandbox, "true")
        told.append(error.value.message)

    engine_of_our_own.send(signal.SIGSTOP)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(call)
            with anyio.fail_after(10):
                assert (await sh(local, "echo on")).text == "on\n"
        with pytest.raises(SandboxUnavailable, match="does not answer"):
            await docker.open(SandboxSpec("another"))
    assert set(told) == {"the Docker engine does not answer"}
    engine_of_our_own.send(signal.SIGCONT)
    assert (await sh(sandbox, "echo on")).text == "on\n"


async def test_probe_says_that_the_engine_is_away_and_that_it_is_back(
    docker: DockerKind, engine_of_our_own: PrivateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10, A70."""
    monkeypatch.setattr("sandboxes.kind._PROBE_SECONDS", 0.0)
    assert (await docker.probe()).works
    engine_of_our_own.send(signal.SIGKILL)
    probe = await docker.probe()
    assert (probe.works, bool(probe.reason), bool(probe.remedy)) == (False, True, True)
    engine_of_our_own.start()
    assert (await docker.probe()).works
