"""Sessions: what may be asked for, their sandbox's life, their end, and a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.errors import NotFound, TooMany, Unprocessable
from gateway.gateway import Gateway
from gateway.models import SessionRequest
from gateway.principals import Principal
from tests.gateway.conftest import AGENT, OPERATOR, Served, called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


async def test_sandbox_is_made_at_the_first_call(gateway: Gateway) -> None:
    session = await opened(gateway)
    assert not session.sandbox_alive
    await called(gateway, session, "bash", command="true")
    assert session.sandbox_alive


async def test_files_stay_directory_and_variables_do_not(gateway: Gateway) -> None:
    session = await opened(gateway)
    await called(gateway, session, "bash", command="export A=1; cd /tmp; echo hi > /workspace/file")
    result = await called(gateway, session, "bash", command='cat file; pwd; echo "[$A]"')
    assert result.text == "hi\n/workspace\n[]"


async def test_sessions_do_not_see_each_other(gateway: Gateway) -> None:
    """A08: another session's files and processes are not there."""
    one, two = await opened(gateway), await opened(gateway)
    await called(gateway, one, "bash", command="echo secret > file")
    result = await called(gateway, two, "bash", command="ls -A; ls -d /proc/[0-9]* | wc -l")
    assert "file" not in result.text
    assert int(result.text.splitlines()[-1]) < 12


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"limits": {"memory": 2 << 30}}, "limits.memory: 2147483648 is wider than the profile's 1073741824"),
        ({"limits": {"call_seconds": 121}}, "limits.call_seconds: 121 is wider than the profile's 120"),
        ({"ttl_seconds": 14401}, "ttl_seconds: 14401 is over the profile's 14400"),
        ({"network": "open"}, "network: 'open' is wider than the profile's 'none'"),
        ({"env": {"LD_PRELOAD": "x"}}, "env: 'LD_PRELOAD' may not come from a caller"),
        ({"tools": ["bash", "brew"]}, "tools: 'brew' matches no tool of the profile 'default'"),
        ({"inputs": {"user": "me"}}, "inputs: nothing in this session declares 'user'"),
        ({"permission": "maybe"}, "permission: no such mode"),
        ({"seed": [{"path": "a"}]}, "seed: a: give exactly one of 'text' and 'base64'"),
        ({"seed": [{"path": "a", "base64": "?"}]}, "seed: a: not base64: Only base64 data is allowed"),
    ],
)
async def test_request_beyond_the_profile_names_field_and_bound(gateway: Gateway, request_: Any, message: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        await opened(gateway, **request_)
    assert refused.value.message.startswith(message)
    assert gateway.sessions.open == []


async def test_network_list_is_refused(state_dir: Path) -> None:
    """A11, R65: an option that does nothing is refused, not ignored."""
    from gateway.errors import SettingsError
    from gateway.settings import load_settings

    file = state_dir.with_suffix(".toml")
    file.write_text('[profiles.default]\nnetwork = ["example.org"]\n')
    with pytest.raises(SettingsError, match="not supported yet"):
        load_settings(file)


async def test_narrower_limits_are_in_force(gateway: Gateway) -> None:
    session = await opened(gateway, limits={"open_files": 64, "call_seconds": 5}, tools=["bash", "read_*"])
    assert (await called(gateway, session, "bash", command="ulimit -n")).text == "64"
    assert [one.name for one in session.tools] == ["bash", "read_file", "read_result"]
    refused = await called(gateway, session, "write_file", file_path="a", content="b")
    assert (refused.status, refused.error and refused.error.code) == ("invalid", "unknown_tool")


async def test_env_from_caller_reaches_only_the_inside(state_dir: Path) -> None:
    """A12: names that the operator allowed, and inside only."""
    profile = {"env": {"TZ": "UTC"}, "env_from_caller": ["GREETING", "LD_PRELOAD"]}
    async with running(state_dir, profiles={"default": profile}) as gateway:
        session = await opened(gateway, env={"GREETING": "hello"})
        result = await called(gateway, session, "bash", command="env | sort")
    assert [line for line in result.text.splitlines() if not line.startswith(("PWD", "SHLVL", "_="))] == [
        "GREETING=hello",
        "HOME=/home/agent",
        "LC_CTYPE=C.UTF-8",
        "PATH=/run/sandgate/bin:/usr/local/bin:/usr/bin:/bin",
        "TZ=UTC",
    ]


async def test_profile_that_is_not_granted_is_absent(state_dir: Path) -> None:
    async with running(state_dir, profiles={"default": {}, "other": {}}) as gateway:
        with pytest.raises(NotFound):
            await opened(gateway, profile="other")
        with pytest.raises(NotFound):
            await opened(gateway, profile="absent")
        assert await gateway.open_session(OPERATOR, SessionRequest(profile="other"))


async def test_limits_of_the_machine_are_429(state_dir: Path) -> None:
    async with running(state_dir, server={"sessions": 3, "live_sandboxes": 1}) as gateway:
        one, two = await opened(gateway), await opened(gateway)
        await called(gateway, one, "bash", command="true")
        with pytest.raises(TooMany) as full:
            await called(gateway, two, "bash", command="true")
        assert full.value.retry_after_seconds
        with pytest.raises(TooMany):
            await opened(gateway, seed=[{"path": "a", "text": ""}])
        await opened(gateway)
        with pytest.raises(TooMany):
            await opened(gateway)
        await gateway.close_session(one)
        assert (await called(gateway, two, "bash", command="true")).status == "ok"


async def test_lost_sandbox_is_told_and_the_next_call_works(gateway: Gateway) -> None:
    session = await opened(gateway)
    await called(gateway, session, "bash", command="echo kept > file")
    sandbox = await session.sandbox()
    async with anyio.create_task_group() as tasks:
        results = []

        async def call() -> None:
            results.append(await called(gateway, session, "bash", command="sleep 60"))

        tasks.start_soon(call)
        await anyio.sleep(0.3)
        await sandbox.aclose()
    assert (results[0].status, results[0].error and results[0].error.code) == ("sandbox_lost", "sandbox_lost")
    assert "its files are still there" in results[0].text
    assert (await called(gateway, session, "bash", command="cat file")).text == "kept"


async def test_idle_session_expires_but_not_while_a_call_runs(state_dir: Path) -> None:
    async with running(state_dir, profiles={"default": {"idle_seconds": 0.5}}) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "bash", command="sleep 2.5; echo done")).text == "done"
        with anyio.fail_after(10):
            await session.closed.wait()
        assert session.close_report is not None
        assert (session.state, session.close_report.reason) == ("expired", "idle for 0.5 s")


