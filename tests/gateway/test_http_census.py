"""Every route and method that the application has, generated from it: none without a token, none for a stranger."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
from fastapi.routing import iter_route_contexts

from gateway.build import State, tokens_of
from gateway.transports.http.app import create_app
from gateway.transports.http.calls import Direct
from gateway.transports.http.guard import OPEN_PATHS, SIGNED_PATH, App, Guard
from gateway.transports.http.mcp import McpRoute
from tests.gateway.conftest import Served, settings_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")


def app_of(server: Served) -> App:
    tokens, settings = tokens_of(State(server.state_dir, "census", -1)), settings_of()
    return create_app(server.gateway, tokens, settings, 1, McpRoute(server.gateway, settings))


def routes(server: Served) -> dict[str, set[str]]:
    """Each path of the application, as it is written there, and its methods."""
    guard = app_of(server)
    assert isinstance(guard, Guard)
    assert isinstance(guard.app, Direct)
    found: dict[str, set[str]] = {}
    for context in iter_route_contexts(guard.app.app.routes):
        assert context.path is not None
        found.setdefault(context.path, set()).update(context.methods or ())
    return found


def filled(path: str, names: Mapping[str, str]) -> str:
    """A path with the ids of something that exists."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: names.get(found[1], "x"), path)


async def test_the_census_sees_the_whole_application(server: Served) -> None:
    """A46: the list is not empty by mistake."""
    found = routes(server)
    assert {
        "/healthz",
        "/readyz",
        "/openapi.json",
        "/v1/sessions",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/calls",
        "/v1/sessions/{session_id}/results/{key:path}",
        "/v1/sessions/{session_id}/files/{path:exact}",
    } <= set(found)
    assert found["/v1/sessions"] >= {"GET", "POST"}


@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream"}, {"authorization": "Bearer wrong"}])
async def test_no_route_answers_without_a_token(server: Served, headers: dict[str, str]) -> None:
    """A46: 401 for every route and every method, also for methods and paths that are not there; health is open, and
    a signed URL is its own token."""
    session = await server.session()
    seen = {}
    for path in [
        *routes(server),
        "/",
        "/nothing",
        "/docs",
        "/redoc",
        "/v1",
        "/mcp",
        "/metrics",
        "/healthz/",
        "//healthz",
        "/healthz/../v1/sessions",
        "/v1/sessions/",
        "/readyz/x",
    ]:
        for method in METHODS[:-3]:
            target = filled(path, {"session_id": session["id"]})
            answer = await server.anonymous.request(method, target, headers=headers)
            seen[method, path] = answer.status_code
    open_answers = {one: code for one, code in seen.items() if code != 401}
    assert {path for _, path in open_answers} == OPEN_PATHS | {f"{SIGNED_PATH}{{token}}"}
    assert {method for (method, _), code in open_answers.items() if code == 200} == {"GET"}
    assert (await server.agent.get(f"/v1/sessions/{session['id']}")).json()["state"] == "open"


async def test_no_odd_method_answers_without_a_token(server: Served) -> None:
    """A46: methods that clients do not send by themselves."""
    for method in METHODS[-3:]:
        answer = await _raw(server, f"{method} /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert answer.split(b" ")[1] in (b"400", b"401")


async def test_only_the_terminal_takes_a_websocket(server: Served) -> None:
    """A46, K48: a handshake is answered 101 nowhere else; without a token it is 401 on every route."""
    session = await server.session()
    token = server.agent.headers["authorization"]
    seen, with_token = {}, {}
    for path in routes(server):
        target = filled(path, {"session_id": session["id"]})
        start = (
            f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        seen[path] = (await _raw(server, f"{start}\r\n")).split(b" ")[1]
        with_token[path] = (await _raw(server, f"{start}Authorization: {token}\r\n\r\n")).split(b" ")[1]
    assert set(seen.values()) == {b"401"}
    assert [path for path, code in with_token.items() if code == b"101"] == ["/v1/sessions/{session_id}/terminal"]


async def test_a_websocket_scope_is_refused_by_the_guard(server: Served) -> None:
    """A46: before any route without a token; with one it is closed where no route takes it."""
    guard = app_of(server)
    authorized = [(b"authorization", server.agent.headers["authorization"].encode())]
    for headers, refused in (([], "websocket.http.response.start"), (authorized, "websocket.close")):
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await guard(
            {"type": "websocket", "path": "/v1/sessions", "headers": [(b"host", b"localhost"), *headers]}, receive, send
        )
        assert sent[0]["type"] == refused
        assert "websocket.accept" not in {one["type"] for one in sent}


async def _raw(server: Served, request: str) -> bytes:
    answer = b""
    async with await anyio.connect_tcp("127.0.0.1", urlsplit(server.url).port or 80) as stream:
        await stream.send(request.encode())
        with anyio.move_on_after(5), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while b"\r\n" not in answer:
                answer += await stream.receive()
    return answer


async def _life(server: Served) -> tuple[dict[str, Any], dict[str, str]]:
    """A session with one of everything, and the names of that."""
    session = await server.session(seed=[{"path": "secret.txt", "text": "canary of A"}])
    result = await server.call(session, "bash", command="seq 1 20000")
    key = result["references"][0]["reference"].rpartition("/")[2]
    return session, {"call_id": result["id"], "key": key, "path": "secret.txt"}


async def _asked(
    client: httpx2.AsyncClient, found: dict[str, set[str]], session_id: str, names: dict[str, str]
) -> dict[tuple[str, str], tuple[int, str]]:
    answers = {}
    for path, method in _of_a_session(found):
        json = {"tool": "bash", "arguments": {"command": "echo x > secret.txt"}} if method == "POST" else None
        for accept in ("*/*", "text/event-stream", "application/x-tar"):
            answer = await client.request(
                method, filled(path, {**names, "session_id": session_id}), json=json, headers={"accept": accept}
            )
            answers[f"{method} {path}", accept] = (answer.status_code, answer.text)
    return answers


def _of_a_session(found: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    for path, methods in found.items():
        if "{session_id}" in path:
            yield from ((path, method) for method in sorted(methods))


async def test_a_stranger_finds_nothing_of_another_session(server: Served) -> None:
    """A50, A39: B's session token walks every route with A's ids: the same 404, to the byte, as for a session that
    never was; and A has lost nothing."""
    found = routes(server)
    session, names = await _life(server)
    other = await server.session()
    async with server.client(other["token"]) as stranger:
        foreign = await _asked(stranger, found, session["id"], names)
        absent = await _asked(stranger, found, f"s-{'0' * 32}", names)
    assert {code for code, _ in foreign.values()} == {404}
    assert foreign == absent
    assert len(foreign) >= 30
    kept = await server.agent.get(f"/v1/sessions/{session['id']}/files/secret.txt")
    assert kept.text == "canary of A"
    assert (await server.agent.get(f"/v1/sessions/{session['id']}")).json()["calls"] == 1


async def test_the_agent_finds_nothing_of_the_operators_session(server: Served) -> None:
    """A50: the same for a session that the operator opened, asked for with the agent's token."""
    found = routes(server)
    theirs = (await server.operator.post("/v1/sessions", json={"seed": [{"path": "secret.txt", "text": "x"}]})).json()
    names = {"call_id": "c-0001", "key": "0001-bash-stdout", "path": "secret.txt"}
    foreign = await _asked(server.agent, found, theirs["id"], names)
    absent = await _asked(server.agent, found, f"s-{'0' * 32}", names)
    assert {code for code, _ in foreign.values()} == {404}
    assert foreign == absent
