"""Death at any moment: of the gateway, of a client, of a session; and what must be true afterwards."""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import psutil
import pytest

from gateway.models import CallRequest
from tests.gateway.conftest import Served, opened, running, served
from tests.sandboxes.support import gone, host_processes

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

SANDGATE = Path(sys.executable).with_name("sandgate")
CONFIG = """
[server]
port = 0
stop_seconds = 2
replay_seconds = 1
"""


@dataclass
class Running:
    """A gateway as a process of its own, and a client with the agent's token."""

    process: subprocess.Popen[str]
    client: httpx2.AsyncClient
    state_dir: Path

    def below(self) -> list[psutil.Process]:
        """The launcher, every sandbox and every program of it, as the host sees them."""
        return psutil.Process(self.process.pid).children(recursive=True)

    async def session(self, **request: Any) -> str:
        answer = await self.client.post("/v1/sessions", json=request)
        assert answer.status_code == 201, answer.text
        return f"/v1/sessions/{answer.json()['id']}"

    async def call(self, base: str, command: str, key: str | None = None) -> dict[str, Any]:
        answer = await self.client.post(
            f"{base}/calls",
            json={"tool": "bash", "arguments": {"command": command}},
            headers={"idempotency-key": key} if key else {},
        )
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await anyio.to_thread.run_sync(self.process.wait, 20)


def text_of(result: dict[str, Any]) -> str:
    return "".join(block["text"] for block in result["content"])


def start(state_dir: Path, more: str = "") -> subprocess.Popen[str]:
    config = state_dir.parent / "sandgate.toml"
    config.write_text(CONFIG + more)
    with (state_dir.parent / "stderr").open("a") as errors:
        return subprocess.Popen(
            [SANDGATE, "serve", "--config", config, "--state-dir", state_dir],
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=state_dir.parent,
        )


@asynccontextmanager
async def gateway_process(state_dir: Path, more: str = "") -> AsyncIterator[Running]:
    """Ready when it listens; killed at the end if it is still there. `more` is added to its configuration."""
    process = start(state_dir, more)
    assert process.stdout is not None
    try:
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        assert "listens on http" in line, (state_dir.parent / "stderr").read_text()
        headers = {"authorization": f"Bearer {(state_dir / 'tokens' / 'agent').read_text().strip()}"}
        async with httpx2.AsyncClient(base_url=line.split()[-1], headers=headers, timeout=60) as client:
            yield Running(process, client, state_dir)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def all_gone(processes: list[psutil.Process], seconds: float = 2) -> bool:
    """Whether all of these very processes are dead within the time (a zombie of a killed parent is)."""
    with anyio.move_on_after(seconds):
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
            await anyio.sleep(0.02)
        return True
    return False


async def until_written(file: Path, lines: int) -> None:
    with anyio.fail_after(15):
        while not file.exists() or file.read_text().count("\n") < lines:
            await anyio.sleep(0.01)


def records(state_dir: Path) -> list[tuple[str, str | None, bool]]:
    """Every call of the journal: its id, its status, whether its end is noted."""
    with contextlib.closing(sqlite3.connect(state_dir / "sandgate.db")) as database:
        rows = database.execute("SELECT id, status, finished IS NOT NULL FROM calls ORDER BY session_id, sequence")
        return rows.fetchall()