async def test_lifetime_ends_a_session(state_dir: Path) -> None:
    async with running(state_dir) as gateway:
        session = await opened(gateway, ttl_seconds=0.5)
        with anyio.fail_after(10):
            await session.closed.wait()
        assert session.state == "expired"


async def test_closed_session_leaves_nothing(gateway: Gateway, state_dir: Path) -> None:
    session = await opened(gateway)
    await called(gateway, session, "bash", command="mkdir -p a/b; chmod 0 a; sleep 600 & disown")
    assert list((state_dir / "workspaces").iterdir())
    report = await gateway.close_session(session)
    assert (report.state, report.failed) == ("closed", ())
    assert list((state_dir / "workspaces").iterdir()) == []
    assert gateway.places.taken == 0
    assert await gateway.close_session(session) == report


async def test_closing_cancels_what_runs(gateway: Gateway) -> None:
    """A62."""
    session = await opened(gateway)
    async with anyio.create_task_group() as tasks:
        results = []

        async def call() -> None:
            results.append(await called(gateway, session, "bash", command="sleep 60"))

        tasks.start_soon(call)
        await anyio.sleep(0.3)
        await gateway.close_session(session)
    assert results[0].status == "cancelled"
    with pytest.raises(NotFound, match="closed"):
        await called(gateway, session, "bash", command="true")


async def test_open_session_goes_on_after_a_restart(state_dir: Path) -> None:
    async with running(state_dir) as gateway:
        session = await opened(gateway, seed=[{"path": "seed", "text": "first"}], labels={"who": "me"})
        await called(gateway, session, "bash", command="echo changed > seed; echo more > file")
        large = await called(gateway, session, "bash", command="seq 1 20000")
    async with running(state_dir) as gateway:
        again = gateway.sessions.find(AGENT, session.id)
        assert again.request.labels == {"who": "me"}
        assert (await called(gateway, again, "bash", command="cat seed file")).text == "changed\nmore"
        page = await called(gateway, again, "read_result", reference=large.references[0].reference, lines="20000")
        assert page.text == "20000"


async def test_roles_see_only_what_is_theirs(gateway: Gateway) -> None:
    """A50."""
    operators = await gateway.open_session(OPERATOR, SessionRequest())
    agents = await gateway.open_session(AGENT, SessionRequest())
    session = Principal("session", agents.id)
    assert {one.id for one in gateway.sessions.visible(OPERATOR)} == {operators.id, agents.id}
    assert {one.id for one in gateway.sessions.visible(AGENT)} == {agents.id}
    assert {one.id for one in gateway.sessions.visible(session)} == {agents.id}
    for stranger in (AGENT, session):
        with pytest.raises(NotFound):
            gateway.sessions.find(stranger, operators.id)


async def test_limits_not_enforced_are_told_at_opening(server: Served) -> None:
    opened_session = await server.session()
    assert any(one.startswith("workspace_size") for one in opened_session["session"]["not_enforced"])


