"""MCP over standard input and output: for a gateway in this process, or as a bridge to one that runs."""

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import httpx2
import mcp_types as mcp
from mcp.client.streamable_http import streamable_http_client
from mcp.server.stdio import stdio_server
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
)
from mcp.shared.message import ClientMessageMetadata, SessionMessage

from gateway.gateway import Gateway
from gateway.models import SessionRequest
from gateway.principals import Principal
from gateway.transports.mcp.server import Asker, build_server

AGENT: Final = Principal("agent")
LABELS: Final = {"client": "sandgate mcp"}
NO_READ_LIMIT: Final = httpx2.Timeout(30, read=None)
"""A call has its own limit, which the gateway keeps."""
LINE_BYTES: Final = 8 << 20
"""Of one message; what is larger should be written to a file."""


async def serve_stdio(gateway: Gateway, profile: str | None) -> None:
    """Open a session, speak until the client ends its input, close the session."""
    async with _session(gateway, profile) as asker:
        server = build_server(gateway, lambda ctx: asker)
        async with _standard_streams() as (received, sent):
            await server.run(received, sent, server.create_initialization_options())


@asynccontextmanager
async def _session(gateway: Gateway, profile: str | None) -> AsyncIterator[Asker]:
    """A session of this process; also what an earlier one left open, because it was killed, is closed here."""
    for left in list(gateway.sessions.open):
        await gateway.close_session(left, reason="its process was killed")
    name = profile or gateway.profiles.first_granted(AGENT)
    opened = await gateway.open_session(AGENT, SessionRequest(profile=name, labels=LABELS))
    session = gateway.sessions.find(AGENT, opened.id)
    try:
        yield Asker(AGENT, session)
    finally:
        with anyio.CancelScope(shield=True):
            await gateway.close_session(session)


@asynccontextmanager
async def _standard_streams() -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's streams, but over an input that a signal can interrupt: its own reader waits in a thread."""
    lines = Lines(os.dup(0))
    try:
        async with stdio_server(stdin=lines) as streams:  # type: ignore[arg-type]  # it only iterates over lines
            yield streams
    finally:
        lines.close()


class Lines:
    """The lines of a descriptor, which is closed with it. One over LINE_BYTES ends them: no message is so long."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def __aiter__(self) -> "Lines":
        return self

    async def __anext__(self) -> str:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            data = await self._read() if searched <= LINE_BYTES else b""
            if not data:
                raise StopAsyncIteration
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.decode(errors="replace")

    async def _read(self) -> bytes:
        with contextlib.suppress(PermissionError):  # a file is always ready, and cannot be waited for
            await anyio.wait_readable(self._fd)
        return os.read(self._fd, 1 << 16)

    def close(self) -> None:
        os.close(self._fd)


async def bridge(url: str, token: str) -> None:
    """Pass messages between standard input and output and an MCP endpoint, until the client ends its input."""
    version = ""

    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=NO_READ_LIMIT) as http,
        streamable_http_client(url, http_client=http) as (answers, requests),
        _standard_streams() as (received, sent),
        anyio.create_task_group() as tasks,
    ):

        async def back() -> None:
            nonlocal version
            async for answer in answers:
                if isinstance(answer, Exception):
                    continue  # a broken stream; the requests on it get errors of their own
                version = version or _negotiated(answer.message)
                await sent.send(answer)
            tasks.cancel_scope.cancel()

        tasks.start_soon(back)
        async for request in received:
            if not isinstance(request, Exception):
                metadata = ClientMessageMetadata(headers=_headers(request.message, version))
                await requests.send(SessionMessage(request.message, metadata))
        tasks.cancel_scope.cancel()


def _negotiated(message: mcp.JSONRPCMessage) -> str:
    """The version that an answer to `initialize` names; 2026-07-28 has none, as each request says it."""
    found = message.result.get("protocolVersion") if isinstance(message, mcp.JSONRPCResponse) else None
    return found if isinstance(found, str) else ""


def _headers(message: mcp.JSONRPCMessage, version: str) -> dict[str, str]:
    """The headers of 2026-07-28, which repeat what is in the body, or the version that was negotiated before."""
    if not isinstance(message, mcp.JSONRPCRequest | mcp.JSONRPCNotification):
        return {MCP_PROTOCOL_VERSION_HEADER: version} if version else {}
    params = message.params or {}
    stated = (params.get("_meta") or {}).get(mcp.PROTOCOL_VERSION_META_KEY)
    if not isinstance(stated, str):
        return {MCP_PROTOCOL_VERSION_HEADER: version} if version and message.method != "initialize" else {}
    headers = {MCP_PROTOCOL_VERSION_HEADER: stated, MCP_METHOD_HEADER: message.method}
    name = params.get(NAME_BEARING_METHODS.get(message.method, ""))
    if isinstance(name, str):
        headers[MCP_NAME_HEADER] = encode_header_value(name)
    return headers