async def killed_mid_call(state_dir: Path, rounds: int) -> None:
    """Kill the gateway while a call runs, over and over on one state folder, and look at everything each time."""
    base, reference, digest = "", "", ""
    for number in range(1, rounds + 1):
        async with gateway_process(state_dir) as running:
            if not base:
                base = await running.session()
                stored = await running.call(base, "seq 1 30000; echo kept > kept")
                reference = stored["references"][0]["reference"].replace("sandgate://", "/v1/sessions/")
                digest = stored["references"][0]["sha256"]
            counter = state_dir / "workspaces" / base.rpartition("/")[2] / "workspace" / "counter"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cut_off, running, base, f"key-{number}")
                await until_written(counter, number)
                await anyio.sleep(random.random() * 0.3)
                below = running.below()
                assert len(below) >= 4
                await running.end(signal.SIGKILL)
                assert await all_gone(below)
        async with gateway_process(state_dir) as running:
            again = await running.call(base, _counting(), f"key-{number}")
            assert (again["status"], again["error"]["code"]) == ("interrupted", "interrupted")
            assert counter.read_text() == "x\n" * number
            assert text_of(await running.call(base, "cat kept")) == "kept\n"
            content = (await running.client.get(reference)).content
            assert hashlib.sha256(content).hexdigest() == digest
            assert (await running.client.get("/readyz")).status_code == 200
            await running.end(signal.SIGTERM)
    assert Counter((status, ended) for _, status, ended in records(state_dir)) == {
        ("interrupted", 1): rounds,
        ("ok", 1): rounds + 1,
    }


def _counting() -> str:
    return "echo x >> counter; (setsid sleep 4713.1 &) ; sleep 4713.2"


async def _cut_off(running: Running, base: str, key: str) -> None:
    with contextlib.suppress(httpx2.TransportError):
        await running.call(base, _counting(), key)


async def test_a_killed_gateway_starts_again_and_has_lost_nothing(state_dir: Path) -> None:
    """A60, A44, R34, I3, I4, I5, I9: no process left within 2 s; the session goes on with its files; the call is
    `interrupted` once, its key does not run it again; earlier results are whole."""
    await killed_mid_call(state_dir, 1)


@pytest.mark.slow
async def test_a_gateway_killed_many_times(state_dir: Path) -> None:
    """A60, C.2 row 1: the same ten times over."""
    await killed_mid_call(state_dir, 10)


@pytest.mark.slow
async def test_results_are_whole_or_absent_after_a_kill_at_any_point(state_dir: Path) -> None:
    """A44, I4: the gateway is killed while results are being stored, ten times; every reference that a client was given
    or that is listed afterwards has its bytes, and no temporary file is listed."""
    given: dict[str, str] = {}
    base = ""
    for _ in range(10):
        async with gateway_process(state_dir) as running:
            base = base or await running.session()

            async def flood(running: Running = running, base: str = base) -> None:
                with contextlib.suppress(httpx2.TransportError):
                    while True:
                        for one in (await running.call(base, "head -c 3000000 /dev/urandom | base64"))["references"]:
                            given[one["reference"]] = one["sha256"]

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(flood)
                await anyio.sleep(0.5 + random.random())
                await running.end(signal.SIGKILL)
    async with gateway_process(state_dir) as running:
        listed = (await running.client.get(f"{base}/results")).json()["results"]
        everything = {**given, **{one["reference"]: one["sha256"] for one in listed}}
        for reference, digest in everything.items():
            answer = await running.client.get(reference.replace("sandgate://", "/v1/sessions/"))
            assert (answer.status_code, hashlib.sha256(answer.content).hexdigest()) == (200, digest)
    assert given
    assert {ended for _, _, ended in records(state_dir)} == {1}


async def test_sigterm_under_load_ends_every_call_and_leaves_nothing(state_dir: Path) -> None:
    """C.2 row 2, I3, I5: 20 calls of 5 sessions: the short ones end, the long ones are `cancelled` after the grace, all
    are answered; exit 0; no process is left; new calls are refused meanwhile. A55: no token is printed."""
    async with gateway_process(state_dir) as running:
        bases = [await running.session() for _ in range(5)]
        answers: list[str] = []

        async def one(base: str, seconds: float) -> None:
            answers.append((await running.call(base, f"echo started >> started; sleep {seconds}"))["status"])

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, bases[number % 5], 4714.5 if number < 5 else 1)
            for base in bases:
                await until_written(state_dir / "workspaces" / base.rpartition("/")[2] / "workspace" / "started", 4)
            below = running.below()
            running.process.send_signal(signal.SIGTERM)
            await anyio.sleep(0.3)
            late = await running.client.post(f"{bases[0]}/calls", json={"tool": "bash", "arguments": {"command": "id"}})
            assert (late.status_code, late.json()["code"]) == (503, "stopping")
        code = await anyio.to_thread.run_sync(running.process.wait, 20)
        assert (code, Counter(answers)) == (0, {"ok": 15, "cancelled": 5})
        assert await all_gone(below)
        assert running.process.stdout is not None
        printed = running.process.stdout.read() + (state_dir.parent / "stderr").read_text()
    assert {ended for _, _, ended in records(state_dir)} == {1}
    assert not re.search(r"Traceback|sandgate_(operator|agent|session)_", printed)


