"""Sandboxes at the ready: clean, tried, of one profile, handed to one session each; on every kind that has a pool."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandboxes import Limits, LocalKind, Pool, PoolSize, Sandbox, SandboxKind, SandboxSpec, SandboxUnavailable
from sandboxes.docker import DockerKind, Engine
from tests.sandboxes.support import read, sh

pytestmark = pytest.mark.anyio


class Places:
    """Room for so many."""

    def __init__(self, most: int = 10) -> None:
        self.free = most
        self.pools: list[Pool] = []

    def take_spare(self) -> bool:
        if not self.free:
            return False
        self.free -= 1
        return True

    def give_back(self) -> None:
        self.free += 1

    def lend_from(self, pool: Pool) -> None:
        self.pools.append(pool)


@pytest.fixture(
    params=[
        pytest.param("local", marks=pytest.mark.needs("local")),
        pytest.param("docker", marks=pytest.mark.needs("docker")),
    ]
)
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxKind]:
    instance = f"test-{secrets.token_hex(4)}"
    engine = Engine(tmp_path, instance=instance)
    kind: SandboxKind = LocalKind(tmp_path, instance=instance) if request.param == "local" else DockerKind(engine)
    yield kind
    await kind.destroy("s")
    await kind.aclose()
    left = await engine.left() if request.param == "docker" else []
    await engine.aclose()
    assert left == []
    for folder in ("workspaces", "channels"):
        assert not (tmp_path / folder).exists() or list((tmp_path / folder).iterdir()) == []


@asynccontextmanager
async def running(kind: SandboxKind, size: PoolSize, places: Places | None = None, **more: Any) -> AsyncIterator[Pool]:
    pool = Pool(kind, SandboxSpec("any"), size, places or Places(), **more)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run)
        yield pool
        tasks.cancel_scope.cancel()


async def filled(pool: Pool, ready: int = 1) -> None:
    with anyio.fail_after(20):
        while pool.ready != ready:
            await anyio.sleep(0.01)


async def called_after(kind: SandboxKind, session_id: str) -> None:
    """Wait until the container bears the session's name, on the kind that has containers."""
    if isinstance(kind, DockerKind):
        with anyio.fail_after(10):
            while not any(one.endswith(f"-{session_id}") for one in await kind.engine.left()):
                await anyio.sleep(0.02)


async def test_a_session_gets_one_that_waits_and_another_takes_its_place(kind: SandboxKind) -> None:
    """It is the session's as if made for it: env, files, reopening, end; and nobody was there before."""
    places = Places()
    async with running(kind, PoolSize(1), places) as pool:
        await filled(pool)
        [bare] = [one.sandbox for one in pool._ready]
        sandbox = await pool.open(SandboxSpec("s", env={"GREETING": "hello"}))
        assert (sandbox is bare, sandbox.session_id, sandbox.restored) == (True, "s", False)
        assert (await sh(sandbox, "echo $GREETING; ls -A . ~ /tmp | grep -v :; id -u")).text.splitlines()[0] == "hello"
        await sandbox.write("file", b"x")
        await filled(pool)
        await called_after(kind, "s")
        assert places.free == 9
        await sandbox.aclose()
        again = await pool.open(SandboxSpec("s"))
        assert (again is not sandbox, again.session_id) == (True, "s")
        if again.restored:
            assert await read(again, "file") == b"x"
        await kind.destroy("s")
    assert places.free == 10


async def test_other_options_get_a_sandbox_of_their_own(kind: SandboxKind) -> None:
    """Never another profile's: R50."""
    async with running(kind, PoolSize(1)) as pool:
        await filled(pool)
        await pool.open(SandboxSpec("s", limits=Limits(open_files=100)))
        assert pool.ready == 1


async def test_one_that_died_is_not_given_away(kind: SandboxKind) -> None:
    """R50: the caller does not notice."""
    places = Places()
    async with running(kind, PoolSize(1), places) as pool:
        await filled(pool)
        [bare] = [one.sandbox for one in pool._ready]
        await bare.aclose()
        sandbox = await pool.open(SandboxSpec("s"))
        assert sandbox is not bare
        assert (await sh(sandbox, "echo on")).text == "on\n"
        await filled(pool)
        assert places.free == 9


async def test_they_are_renewed_by_age(kind: SandboxKind) -> None:
    async with running(kind, PoolSize(1), age_seconds=0.5) as pool:
        await filled(pool)
        [first] = [one.sandbox for one in pool._ready]
        with anyio.fail_after(20):
            while first.alive:
                await anyio.sleep(0.01)
        await filled(pool)


async def test_a_session_in_need_gets_the_place_of_one_at_the_ready(kind: SandboxKind) -> None:
    places = Places(1)
    async with running(kind, PoolSize(1), places) as pool:
        await filled(pool)
        [bare] = [one.sandbox for one in pool._ready]
        assert (places.free, pool.give_up(), pool.give_up()) == (0, True, False)
        with anyio.fail_after(10):
            while bare.alive:
                await anyio.sleep(0.01)
        assert (pool.ready, places.free) == (0, 0)
        places.give_back()
        await filled(pool)


@pytest.mark.parametrize("when_empty", ["create", "wait", "fail"])
async def test_what_an_empty_pool_does(kind: SandboxKind, when_empty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`most` holds for those in use too: an empty pool makes one for this session, waits, or refuses."""
    monkeypatch.setattr("sandboxes.pool._WAIT_SECONDS", 20 if when_empty == "wait" else 0)
    async with running(kind, PoolSize(1, 1, when_empty)) as pool:
        await filled(pool)
        first = await pool.open(SandboxSpec("first"))
        opened: list[Sandbox] = []
        async with anyio.create_task_group() as tasks:

            async def second() -> None:
                opened.append(await pool.open(SandboxSpec("s")))

            match when_empty:
                case "create":
                    await second()
                case "fail":
                    assert pool.refuses
                    with pytest.raises(SandboxUnavailable, match="no sandbox of this profile is ready"):
                        await second()
                case "wait":
                    tasks.start_soon(second)
                    await anyio.sleep(0.5)
                    assert opened == []
                    await first.aclose()
        assert len(opened) == (when_empty != "fail")
        await kind.destroy("first")


async def test_a_first_command_that_fails_keeps_a_sandbox_out(
    kind: SandboxKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R50: what cannot run a program is never at the ready, and nothing of it is left; sessions are served all the
    same."""
    places = Places()
    opened: list[str] = []
    open_ = kind.open

    async def broken(spec: SandboxSpec) -> Sandbox:
        sandbox = await open_(spec)
        if spec.session_id.startswith("pool-"):
            opened.append(spec.session_id)
            await sandbox.aclose()
        return sandbox

    monkeypatch.setattr(kind, "open", broken)
    async with running(kind, PoolSize(1), places) as pool:
        with anyio.fail_after(10):
            while not opened or places.free < 10:
                await anyio.sleep(0.01)
        assert pool.ready == 0
        assert (await sh(await pool.open(SandboxSpec("s")), "echo on")).text == "on\n"
