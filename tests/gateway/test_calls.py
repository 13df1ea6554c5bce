"""One call: statuses, records, limits, keys, cancelling, streams that can be taken up again."""

import asyncio
import base64
import json
import sqlite3
from typing import Any

import anyio
import httpx2
import pytest

from gateway.errors import Unavailable
from gateway.gateway import Gateway
from gateway.models import CallRequest
from tests.gateway.conftest import Served, called, opened, running, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


async def test_result_of_a_program(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command="echo out; echo err >&2; exit 3")
    assert (result.status, result.exit_code, result.error) == ("exit", 3, None)
    assert [(block.stream, block.text) for block in result.content] == [("stdout", "out\n"), ("stderr", "err\n")]
    assert result.text == "out\nerr\nexit code 3"
    assert not result.is_error


async def test_unknown_tool_is_invalid_and_recorded(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "brew", cups=2)
    assert (result.status, result.error and result.error.code) == ("invalid", "unknown_tool")
    [record] = await gateway.journal.calls(session.id)
    assert (record.status, record.tool, record.original_arguments) == ("invalid", "brew", {"cups": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "'command' is a required property"),
        ({"command": 3}, "command: 3 is not of type 'string'"),
        ({"command": "true", "shell": "zsh"}, "Additional properties are not allowed ('shell' was unexpected)"),
        ({"command": "true", "timeout_s": -1}, "timeout_s: -1 is less than or equal to the minimum of 0"),
    ],
)
async def test_arguments_against_the_schema_are_invalid(gateway: Gateway, arguments: Any, message: str) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "bash", **arguments)
    assert (result.status, result.error and result.error.message) == ("invalid", message)


async def test_timeout_keeps_partial_output_and_kills_the_tree(gateway: Gateway) -> None:
    """A20, R01, R26: the output so far comes back, and no process is left."""
    session = await opened(gateway)
    command = "echo begun; sleep 600 & sleep 600 & sleep 600 & wait"
    result = await called(gateway, session, "bash", command=command, timeout_s=0.5)
    assert (result.status, result.content[0].text) == ("timeout", "begun\n")
    assert result.error is not None
    assert "killed with its 3 child processes" in result.error.message
    left = await called(gateway, session, "bash", command="cat /proc/*/comm | grep -c sleep")
    assert left.content[0].text == "0\n"


async def test_after_a_timeout_the_session_goes_on(gateway: Gateway) -> None:
    """seed-facts 12 row 13. R11."""
    session = await opened(gateway)
    assert (await called(gateway, session, "bash", command="cat > x; sleep 60", timeout_s=0.3)).status == "timeout"
    assert (await called(gateway, session, "bash", command="echo fine")).text == "fine"


async def test_default_timeout_applies_when_none_is_given(state_dir: Any) -> None:
    """R09."""
    async with running(state_dir, profiles={"default": {"limits": {"call_seconds": 0.5}}}) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "bash", command="sleep 60")).status == "timeout"


async def test_timeout_over_the_limit_is_invalid(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command="true", timeout_s=601)
    assert (result.status, result.error and result.error.code) == ("invalid", "invalid_arguments")


async def test_signal(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command="echo before; kill -TERM $$")
    assert (result.status, result.content[0].text, result.exit_code) == ("signal", "before\n", None)


async def test_aliases_of_other_agents(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "Bash", command="sleep 5", timeout=300, description="nap")
    assert (result.tool, result.status) == ("bash", "timeout")
    written = await called(gateway, session, "create", path="a.txt", file_text="hello\n")
    assert (written.tool, written.status) == ("write_file", "ok")
    assert (await called(gateway, session, "Read", file_path="a.txt")).text == "     1\thello"
    [first, *_] = await gateway.journal.calls(session.id)
    assert (first.requested_tool, first.tool, first.original_arguments) == (
        "Bash",
        "bash",
        {"command": "sleep 5", "timeout": 300, "description": "nap"},
    )