async def test_a_state_folder_in_use_is_refused(state_dir: Path) -> None:
    """A65, design 9: the second gateway says so and ends; the first goes on, with its sandboxes."""
    async with gateway_process(state_dir) as running:
        base = await running.session()
        await running.call(base, "echo one > f")
        second = start(state_dir)
        assert second.stdout is not None
        code = await anyio.to_thread.run_sync(second.wait, 20)
        second.stdout.close()
        assert code not in (0, -9)
        assert "in use by another gateway" in (state_dir.parent / "stderr").read_text()
        assert text_of(await running.call(base, "cat f")) == "one\n"


@pytest.mark.slow
async def test_destroying_during_a_call_leaves_one_record_each(server: Served) -> None:
    """A62, I3: 50 rounds of calls, deletes and double deletes at random moments: no 500, the same report twice, each
    accepted call has its one end, no workspace and no place stays taken."""
    codes: Counter[int] = Counter()

    async def ask(method: str, path: str, **more: Any) -> httpx2.Response:
        answer = await server.agent.request(method, path, **more)
        codes[answer.status_code] += 1
        return answer

    request = {"tool": "bash", "arguments": {"command": "sleep 4715.1"}}

    async def call(base: str, headers: dict[str, str]) -> None:
        await ask("POST", f"{base}/calls", json=request, headers=headers)

    reports: list[str] = []

    async def delete(base: str, after: float) -> None:
        await anyio.sleep(after)
        reports.append((await ask("DELETE", base)).text)

    for _ in range(50):
        opening = [await ask("POST", "/v1/sessions", json={}) for _ in range(2)]
        assert opening[0].json()["id"] != opening[1].json()["id"]
        base, other = (f"/v1/sessions/{one.json()['id']}" for one in opening)
        reports.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, base, {})
            tasks.start_soon(call, base, {"accept": "text/event-stream"})
            tasks.start_soon(call, base, {"idempotency-key": "k"})
            for _ in range(2):
                tasks.start_soon(delete, base, random.random() * 0.1)
        assert len(reports) == 2
        assert reports[0] == reports[1]
        await ask("DELETE", other)
    assert set(codes) <= {200, 201, 404}
    found = records(server.state_dir)
    assert {status for _, status, _ in found} <= {"cancelled", "sandbox_lost"}
    assert {ended for _, _, ended in found} == {1}
    assert list((server.state_dir / "workspaces").iterdir()) == []
    assert server.gateway.places.taken == 0
    assert await gone("4715.1")


async def test_a_retry_after_a_disconnect_runs_once(server: Served) -> None:
    """A63, R30, I9: the first client goes away; the call runs on, and each retry, also two at once, gets its answer."""
    session = await server.session()
    base = f"/v1/sessions/{session['id']}"
    request = {"tool": "bash", "arguments": {"command": "echo x >> counter; sleep 1; wc -l < counter"}}
    headers = {"idempotency-key": "once"}
    with anyio.move_on_after(0.3):
        async with server.client(session["token"]) as client:
            await client.post(f"{base}/calls", json=request, headers=headers)
    answers: list[dict[str, Any]] = []

    async def retry() -> None:
        answers.append((await server.agent.post(f"{base}/calls", json=request, headers=headers)).json())

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(retry)
    await retry()
    assert all(one == answers[0] for one in answers)
    assert (answers[0]["status"], text_of(answers[0])) == ("ok", "1\n")
    assert (server.state_dir / "workspaces" / session["id"] / "workspace" / "counter").read_text() == "x\n"
    assert len(records(server.state_dir)) == 1