async def test_tools_are_listed_in_four_shapes(server: Served) -> None:
    session = await server.session(tools=["ls"])
    shapes = {}
    for shape in ("mcp", "openai", "openai-chat", "anthropic"):
        answer = await server.agent.get(f"/v1/sessions/{session['id']}/tools", params={"format": shape})
        [shapes[shape]] = answer.json()["tools"]
    assert shapes["mcp"]["annotations"] == {"readOnlyHint": True, "destructiveHint": False, "openWorldHint": False}
    assert shapes["mcp"]["inputSchema"] == shapes["openai"]["parameters"] == shapes["anthropic"]["input_schema"]
    assert shapes["openai-chat"]["function"]["parameters"] == shapes["openai"]["parameters"]
    assert (shapes["openai"]["type"], shapes["anthropic"]["name"]) == ("function", "ls")


async def test_record_names_limits_that_are_not_enforced(server: Served) -> None:
    session = await server.session()
    await server.call(session, "bash", command="true")
    record = (await server.agent.get(f"/v1/sessions/{session['id']}")).json()
    assert record["channel"] == "direct"
    assert any(one.startswith("workspace_size") for one in record["not_enforced"])
    assert "token" not in record


@pytest.mark.parametrize("kind", ["local", pytest.param("docker", marks=pytest.mark.needs("docker"))])
async def test_session_gets_a_sandbox_that_waited_for_it(state_dir: Path, nothing_left: None, kind: str) -> None:
    """Its hooks run after that; it counts as one live sandbox, and so does the next at the ready."""
    profile = {"kind": kind, "pool": {"min": 1}}
    async with running(state_dir, profiles={"default": profile}) as gateway:
        [pool] = gateway.profiles.pools()
        await until(lambda: pool.ready == 1)
        session = await opened(gateway, seed=[{"path": "a", "text": "seed"}])
        assert (await called(gateway, session, "bash", command="cat a; ls")).text == "seeda"
        await until(lambda: pool.ready == 1)
        assert gateway.places.taken == 2
        await gateway.close_session(session)
        assert (pool.ready, gateway.places.taken) == (1, 1)
    assert gateway.places.taken == 0


async def test_sandboxes_at_the_ready_make_room_for_sessions(state_dir: Path) -> None:
    async with running(
        state_dir, server={"live_sandboxes": 2}, profiles={"default": {"pool": {"min": 2}}, "other": {}}
    ) as gateway:
        [pool] = gateway.profiles.pools()
        await until(lambda: pool.ready == 2)
        others = [await gateway.open_session(OPERATOR, SessionRequest(profile="other")) for _ in range(2)]
        for one in others:
            session = gateway.sessions.find(OPERATOR, one.id)
            assert (await called(gateway, session, "bash", command="true")).status == "ok"
        assert (pool.ready, gateway.places.taken) == (0, 2)
        with pytest.raises(TooMany):
            await called(gateway, await opened(gateway), "bash", command="true")


async def test_empty_pool_that_fails_is_429(state_dir: Path) -> None:
    pool = {"min": 1, "max": 1, "when_empty": "fail"}
    async with running(state_dir, profiles={"default": {"pool": pool}}) as gateway:
        await until(lambda: gateway.profiles.pools()[0].ready == 1)
        one, two = await opened(gateway), await opened(gateway)
        await called(gateway, one, "bash", command="true")
        with pytest.raises(TooMany, match="no sandbox of the profile 'default' is ready"):
            await called(gateway, two, "bash", command="true")
        await gateway.close_session(one)
        await until(lambda: gateway.profiles.pools()[0].ready == 1)
        assert (await called(gateway, two, "bash", command="true")).status == "ok"


async def test_no_sandbox_at_the_ready_outlives_a_killed_gateway(state_dir: Path) -> None:
    """I5: what it left for nobody is removed at the next start, and no session's."""
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="true")
        (state_dir / "workspaces" / "pool-1234" / "workspace").mkdir(parents=True)
    async with running(state_dir):
        await until(lambda: [one.name for one in (state_dir / "workspaces").iterdir()] == [session.id])


async def test_calls_of_many_sessions_at_once_get_a_place_or_429(server: Served) -> None:
    """None is accepted that would find no place when it runs."""
    sessions = [await server.session() for _ in range(24)]
    answers: list[httpx2.Response] = []

    async def call(session: dict[str, Any]) -> None:
        path = f"/v1/sessions/{session['id']}/calls"
        answers.append(await server.agent.post(path, json={"tool": "bash", "arguments": {"command": "true"}}))

    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(call, session)
    full = [one for one in answers if one.status_code == 429]
    assert (len(full), {one.headers["retry-after"] for one in full}) == (4, {"5"})
    assert {one.json()["status"] for one in answers if one.status_code == 200} == {"ok"}


async def test_a_lost_sandbox_keeps_its_place(state_dir: Path) -> None:
    """R44: the next call of its session is not refused for want of one."""
    async with running(state_dir, server={"live_sandboxes": 1}) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="true")
        await (await session.sandbox()).aclose()
        assert (await called(gateway, session, "bash", command="true")).status == "ok"
        assert gateway.places.taken == 1


async def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.02)
