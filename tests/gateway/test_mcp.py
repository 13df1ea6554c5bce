"""The gateway over MCP, with the SDK's own client, in both protocol eras."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp_types
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from gateway.errors import Problem
from gateway.transports.mcp import http as mcp_http
from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

ERAS = ("legacy", "auto")
OLD, NEW = "2025-11-25", "2026-07-28"


@asynccontextmanager
async def speaking(server: Served, token: str, mode: Any = "auto", path: str = "/mcp") -> AsyncIterator[Client]:
    """An MCP client of that token; `legacy` speaks 2025-11-25, `auto` 2026-07-28."""
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as http,
        Client(streamable_http_client(server.url + path, http_client=http), mode=mode) as client,
    ):
        yield client


def agent_token(server: Served) -> str:
    return server.agent.headers["authorization"].removeprefix("Bearer ")


def texts(result: mcp_types.CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, mcp_types.TextContent))


@pytest.mark.parametrize("mode", ERAS)
async def test_a_session_token_reaches_its_session(server: Served, mode: str) -> None:
    """Gotchas 2, 3, 14, 18: the session follows from the token; tools are the session's own, in a stable order."""
    opened = await server.session(tools=["bash", "read_file"])
    async with speaking(server, opened["token"], mode) as client:
        assert client.protocol_version == (OLD if mode == "legacy" else NEW)
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["bash", "read_file"]
        assert all(tool.description for tool in tools)
        assert tools[1].annotations is not None
        assert tools[1].annotations.read_only_hint is True
        result = await client.call_tool("bash", {"command": "pwd; echo out >&2; exit 3"})
        assert (result.is_error, result.structured_content) == (False, {"status": "exit", "exit_code": 3})
        assert texts(result) == "/workspace\nout\nexit code 3"
        foreign = await client.call_tool("write_file", {"file_path": "x", "content": "y"})
        assert foreign.is_error
        assert "no such tool: write_file" in texts(foreign)
    calls = (await server.agent.get(f"/v1/sessions/{opened['id']}/calls")).json()["calls"]
    assert [(one["tool"], one["status"]) for one in calls] == [("bash", "exit"), ("write_file", "invalid")]


@pytest.mark.parametrize("mode", ERAS)
async def test_the_agents_token_gets_a_session_by_itself(server: Served, mode: str) -> None:
    async with speaking(server, agent_token(server), mode) as client:
        assert texts(await client.call_tool("bash", {"command": "echo 1 > kept"})) == ""
    async with speaking(server, agent_token(server), mode) as client:
        assert texts(await client.call_tool("bash", {"command": "cat kept"})) == "1"
    [session] = (await server.agent.get("/v1/sessions")).json()["sessions"]
    assert session["labels"] == mcp_http.AUTO_LABEL
    await server.agent.delete(f"/v1/sessions/{session['id']}")
    async with speaking(server, agent_token(server), mode) as client:
        assert "No such file" in texts(await client.call_tool("bash", {"command": "cat kept"}))


async def test_the_agents_token_gets_none_where_the_operator_says_so(state_dir: Any) -> None:
    async with served(state_dir, mcp={"auto_session": False}) as server:
        answer = await server.agent.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        opened = await server.session()
        path = f"/v1/sessions/{opened['id']}/mcp"
        async with speaking(server, agent_token(server), path=path) as client:
            assert texts(await client.call_tool("bash", {"command": "echo hi"})) == "hi"


@pytest.mark.parametrize("mode", ERAS)
async def test_progress_tells_what_a_program_prints(server: Served, mode: str) -> None:
    opened = await server.session()
    told: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    script = "echo first; sleep 1; printf 'a\\033[31mb\\n'; sleep 1"
    async with speaking(server, opened["token"], mode) as client:
        result = await client.call_tool("bash", {"command": script}, progress_callback=hear)
    assert not result.is_error
    assert [message for _, message in told][:2] == ["first\n", "a\\x1b[31mb\n"]
    assert [at for at, _ in told] == sorted({at for at, _ in told})