async def test_output_that_is_not_utf8_is_kept_and_flagged(gateway: Gateway) -> None:
    """R21: the text view replaces, and says so."""
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command=r"printf 'a\377b'")
    assert result.content[0].text == "a\ufffdb"
    assert result.notes == ("stdout is not valid UTF-8: shown with replacement characters",)


async def test_parallel_limit_holds(state_dir: Any) -> None:
    async with running(state_dir, profiles={"default": {"limits": {"parallel_calls": 2}}}) as gateway:
        session = await opened(gateway)
        command = "touch r.$$; ls r.* | wc -l; sleep 0.3; rm r.$$"
        calls = [
            await gateway.start_call(session, CallRequest(tool="bash", arguments={"command": command}))
            for _ in range(6)
        ]
        counts = [int((await one.wait()).content[0].text) for one in calls]
    assert max(counts) <= 2


async def test_one_accepted_and_one_terminal_record_each(gateway: Gateway, state_dir: Any) -> None:
    session = await opened(gateway)
    for command in ("true", "exit 1", "kill -9 $$"):
        await called(gateway, session, "bash", command=command)
    await called(gateway, session, "nope")
    records = await gateway.journal.calls(session.id)
    assert [one.status for one in records] == ["ok", "exit", "signal", "invalid"]
    assert all(one.finished is not None and one.finished >= one.accepted for one in records)
    assert [one.id for one in records] == ["c-0001", "c-0002", "c-0003", "c-0004"]


async def test_long_arguments_are_kept_as_digest_size_and_head(gateway: Gateway) -> None:
    session = await opened(gateway)
    await called(gateway, session, "write_file", file_path="big", content="x" * 100_000)
    [record] = await gateway.journal.calls(session.id)
    assert isinstance(record.arguments, dict)
    assert set(record.arguments) == {"sha256", "bytes", "first"}
    assert len(str(record.arguments["first"])) == 4096


async def test_same_key_runs_once_and_gets_the_same_answer(gateway: Gateway) -> None:
    """seed-facts 12 row 32. A63."""
    session = await opened(gateway)
    request = CallRequest(tool="bash", arguments={"command": "echo run >> count; cat count"})
    first = await (await gateway.start_call(session, request, "key-1")).wait()
    again = await (await gateway.start_call(session, request, "key-1")).wait()
    assert first == again
    assert first.text == "run"


async def test_same_key_at_the_same_time_is_one_call(gateway: Gateway) -> None:
    """A63."""
    session = await opened(gateway)
    request = CallRequest(tool="bash", arguments={"command": "echo run >> count; sleep 0.2; cat count"})
    actives = await asyncio.gather(*(gateway.start_call(session, request, "key-1") for _ in range(10)))
    results = [await one.wait() for one in actives]
    assert {one.text for one in results} == {"run"}
    assert {one.id for one in results} == {"c-0001"}


async def test_key_used_for_another_request_is_refused(server: Served) -> None:
    session = await server.session()
    url, headers = f"/v1/sessions/{session['id']}/calls", {"idempotency-key": "k"}
    await server.agent.post(url, json={"tool": "ls"}, headers=headers)
    answer = await server.agent.post(url, json={"tool": "glob", "arguments": {"pattern": "*"}}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "key_reused")


async def test_keyed_answer_survives_a_restart(state_dir: Any) -> None:
    """A63 over a restart: the answer is on record."""
    request = CallRequest(tool="bash", arguments={"command": "echo run >> count; cat count"})
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        first = await (await gateway.start_call(session, request, "key-1")).wait()
    async with running(state_dir) as gateway:
        [session] = gateway.sessions.open
        assert await (await gateway.start_call(session, request, "key-1")).wait() == first
        assert (await called(gateway, session, "bash", command="cat count")).text == "run"


