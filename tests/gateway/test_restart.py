"""Docker sandboxes outlive their gateway: what its next life finds, and what one that died meanwhile tells."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.gateway import Gateway
from gateway.sessions import Session
from sandboxes.docker import Engine
from tests.engines import left_in_engine
from tests.gateway.conftest import OPERATOR, called, opened, running
from tests.gateway.test_crash import Running, gateway_process, records, text_of
from tests.sandboxes.support import host_processes

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("nothing_left"), pytest.mark.slow]

DOCKER = "[profiles.default]\nkind = 'docker'\n"


async def remove_containers(state_dir: Path) -> None:
    """Behind the gateway's back."""
    engine = Engine(state_dir, instance=(state_dir / "instance").read_text())
    for name in await engine.left():
        await engine.remove(name.removeprefix("container /"))
    await engine.aclose()


async def sessions_of(gateway: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await gateway.client.get("/v1/sessions")).json()["sessions"]
    return found


async def started(gateway: Running, base: str) -> None:
    with anyio.fail_after(15):
        while text_of(await gateway.call(base, "cat started 2>/dev/null; true")) != "x\n":
            await anyio.sleep(0.05)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, "interrupted"), (signal.SIGTERM, "cancelled")])
async def test_open_sessions_keep_their_sandboxes_over_a_restart(
    state_dir: Path, number: signal.Signals, status: str
) -> None:
    """A60, R34, R39: list, files, tokens and containers are the same; what ran has ended, and is told."""
    async with gateway_process(state_dir, DOCKER) as gateway:
        bases = [await gateway.session() for _ in range(3)]
        for base in bases:
            await gateway.call(base, f"echo {base} > file")
        before = await left_in_engine(state_dir)
        async with anyio.create_task_group() as tasks:

            async def cut_off() -> None:
                with contextlib.suppress(httpx2.TransportError):
                    await gateway.call(bases[0], "echo x >> started; sleep 4723", key="key")

            tasks.start_soon(cut_off)
            await started(gateway, bases[0])
            await gateway.end(number)
    assert (len(before), await left_in_engine(state_dir)) == (3, before)
    async with gateway_process(state_dir, DOCKER) as gateway:
        with anyio.fail_after(10):
            while [one["channel"] for one in await sessions_of(gateway)] != ["direct"] * 3:
                await anyio.sleep(0.05)
        again = await gateway.call(bases[0], "echo x >> started; sleep 4723", key="key")
        assert again["status"] == status
        assert text_of(await gateway.call(bases[0], "cat started")) == "x\n"
        assert host_processes("4723") == []
        for base in bases:
            assert text_of(await gateway.call(base, "cat file")) == f"{base}\n"
        assert await left_in_engine(state_dir) == before
        for base in bases:
            assert (await gateway.client.delete(base)).json()["failed"] == []
        assert await left_in_engine(state_dir) == []
    assert {ended for _, _, ended in records(state_dir)} == {1}


async def test_a_restart_collects_from_the_sandbox_that_was_left(state_dir: Path, tmp_path: Path) -> None:
    """Its hooks had created before: what they would do again is not done, what they owe at the end is."""
    profile = f"{DOCKER}collect = [{{ match = 'out/*', to = '{tmp_path}/collected' }}]\n"
    async with gateway_process(state_dir, profile) as gateway:
        base = await gateway.session(seed=[{"path": "out/a", "text": "seed"}])
        await gateway.call(base, "echo -n changed > out/a")
        await gateway.end(signal.SIGKILL)
    async with gateway_process(state_dir, profile) as gateway:
        report = (await gateway.client.delete(base)).json()
    assert [(one["files"], one["complete"]) for one in report["collected"]] == [(1, True)]
    assert [file.read_text() for file in (tmp_path / "collected").rglob("out/a")] == ["changed"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_container_removed_between_calls_is_told_by_one_call(state_dir: Path, restarted: bool) -> None:
    """R44, R49: no call finds an empty workspace without a word; also where there was no gateway meanwhile."""
    profiles = {"default": {"kind": "docker"}}
    async with running(state_dir, profiles=profiles) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="echo kept > file")
        if not restarted:
            await remove_containers(state_dir)
            with anyio.fail_after(2):
                while session.record().channel is not None:
                    await anyio.sleep(0.02)
            await lost_once(gateway, session)
    if restarted:
        await remove_containers(state_dir)
        async with running(state_dir, profiles=profiles) as gateway:
            await lost_once(gateway, gateway.sessions.find(OPERATOR, session.id))
    assert await left_in_engine(state_dir) == []


async def lost_once(gateway: Gateway, session: Session) -> None:
    lost = await called(gateway, session, "bash", command="cat file")
    assert (lost.status, lost.content) == ("sandbox_lost", ())
    assert "its files are lost" in lost.text
    assert (await called(gateway, session, "bash", command="ls")).status == "ok"
    await gateway.close_session(session)


async def asked(gateway: Running, base: str, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await gateway.client.post(f"{base}/calls", json={"tool": tool, "arguments": arguments})
    result: dict[str, Any] = answer.json()
    assert result["status"] == "ok", result
    return result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_job_and_its_output_outlive_the_gateway(state_dir: Path, number: signal.Signals) -> None:
    """What it wrote while no gateway was there is read like the rest, by the offsets that it has always had."""
    async with gateway_process(state_dir, DOCKER) as gateway:
        base = await gateway.session()
        counting = "i=0; while :; do echo $((i += 1)); sleep 0.05; done"
        started = await asked(gateway, base, "bash", command=counting, background=True)
        job = started["structured"]["job"]
        with anyio.fail_after(15):
            while not (seen := await asked(gateway, base, "job_output", job=job))["content"]:
                await anyio.sleep(0.05)
        await gateway.end(number)
    async with gateway_process(state_dir, DOCKER) as gateway:
        with anyio.fail_after(30):
            while (await asked(gateway, base, "job_list"))["structured"][0]["bytes"] < seen["structured"]["end"] + 100:
                await anyio.sleep(0.05)
        rest = await asked(gateway, base, "job_output", job=job, offset=seen["structured"]["end"])
        lines = (text_of(seen) + text_of(rest)).split()
        assert lines == [str(line) for line in range(1, len(lines) + 1)]
        stopped = await asked(gateway, base, "job_stop", job=job)
        assert (stopped["structured"]["job"], stopped["structured"]["state"]) == (job, "signal")
        assert (await gateway.client.delete(base)).json()["failed"] == []


async def test_a_sandbox_that_was_still_being_prepared_is_prepared_again(state_dir: Path) -> None:
    """A60: what a killed gateway had done by half is no workspace for anybody."""
    profile = f"{DOCKER}setup = 'echo x >> seen; sleep 3; touch prepared'\n"
    async with gateway_process(state_dir, profile) as gateway, anyio.create_task_group() as tasks:

        async def cut_off() -> None:
            with contextlib.suppress(httpx2.TransportError):
                await gateway.session()

        tasks.start_soon(cut_off)
        with anyio.fail_after(20):
            while not any("container" in one for one in await left_in_engine(state_dir)):
                await anyio.sleep(0.05)
        await gateway.end(signal.SIGKILL)
    async with gateway_process(state_dir, profile) as gateway:
        [session] = await sessions_of(gateway)
        base = f"/v1/sessions/{session['id']}"
        assert text_of(await gateway.call(base, "cat seen; ls")) == "x\nprepared\nseen\n"
        await gateway.client.delete(base)