@pytest.mark.parametrize("mode", ERAS)
async def test_a_call_ends_when_its_client_cancels(server: Served, mode: str) -> None:
    """Gotchas 5, 10: also where no progress was asked for."""
    opened = await server.session()
    session = next(iter(server.gateway.sessions))
    async with speaking(server, opened["token"], mode) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "bash", {"command": "sleep 300.17"})
            with anyio.fail_after(20):
                while not session.running or not session.sandbox_alive:
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20):
            while session.running:
                await anyio.sleep(0.02)
    calls = (await server.agent.get(f"/v1/sessions/{opened['id']}/calls")).json()["calls"]
    assert [one["status"] for one in calls] == ["cancelled"]


@pytest.mark.parametrize("mode", ERAS)
async def test_a_large_result_is_a_link_that_can_be_read_in_parts(server: Served, mode: str) -> None:
    """Gotcha 6, R71: below the 1 MiB of an event, whatever the size."""
    opened = await server.session()
    async with speaking(server, opened["token"], mode) as client:
        result = await client.call_tool("bash", {"command": "seq 1 2000000"})
        [link] = [block for block in result.content if isinstance(block, mcp_types.ResourceLink)]
        assert (link.size, link.mime_type) == (14_888_896, "text/plain; charset=utf-8")
        assert len(texts(result)) < 5000
        assert [one.uri for one in (await client.list_resources()).resources] == [link.uri]
        patterns = [one.uri_template for one in (await client.list_resource_templates()).resource_templates]
        assert patterns[0] == f"sandgate://{opened['id']}/results/{{+key}}{{?offset,limit,lines,grep}}"
        for query, text in (("lines=5-6", "5\n6"), ("offset=2&limit=4", "2\n3\n"), ("grep=^199999.$", None)):
            [part] = (await client.read_resource(f"{link.uri}?{query}")).contents
            assert isinstance(part, mcp_types.TextResourceContents)
            assert part.text == text if text is not None else len(part.text.splitlines()) == 10
        [page] = (await client.read_resource(link.uri)).contents
        assert isinstance(page, mcp_types.TextResourceContents)
        assert page.text.startswith("1\n2\n")
        assert len(page.text) == 128 * 1024
        long = await client.call_tool("python", {"code": "print('\\x01' * 25000)"})
        assert len(texts(long)) == 25000


@pytest.mark.parametrize("mode", ERAS)
async def test_an_image_is_an_image(server: Served, mode: str) -> None:
    """R75: a block of its own kind, with a word about it for models that see none."""
    opened = await server.session()
    async with speaking(server, opened["token"], mode) as client:
        await client.call_tool("bash", {"command": "printf GIF89a > a"})
        result = await client.call_tool("read_file", {"file_path": "a"})
    text, image = result.content
    assert isinstance(text, mcp_types.TextContent)
    assert isinstance(image, mcp_types.ImageContent)
    assert (text.text, image.mime_type) == ("[image: 6 bytes of image/gif]", "image/gif")
    assert base64.b64decode(image.data) == b"GIF89a"


@pytest.mark.parametrize("mode", ERAS)
async def test_a_file_is_a_resource_and_anothers_is_not_found(server: Served, mode: str) -> None:
    """A39: foreign, forged and absent are the same; what is wrong with a parameter is told."""
    opened, other = await server.session(), await server.session()
    async with speaking(server, opened["token"], mode) as client:
        await client.call_tool("bash", {"command": "printf '\\x00\\x01' > 'a b.bin'"})
        [content] = (await client.read_resource(f"sandgate://{opened['id']}/workspace/a%20b.bin")).contents
        assert isinstance(content, mcp_types.BlobResourceContents)
        assert base64.b64decode(content.blob) == b"\0\1"
        refusals = set()
        for uri in (
            f"sandgate://{other['id']}/results/x",
            f"sandgate://{opened['id']}/nothing/x",
            "file:///etc/passwd",
            "sandgate://[/x",
        ):
            with pytest.raises(MCPError) as refused:
                await client.read_resource(uri)
            refusals.add((refused.value.error.code, refused.value.error.message.partition(".")[0]))
        assert refusals == {(-32602, "no such resource")}
        for uri in (f"sandgate://{opened['id']}/workspace/../../etc/passwd", f"sandgate://{opened['id']}/workspace/no"):
            with pytest.raises(MCPError, match="cannot be read"):
                await client.read_resource(uri)
        with pytest.raises(MCPError, match="offset: not a number"):
            await client.read_resource(f"sandgate://{opened['id']}/workspace/x?offset=-1")


