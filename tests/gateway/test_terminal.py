"""A session's terminal over real WebSockets: who gets one, who comes back, and how it ends."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from gateway.client import Client, ConnectionLost, Refused, Session
from gateway.client.terminal import Terminal
from gateway.terminals import BACKLOG_BYTES
from gateway.transports.http import terminal as route
from sandboxes.conformance import host_processes
from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]
KINDS = [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("local", "docker")]
local = pytest.mark.needs("local")


@asynccontextmanager
async def attached(server: Served, *, role: str = "agent", **request: Any) -> AsyncIterator[Session]:
    """A session of the agent's, as the client of that role sees it; closed at the end."""
    opened = await server.session(**request)
    token = getattr(server, role).headers["authorization"].removeprefix("Bearer ")
    async with Client(server.url, token) as client:
        session = await client.attach(opened["id"])
        yield session
        await session.close()


async def until(terminal: Terminal, text: bytes) -> bytes:
    """What it shows until it shows that."""
    shown = b""
    with anyio.move_on_after(60):
        async for data in terminal:
            shown += data
            if text in shown:
                return shown
    raise AssertionError(shown)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_terminal_from_its_start_to_its_end(state_dir: Path, kind: str) -> None:
    async with served(state_dir, profiles={"default": {"kind": kind}}) as server, attached(server) as session:
        async with session.terminal(100, 30) as terminal:
            await terminal.send(b"stty size; echo in $PWD with $TERM\n")
            assert b"\r30 100\r\n" in await until(terminal, b"in /workspace with xterm-256color")
            await terminal.resize(50, 20)
            await terminal.send(b"stty size\n")
            await until(terminal, b"20 50\r\n")
            await terminal.send(b"exit 7\n")
            async for _ in terminal:
                pass
            assert terminal.end is not None
            assert (terminal.end.how, terminal.end.code, terminal.replaced) == ("exit", 7, False)
        async with session.terminal() as again:
            await again.send(b"echo new $((20 + 2))\n")
            await until(again, b"new 22")


@local
async def test_who_comes_back_gets_what_was_shown_lately(server: Served) -> None:
    """The shell runs on without a reader, and what is kept for the next has a bound."""
    async with attached(server) as session:
        async with session.terminal() as terminal:
            await terminal.send(b"read x; seq 200000; touch done; echo the end\n")
            await until(terminal, b"read x")
            await terminal.send(b"\n")
        with anyio.fail_after(30):
            while not any(entry.path == "done" for entry in (await session.files()).entries):
                await anyio.sleep(0.05)
        async with session.terminal() as terminal:
            shown = await until(terminal, b"\r\nthe end")
            assert b"\r\n200000\r\n" in shown
            assert len(shown) <= BACKLOG_BYTES + 4096
            assert shown.split(b"\r\n")[0].isdigit()


@local
async def test_a_second_reader_takes_the_place_of_the_first(server: Served) -> None:
    async with attached(server) as session, session.terminal() as first:
        await first.send(b"echo a$((1))b\n")
        await until(first, b"a1b")
        async with session.terminal() as second:
            await until(second, b"a1b")
            async for _ in first:
                pass
            assert (first.replaced, first.end) == (True, None)
            await second.send(b"echo a$((2))b\n")
            await until(second, b"a2b")


@local
async def test_a_flood_slows_down_to_its_reader(server: Served) -> None:
    """A19: a reader that does not read holds the program, not the gateway."""
    async with attached(server) as session, session.terminal() as terminal:
        await terminal.send(b"yes\n")
        await until(terminal, b"y\r\n" * 100)
        with anyio.fail_after(30):
            assert (await session.call("bash", {"command": "echo on"})).text == "on"
        await terminal.send(b"\x03")
        await terminal.send(b"echo a$((3))b\n")
        await until(terminal, b"a3b")


@local
async def test_closing_a_session_ends_its_terminal(server: Served) -> None:
    async with attached(server) as session, session.terminal() as terminal:
        await terminal.send(b"setsid sleep 300.211 & sleep 300.211\n")
        with anyio.fail_after(30):
            while not host_processes("300.211", below=0):
                await anyio.sleep(0.05)
        report = await session.close()
        assert (report.failed, host_processes("300.211", below=0)) == ((), [])
        with anyio.fail_after(30), pytest.raises(ConnectionLost):
            async for _ in terminal:
                pass