async def test_cancel_ends_the_tree_and_keeps_output(server: Served) -> None:
    """R08: cancel ends detached children too."""
    session = await server.session()
    url = f"/v1/sessions/{session['id']}/calls"
    async with anyio.create_task_group() as tasks:
        answers: list[Any] = []

        async def call() -> None:
            command = "echo begun; setsid nohup sleep 600 >/dev/null 2>&1 & sleep 600"
            answers.append(await server.agent.post(url, json={"tool": "bash", "arguments": {"command": command}}))

        tasks.start_soon(call)
        while not server.gateway.sessions.open[0].running:
            await anyio.sleep(0.01)
        await anyio.sleep(0.3)
        cancelled = await server.agent.post(f"{url}/c-0001/cancel")
    assert cancelled.json() == {"id": "c-0001", "cancelled": True}
    assert (answers[0].json()["status"], answers[0].json()["content"][0]["text"]) == ("cancelled", "begun\n")
    left = await server.call(session, "bash", command="cat /proc/*/comm | grep -c sleep")
    assert left["content"][0]["text"] == "0\n"
    assert (await server.agent.post(f"{url}/c-0001/cancel")).json() == {"id": "c-0001", "cancelled": False}


async def events(stream: httpx2.Response) -> list[tuple[str, str | None, Any]]:
    """The events of an open stream: name, id, data."""
    found, name, id = [], "message", None
    async for line in stream.aiter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "id":
            id = value
        elif key == "data":
            data = json.loads(value)
        elif not line and name != "message":
            found.append((name, id, data))
            name, id = "message", None
    return found


SSE = {"accept": "text/event-stream"}


async def test_stream_shows_output_as_it_comes_and_the_result_last(server: Served) -> None:
    session = await server.session()
    body = {"tool": "bash", "arguments": {"command": "echo one; sleep 0.2; echo two; echo bad >&2; exit 4"}}
    async with server.agent.stream("POST", f"/v1/sessions/{session['id']}/calls", json=body, headers=SSE) as stream:
        got = await events(stream)
    assert [name for name, _, _ in got] == ["accepted", "output", "output", "output", "result"]
    assert [(data["stream"], data["text"]) for name, _, data in got if name == "output"] == [
        ("stdout", "one\n"),
        ("stdout", "two\n"),
        ("stderr", "bad\n"),
    ]
    assert got[-1][2]["exit_code"] == 4


async def test_broken_stream_is_taken_up_where_it_was(server: Served) -> None:
    """R30: reconnect with the last id; the concatenation is exact."""
    session = await server.session()
    url = f"/v1/sessions/{session['id']}/calls"
    body = {"tool": "bash", "arguments": {"command": "for i in $(seq 1 40); do echo line $i; sleep 0.02; done"}}
    text, last = "", None
    async with server.agent.stream("POST", url, json=body, headers=SSE) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: ") and '"text"' in line:
                text += json.loads(line[6:])["text"]
            if line.startswith("id: "):
                last = line[4:]
                if "line 7" in text:
                    break
    assert last is not None
    async with server.agent.stream("GET", f"{url}/c-0001", headers={**SSE, "last-event-id": last}) as stream:
        rest = await events(stream)
    text += "".join(data["text"] for name, _, data in rest if name == "output")
    assert text == "".join(f"line {number}\n" for number in range(1, 41))
    assert rest[-1][2]["status"] == "ok"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8190, 8191, 8192, 65535, 65536, 65537])
async def test_multibyte_characters_survive_chunk_borders(server: Served, size: int) -> None:
    """R22."""
    session = await server.session()
    code = (
        f"import sys; b = ('a' * {size} + '€𝄞é' * 3).encode()\n"
        f"for i in range(len(b)): sys.stdout.buffer.write(b[i:i+1]); i > {size} - 2 and sys.stdout.flush()"
    )
    body = {"tool": "python", "arguments": {"code": code}}
    async with server.agent.stream("POST", f"/v1/sessions/{session['id']}/calls", json=body, headers=SSE) as stream:
        got = await events(stream)
    assert "".join(data["text"] for name, _, data in got if name == "output") == "a" * size + "€𝄞é" * 3