async def test_calls_with_one_key_at_once_run_once(server: Served) -> None:
    """A63, I9: twenty at the same moment; another request with that key is refused, and runs nothing."""
    session = await server.session()
    base = f"/v1/sessions/{session['id']}"
    ids: list[str] = []

    async def one() -> None:
        answer = await server.agent.post(
            f"{base}/calls",
            headers={"idempotency-key": "k"},
            json={"tool": "bash", "arguments": {"command": "echo x >> counter"}},
        )
        ids.append(answer.json()["id"])

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(one)
    other = await server.agent.post(
        f"{base}/calls",
        headers={"idempotency-key": "k"},
        json={"tool": "bash", "arguments": {"command": "echo y >> counter"}},
    )
    assert (set(ids), other.status_code, other.json()["code"]) == ({"c-0001"}, 422, "key_reused")
    assert (server.state_dir / "workspaces" / session["id"] / "workspace" / "counter").read_text() == "x\n"


async def vanish(server: Served, session: dict[str, Any], marker: str, headers: dict[str, str]) -> None:
    """Start a call and go away once its programs run."""

    async def call() -> None:
        async with server.client(session["token"]) as client:
            await client.post(
                f"/v1/sessions/{session['id']}/calls",
                headers=headers,
                json={
                    "tool": "bash",
                    "arguments": {"command": f"trap '' TERM; (setsid sleep {marker} &); sleep {marker}"},
                },
            )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        with anyio.fail_after(15):
            while len(host_processes(marker)) < 2:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def status_soon(server: Served, session: dict[str, Any]) -> str:
    with anyio.fail_after(10):
        while True:
            record = (await server.agent.get(f"/v1/sessions/{session['id']}/calls/c-0001")).json()
            if record["status"]:
                return str(record["status"])
            await anyio.sleep(0.02)


async def test_a_plain_call_ends_with_its_client(server: Served) -> None:
    """A64, R08: its whole tree is dead within 2 s, and the record says `cancelled`."""
    session = await server.session()
    await vanish(server, session, "4716.1", {})
    assert await gone("4716.1", 4)
    assert await status_soon(server, session) == "cancelled"


async def test_a_stream_ends_some_time_after_its_last_reader(state_dir: Path) -> None:
    """A64: it lives on for `replay_seconds`, then it is dead within 2 s."""
    async with served(state_dir, server={"replay_seconds": 1.5}) as server:
        session = await server.session()
        await vanish(server, session, "4717.1", {"accept": "text/event-stream"})
        left = time.monotonic()
        await anyio.sleep(0.7)
        assert len(host_processes("4717.1")) >= 2
        assert await gone("4717.1", 6)
        assert time.monotonic() - left > 1.4
        assert await status_soon(server, session) == "cancelled"


async def test_a_stream_that_is_taken_up_again_goes_on(state_dir: Path) -> None:
    """A64, R30: a reader that comes back in time keeps it, and misses no byte."""
    async with served(state_dir, server={"replay_seconds": 1.5}) as server:
        session = await server.session()
        base = f"/v1/sessions/{session['id']}/calls"
        events = {"accept": "text/event-stream"}
        command = "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.25; done"
        last = ""
        async with (
            server.client(session["token"]) as client,
            client.stream(
                "POST", base, headers=events, json={"tool": "bash", "arguments": {"command": command}}
            ) as stream,
        ):
            async for line in stream.aiter_lines():
                last = line.removeprefix("id: ") if line.startswith("id: ") else last
                if last and not line:
                    break
        await anyio.sleep(0.5)
        assert last
        rest = (await server.agent.get(f"{base}/c-0001", headers={**events, "last-event-id": last})).text
        assert '"status":"ok"' in rest
        assert all(f"{number}\\n" in rest for number in range(2, 9))