async def test_a_strangers_connection_is_not_found(server: Served) -> None:
    """A49: with the id of another's connection, and on another's session, each method answers 404."""
    opened, other = await server.session(), await server.session()
    initialize = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }
    accept = {"accept": "application/json, text/event-stream"}
    async with server.client(opened["token"]) as owner, server.client(other["token"]) as stranger:
        begun = await owner.post("/mcp", json=initialize, headers=accept)
        assert begun.status_code == 200
        known = {**accept, "mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": OLD}
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        for path in ("/mcp", f"/v1/sessions/{opened['id']}/mcp"):
            assert (await stranger.post(path, json=listing, headers=known)).status_code == 404
            assert (await stranger.get(path, headers=known)).status_code == 404
            assert (await stranger.delete(path, headers=known)).status_code == 404
        assert (await owner.post("/mcp", json=listing, headers=known)).status_code == 200
        for client in (server.operator, server.agent):  # may see the session, and do not own the connection
            answer = await client.post(f"/v1/sessions/{opened['id']}/mcp", json=listing, headers=known)
            assert answer.status_code == 404
        assert (await owner.delete("/mcp", headers=known)).status_code == 200
        assert (await owner.post("/mcp", json=listing, headers=known)).status_code == 404


@pytest.mark.parametrize("mode", ERAS)
async def test_no_exception_text_leaves(server: Served, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gotcha 1: not in the older era either, where the SDK would send it."""
    opened = await server.session()

    async def fail(*_: object) -> None:
        raise RuntimeError("secret path /etc/x")

    async with speaking(server, opened["token"], mode) as client:
        monkeypatch.setattr(type(server.gateway.journal), "results", fail)
        with pytest.raises(MCPError) as refused:
            await client.list_resources()
        assert (refused.value.error.code, refused.value.error.message) == (
            -32603,
            "the gateway failed; its log has the reason",
        )


@pytest.mark.parametrize("mode", ERAS)
async def test_a_closed_session_says_so(server: Served, mode: str) -> None:
    opened = await server.session()
    async with speaking(server, opened["token"], mode) as client:
        await client.call_tool("bash", {"command": "seq 1 100000"})
        await server.agent.delete(f"/v1/sessions/{opened['id']}")
        result = await client.call_tool("bash", {"command": "echo hi"})
        assert result.is_error
        assert "closed" in texts(result)
        [stored] = (await client.list_resources()).resources
        assert (await client.read_resource(f"{stored.uri}?lines=1-1")).contents


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "no/such"}', 200),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": ""}}', 200),
        (b"x" * (5 << 20), 413),
    ],
)
async def test_bad_requests_are_answered(server: Served, body: bytes, status: int) -> None:
    """Gotcha 7 and malformed JSON-RPC: a typed answer, and the next request is served."""
    opened = await server.session()
    headers = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": OLD,
    }
    initialize = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }
    async with server.client(opened["token"]) as client:
        begun = await client.post("/mcp", json=initialize, headers=headers)
        headers["mcp-session-id"] = begun.headers["mcp-session-id"]
        answer = await client.post("/mcp", content=body, headers=headers)
        assert answer.status_code == status
        assert "Traceback" not in answer.text
        ping = await client.post("/mcp", json={"jsonrpc": "2.0", "id": 9, "method": "ping"}, headers=headers)
        assert ping.status_code == 200


async def test_hosts_and_origins_are_checked(server: Served) -> None:
    """Gotcha 4: the guard of all routes stands before MCP as well."""
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert (await server.agent.post("/mcp", json=ping, headers={"host": "evil.example"})).status_code == 421
    assert (await server.agent.post("/mcp", json=ping, headers={"origin": "http://evil.example"})).status_code == 403
    assert (await server.anonymous.post("/mcp", json=ping)).status_code == 401


def test_problems_are_errors_without_more_than_their_words() -> None:
    from gateway.transports.mcp import answers

    error = answers.error(Problem("no\x1b[0m", "try"))
    assert (error.error.code, error.error.message) == (-32603, "no\\x1b[0m. try")