@local
async def test_a_terminal_that_is_looked_at_keeps_its_session(state_dir: Path) -> None:
    """R40, R41: in use it does not expire; left, it does."""
    async with served(state_dir, profiles={"default": {"idle_seconds": 1}}) as server, attached(server) as session:
        async with session.terminal() as terminal:
            await until(terminal, b"$")
            await anyio.sleep(3.5)
            assert (await session.record()).state == "open"
        with anyio.fail_after(30):
            while (await session.record()).state != "expired":
                await anyio.sleep(0.1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_terminal_ends_with_its_gateway(state_dir: Path, kind: str) -> None:
    """Also where the sandbox goes on; its session has another one in the next life."""
    profiles = {"default": {"kind": kind}}
    async with served(state_dir, profiles=profiles) as server:
        session = await server.session()
        client = Client(server.url, session["token"])
        terminal = (await client.attach(session["id"])).terminal()
        await terminal.__aenter__()
        await terminal.send(b"sleep 300.212\n")
        await until(terminal, b"sleep 300.212")
    with anyio.fail_after(30), pytest.raises(ConnectionLost):
        async for _ in terminal:
            pass
    await terminal.__aexit__()
    await client.aclose()
    assert host_processes("300.212", below=0) == []
    async with served(state_dir, profiles=profiles) as server, Client(server.url, session["token"]) as client:
        again = await client.attach(session["id"])
        async with again.terminal() as terminal:
            await terminal.send(b"echo a$((5))b\n")
            assert b"300.212" not in await until(terminal, b"a5b")
        await again.close()


# --- who may

UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def url(server: Served, path: str, **query: str) -> str:
    return f"{server.url.replace('http', 'ws', 1)}{path}?{'&'.join(f'{key}={value}' for key, value in query.items())}"


async def refused(where: str, **headers: str) -> tuple[int, str]:
    """The status and code with which a handshake is refused."""
    with pytest.raises(InvalidStatus) as error:
        await connect(where, additional_headers=headers, proxy=None)
    body = json.loads(error.value.response.body or b"{}")
    return error.value.response.status_code, body.get("code", "")


async def ticket(server: Served, session: dict[str, Any]) -> dict[str, Any]:
    answer = await server.agent.post(f"/v1/sessions/{session['id']}/terminal")
    assert answer.status_code == 201, answer.text
    given: dict[str, Any] = answer.json()
    return given


async def greets(connection: ClientConnection) -> bool:
    async with connection:
        await connection.send(b"echo a$((4))b\n")
        shown = b""
        with anyio.fail_after(30):
            while b"a4b" not in shown:
                data = await connection.recv()
                assert isinstance(data, bytes)
                shown += data
    return True


@local
async def test_a_ticket_opens_one_terminal_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A46: as a page would, with its Origin and without a header; used, late, elsewhere or forged it opens nothing."""
    session, other = await server.session(), await server.session()
    given = await ticket(server, session)
    place = url(server, given["path"], ticket=given["ticket"])
    assert await greets(await connect(place, origin=server.url, proxy=None))  # type: ignore[arg-type]
    assert await refused(place) == (401, "unauthorized")
    elsewhere = await ticket(server, session)
    there = url(server, f"/v1/sessions/{other['id']}/terminal", ticket=elsewhere["ticket"])
    assert await refused(there) == (401, "unauthorized")
    assert await refused(url(server, elsewhere["path"], ticket=elsewhere["ticket"])) == (401, "unauthorized")
    monkeypatch.setattr(route, "TICKET_SECONDS", 0.0)
    late = await ticket(server, session)
    assert await refused(url(server, late["path"], ticket=late["ticket"])) == (401, "unauthorized")


@local
async def test_a_token_in_the_url_opens_nothing(server: Served) -> None:
    session = await server.session()
    path = f"/v1/sessions/{session['id']}/terminal"
    for name in ("token", "access_token", "ticket", "authorization"):
        assert await refused(url(server, path, **{name: session["token"]})) == (401, "unauthorized")
    assert await refused(url(server, path)) == (401, "unauthorized")
    answer = await server.anonymous.post(f"{path}?token={session['token']}")
    assert answer.status_code == 401


@local
async def test_foreign_sessions_hosts_and_origins_are_refused_before_the_handshake(server: Served) -> None:
    """A39, A47, A50, K46."""
    session, other = await server.session(), await server.session()
    path = f"/v1/sessions/{session['id']}/terminal"
    bearer = {"authorization": f"Bearer {session['token']}"}
    foreign = {"authorization": f"Bearer {other['token']}"}
    assert await refused(url(server, path), **foreign) == (404, "not_found")
    assert await refused(url(server, "/v1/sessions/s-0/terminal"), **foreign) == (404, "not_found")
    for origin in ("http://evil.example", "null", f"{server.url}.evil.example"):
        assert await refused(url(server, path), **bearer, origin=origin) == (403, "foreign_origin")
    async with await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2])) as stream:
        head = f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nAuthorization: {bearer['authorization']}\r\n{UPGRADE}\r\n"
        await stream.send(head.encode())
        assert (await stream.receive()).startswith(b"HTTP/1.1 421 ")
    async with server.client(other["token"]) as stranger:
        assert (await stranger.post(path)).status_code == 404
    await server.agent.delete(f"/v1/sessions/{session['id']}")
    assert await refused(url(server, path), **bearer) == (404, "session_closed")


@local
@pytest.mark.parametrize(
    ("sections", "request_"),
    [
        ({"hooks": [{"use": "terminal_hooks:Watch", "tools": ["bash"]}]}, {}),
        ({}, {"tools": ["read_file"]}),
        ({}, {"permission": "deny"}),
        ({}, {"permission": {"rules": [{"tools": ["ba*"], "otherwise": "deny"}]}}),
        ({}, {"permission": {"rules": [{"tools": ["bash"], "deny": ["git push *"]}]}}),
        ({}, {"permission": "ask"}),
    ],
)
async def test_a_terminal_is_no_way_around_hooks_and_rules(
    tmp_path: Path, state_dir: Path, sections: dict[str, Any], request_: dict[str, Any]
) -> None:
    """What is typed passes none of them: so only the operator may."""
    (tmp_path / "terminal_hooks.py").write_text(
        "from gateway.hooks.hook import Continue, Hook\n\n"
        "class Watch(Hook):\n    async def pre_tool_call(self, ctx, call):\n        return Continue()\n"
    )
    async with served(state_dir, tmp_path, **sections) as server:
        async with attached(server, **request_) as session:
            with pytest.raises(Refused) as error:
                async with session.terminal():
                    pass
            assert error.value.status == 403
            assert "operator" in error.value.remedy
            with pytest.raises(Refused):
                await session.terminal_ticket()
        async with attached(server, role="operator", **request_) as session, session.terminal() as terminal:
            await until(terminal, b"$")


async def test_kinds_without_terminals_refuse_them_and_name_what_works(state_dir: Path) -> None:
    profiles = {"default": {"kind": "virtual"}, "bare": {"kind": "none"}}
    async with served(state_dir, profiles=profiles, agent={"profiles": ["default", "bare"]}) as server:
        for profile in profiles:
            async with attached(server, profile=profile) as session:
                with pytest.raises(Refused) as error:
                    async with session.terminal():
                        pass
                assert (error.value.status, error.value.code) == (422, "unsupported_tool")
                assert "local or docker" in error.value.remedy


@local
@pytest.mark.parametrize("text", ["", "{}", '{"type": "resize"}', '{"type":"resize","columns":0,"rows":5}', "[" * 5000])
async def test_nonsense_ends_the_connection_and_not_the_terminal(server: Served, text: str) -> None:
    """A56."""
    session = await server.session()
    where = url(server, f"/v1/sessions/{session['id']}/terminal")
    headers = {"authorization": f"Bearer {session['token']}"}
    async with connect(where, additional_headers=headers, proxy=None) as connection:
        await connection.send(text)
        with anyio.fail_after(30):
            with suppress(ConnectionClosedError):
                async for _ in connection:
                    pass
        assert connection.close_code == 1003
    assert await greets(await connect(where, additional_headers=headers, proxy=None))


@local
@pytest.mark.parametrize("query", [{"columns": "0"}, {"columns": "1001"}, {"rows": "x"}, {"rows": "-1"}])
async def test_a_size_that_is_none_is_refused(server: Served, query: dict[str, str]) -> None:
    session = await server.session()
    where = url(server, f"/v1/sessions/{session['id']}/terminal", **query)
    status, _ = await refused(where, authorization=f"Bearer {session['token']}")
    assert 400 <= status < 500