async def test_bytes_that_are_no_text_come_exactly_as_base64(server: Served) -> None:
    """R21."""
    session = await server.session()
    body = {"tool": "bash", "arguments": {"command": r"printf '\377\376'"}}
    async with server.agent.stream("POST", f"/v1/sessions/{session['id']}/calls", json=body, headers=SSE) as stream:
        got = await events(stream)
    exact = [base64.b64decode(data["base64"]) for name, _, data in got if name == "output"]
    assert b"".join(exact) == b"\xff\xfe"


async def test_post_hook_without_a_filter_hides_the_stream(tmp_path: Any, state_dir: Any) -> None:
    """Nothing leaves before a post hook has seen it: progress instead of output, unless the profile says raw."""
    (tmp_path / "hides_output.py").write_text(
        "from gateway.hooks.hook import Continue, Hook\n"
        "class Looks(Hook):\n"
        "    async def post_tool_call(self, ctx, result): return Continue()\n"
    )
    profiles = {"default": {}, "raw": {"stream": "raw"}}
    async with served(
        state_dir,
        tmp_path,
        hooks=[{"use": "hides_output:Looks"}],
        profiles=profiles,
        agent={"profiles": ["default", "raw"]},
    ) as server:
        names = {}
        for profile in profiles:
            session = await server.session(profile=profile)
            body = {"tool": "bash", "arguments": {"command": "echo secret"}}
            url = f"/v1/sessions/{session['id']}/calls"
            async with server.agent.stream("POST", url, json=body, headers=SSE) as stream:
                names[profile] = [name for name, _, _ in await events(stream)]
    assert "output" not in names["default"]
    assert "progress" in names["default"]
    assert "output" in names["raw"]


async def test_last_event_id_of_a_stranger_is_refused(server: Served) -> None:
    session = await server.session()
    headers = {**SSE, "last-event-id": "17"}
    answer = await server.agent.post(f"/v1/sessions/{session['id']}/calls", json={"tool": "ls"}, headers=headers)
    assert answer.status_code == 422


async def test_database_has_one_row_a_call(gateway: Gateway, state_dir: Any) -> None:
    """I3: exactly one accepted and one terminal record, whatever the end."""
    session = await opened(gateway)
    await asyncio.gather(*(called(gateway, session, "bash", command=f"exit {number % 3}") for number in range(20)))
    rows = (
        sqlite3.connect(state_dir / "sandgate.db")
        .execute("SELECT COUNT(*), COUNT(finished), COUNT(DISTINCT sequence) FROM calls")
        .fetchone()
    )
    assert rows == (20, 20, 20)


def fill(gateway: Gateway) -> None:
    """Let the database grow no further: SQLite then says what it says on a full disk."""
    pages = gateway.journal._writer.execute("PRAGMA page_count").fetchone()[0]
    gateway.journal._writer.execute(f"PRAGMA max_page_count={pages}")


async def test_nothing_runs_that_cannot_be_recorded(gateway: Gateway) -> None:
    """I8: no accepted record, no call."""
    session = await opened(gateway)
    await called(gateway, session, "bash", command="true")
    fill(gateway)
    with pytest.raises(Unavailable, match="journal cannot be written"):
        await called(gateway, session, "bash", command=f"touch ran; # {'x' * 20_000}")
    sandbox = await session.sandbox()
    assert (await sandbox.list()).entries == ()
    assert session.running == {}


async def test_end_that_cannot_be_recorded_is_no_success(gateway: Gateway) -> None:
    """I3, I6: without a terminal record the answer is not ok, and the gateway goes on."""
    session = await opened(gateway)
    active = await gateway.start_call(session, CallRequest(tool="bash", arguments={"command": "sleep 0.3; echo hi"}))
    gateway.journal._writer.execute("PRAGMA query_only=ON")
    result = await active.wait()
    assert (result.status, result.content) == ("disk", ())
    gateway.journal._writer.execute("PRAGMA query_only=OFF")
    assert (await called(gateway, session, "bash", command="echo again")).text == "again"
