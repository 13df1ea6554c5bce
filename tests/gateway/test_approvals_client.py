"""Approvals as their users decide them: by the Python client, and by the commands."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.client import Client, Forbidden, Refused, Session
from gateway.models import ToolResult
from tests.gateway.commandline import Serving, serve
from tests.gateway.conftest import served
from tests.gateway.test_cli_serve import HOSTILE, OBEYED

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.needs("local")]


# the client


@pytest.mark.anyio
async def test_client_watches_and_decides(state_dir: Path) -> None:
    async with (
        served(state_dir, profiles={"default": {"permission": "ask"}}) as server,
        Client(server.url, server.operator.headers["authorization"].removeprefix("Bearer ")) as operator,
        Client(server.url, server.agent.headers["authorization"].removeprefix("Bearer ")) as agent,
        agent.session() as session,
    ):
        results: dict[str, ToolResult] = {}

        async def call(command: str) -> None:
            results[command] = await session.call("bash", {"command": command})

        async with anyio.create_task_group() as tasks, aclosing(operator.watch_approvals()) as approvals:
            for command in ("echo one", "echo two", "echo three"):
                tasks.start_soon(call, command)
                one = await anext(approvals)
                assert (one.state, one.arguments) == ("waiting", {"command": command})
                match command:
                    case "echo one":
                        assert (await operator.approve(one.id, scope="session")).scope == "session"
                    case "echo two":
                        await operator.approve(one.id, arguments={"command": "echo edited"})
                    case _:
                        await operator.deny(one.id, "no more")
        assert {command: result.text for command, result in results.items()} == {
            "echo one": "one",
            "echo two": "edited",
            "echo three": f"denied: a person rejected this ({one.id}): no more. Do it another way.",
        }
        assert (await session.call("bash", {"command": "echo one"})).text == "one"
        assert sorted(one.state for one in await operator.approvals("all")) == ["allowed", "allowed", "denied"]
        assert (await operator.approval(one.id)).reason == "no more"
        with pytest.raises(Refused, match="decided before"):
            await operator.approve(one.id)
        for refused in (agent.approvals(), agent.approve(one.id), agent.approval(one.id)):
            with pytest.raises(Forbidden):
                await refused


@pytest.mark.anyio
async def test_call_is_made_again_while_it_is_pending(state_dir: Path) -> None:
    """R85: the gateway's hold is bounded; the client goes on for as long as it was told."""
    async with (
        served(state_dir, server={"approval_wait_seconds": 0.2}, profiles={"default": {"permission": "ask"}}) as server,
        Client(server.url, server.operator.headers["authorization"].removeprefix("Bearer ")) as operator,
        operator.session() as session,
    ):
        assert (await session.call("bash", {"command": "echo hi"})).status == "pending"
        result: list[ToolResult] = []

        async def call() -> None:
            result.append(await _patient(session, "echo hi"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            with anyio.fail_after(30):
                while len(await session.calls()) < 3:
                    await anyio.sleep(0.05)
            [one] = await operator.approvals()
            await operator.approve(one.id)
        assert result[0].text == "hi"


async def _patient(session: Session, command: str) -> ToolResult:
    return await session.call("bash", {"command": command}, idempotency_key="k", approval_seconds=60)


# the commands


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("approvals")
    (folder / "sandgate.toml").write_text('[profiles.default]\npermission = "ask"\n')
    with serve(folder / "state", cwd=folder) as running:
        yield running


@pytest.fixture
def http(gateway: Serving) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {gateway.token('operator')}"}
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def waiting(http: httpx2.Client) -> Iterator[tuple[str, Future[Any]]]:
    """A call that asks, and its approval's id."""
    session = http.post("/v1/sessions", json={}).json()["id"]
    revision = max((one["revision"] for one in _approvals(http, state="all")), default=0)
    arguments = {"command": f"echo hi # {HOSTILE}"}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(http.post, f"/v1/sessions/{session}/calls", json={"tool": "bash", "arguments": arguments})
        [one] = _approvals(http, state="waiting", after=revision, wait_seconds=50)
        yield one["id"], call
        http.delete(f"/v1/sessions/{session}")


def _approvals(http: httpx2.Client, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/approvals", params=params).json()["approvals"]
    return found


def test_commands_show_what_waits_and_let_it_run(gateway: Serving, waiting: tuple[str, Future[Any]]) -> None:
    id, call = waiting
    listed, shown = gateway.run("approvals"), gateway.run("approvals", str(int(id.removeprefix("a-"))))
    for part in (id, "bash", "waiting", "echo hi"):
        assert part in listed.stdout
        assert part in shown.stdout
    assert "may bash run?" in shown.stdout
    for done in (listed, shown):
        assert OBEYED.findall(done.stdout) == []
        assert "\nforged" not in done.stdout
    assert json.loads(gateway.run("approvals", "--json").stdout)[0]["id"] == id
    done = gateway.run("approve", id, "--session", "--arguments", '{"command": "echo edited"}')
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("allowed", "for the session", "echo edited"):
        assert part in done.stdout
    assert call.result().json()["content"][0]["text"] == "edited\n"
    assert id not in gateway.run("approvals").stdout
    assert id in gateway.run("approvals", "--all").stdout


def test_command_denies_with_a_reason(gateway: Serving, waiting: tuple[str, Future[Any]]) -> None:
    id, call = waiting
    done = gateway.run("deny", id, "--reason", "not today")
    assert (done.returncode, "denied" in done.stdout, done.stderr) == (0, True, "")
    assert "not today" in call.result().json()["error"]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["approve", "a-9999"], "no such approval"),
        (["approve", "ID", "--arguments", "{"], "--arguments: not JSON"),
        (["approve", "ID", "--arguments", "[]"], "--arguments: not a JSON object"),
        (["approve", "ID", "--arguments", '{"cmd": 1}'], "arguments: "),
        (["approve", "../sessions"], "Not found"),
    ],
)
def test_commands_say_what_is_wrong(
    gateway: Serving, waiting: tuple[str, Future[Any]], words: list[str], said: str
) -> None:
    id, _ = waiting
    done = gateway.run(*(id if word == "ID" else word for word in words))
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert id in gateway.run("approvals").stdout


def test_agents_token_decides_nothing(gateway: Serving, waiting: tuple[str, Future[Any]]) -> None:
    id, _ = waiting
    for words in (["approvals"], ["approve", id], ["deny", id]):
        done = gateway.run(*words, SANDGATE_TOKEN=gateway.token("agent"))
        assert (done.returncode, "operator" in done.stderr) == (1, True)