async def test_a_call_with_a_key_outlives_its_client(server: Served) -> None:
    """A64: design 3: with a key it runs to its own limit; cancelling it still works."""
    session = await server.session()
    await vanish(server, session, "4718.1", {"idempotency-key": "k"})
    await anyio.sleep(1.5)
    assert len(host_processes("4718.1")) >= 2
    answer = await server.agent.post(f"/v1/sessions/{session['id']}/calls/c-0001/cancel")
    assert answer.json() == {"id": "c-0001", "cancelled": True}
    assert await gone("4718.1", 4)
    assert await status_soon(server, session) == "cancelled"


async def test_a_killed_launcher_is_a_lost_sandbox_not_a_dead_gateway(state_dir: Path) -> None:
    """A60, R44: the process that holds all sandboxes is killed: the call ends `sandbox_lost` or `signal`, never ok;
    the next call gets a new sandbox over the same files."""
    async with gateway_process(state_dir) as running:
        base = await running.session()
        await running.call(base, "echo kept > kept")
        statuses: list[str] = []

        async def one() -> None:
            statuses.append((await running.call(base, "touch on; sleep 4719.1"))["status"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            with anyio.fail_after(10):
                while not (state_dir / "workspaces" / base.rpartition("/")[2] / "workspace" / "on").exists():
                    await anyio.sleep(0.01)
            below = running.below()
            launcher = next(iter(psutil.Process(running.process.pid).children()))
            os.kill(launcher.pid, signal.SIGKILL)
            assert await all_gone(below)
        assert statuses == ["sandbox_lost"]
        assert text_of(await running.call(base, "cat kept")) == "kept\n"


COLLECTING = """
[profiles.default]
collect = [{ match = "**", to = "./collected" }]
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["results", "folder"])
async def test_a_collection_that_was_killed_begins_anew(state_dir: Path, to: str) -> None:
    """R39, design 9: what the first one had stored does not stand in the way of the second, nor does it stay."""
    more = COLLECTING if to == "folder" else ""
    async with gateway_process(state_dir, more) as running:
        base = await running.session(collect=[] if more else ["**"])
        session = base.rpartition("/")[2]
        await running.call(base, "for n in $(seq 2000); do echo $n > f$n; done")
        folder = state_dir.parent / "collected" / session if more else state_dir / "results" / session / "collected"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_close, running, base)
            with anyio.fail_after(30):
                while not list(folder.glob("files/f*")):
                    await anyio.sleep(0.01)
            await running.end(signal.SIGKILL)
    assert not (folder / "manifest.json").exists(), "it was killed too late"
    async with gateway_process(state_dir, more) as running:
        await running.call(base, "rm f1; echo again > f2")
        report = (await running.client.delete(base)).json()
        assert (report["failed"], [(one["files"], one["complete"]) for one in report["collected"]]) == (
            [],
            [(1999, True)],
        )
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {one["path"]: (folder / one["key"]).read_text() for one in manifest["files"]} == {
            f"f{n}": "again\n" if n == 2 else f"{n}\n" for n in range(2, 2001)
        }
        assert {one.name for one in (folder / "files").iterdir()} == {f"f{n}" for n in range(2, 2001)}


async def _close(running: Running, base: str) -> None:
    with contextlib.suppress(httpx2.HTTPError):
        await running.client.delete(base)


async def test_what_cancels_the_runner_ends_calls_with_a_record(state_dir: Path) -> None:
    """R08: an embedding program may cancel the task that runs the gateway."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            async def embed() -> None:
                async with running(state_dir) as gateway:
                    gateway.options = replace(gateway.options, stop_seconds=0.1)
                    session = await opened(gateway)
                    await gateway.start_call(session, CallRequest(tool="bash", arguments={"command": "sleep 300.71"}))
                    tasks.cancel_scope.cancel()
                    await anyio.sleep_forever()

            tasks.start_soon(embed)
    async with running(state_dir) as gateway:
        [session] = gateway.sessions.open
        [call] = await gateway.journal.calls(session.id, 0, 10)
        assert call.status == "cancelled"
