"""Serving: the socket, uvicorn with bounded headers, and a stop that lets calls end first."""

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.errors import SettingsError
from gateway.gateway import Gateway
from gateway.principals import Tokens
from gateway.settings import Server, Settings
from gateway.transports.http.app import create_app
from gateway.transports.http.mcp import McpRoute

MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 1000
MAX_MESSAGE_BYTES = 64 * 1024
"""Of a WebSocket."""
HEAD_SECONDS = 30.0
"""How long a connection may take for a request's head."""
LINGER_SECONDS = 5.0
"""How long a refused body is still read, so that its client sees the answer and not a reset."""


class BoundedProtocol(HttpToolsProtocol):
    """What uvicorn's parser does not bound: the size of a head (431), the time for a head (408), and how long a client
    may go on with a body whose answer it already has."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._within(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._within(HEAD_SECONDS)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEADER_BYTES:
            self._end(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._within(None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self._answering:
            self._within(LINGER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _within(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self._answering:  # bytes of a next request came early: it has time until this one is answered
            self._within(HEAD_SECONDS)
            return
        self._end(b"408 Request Timeout" if self._in_head and self._head_bytes else None)

    def _end(self, status: bytes | None) -> None:
        if self.transport.is_closing():
            return
        if status is not None:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


class RefusingProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, which takes a refused WebSocket for a forgotten one, and would log each as an error."""

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True


class QuietServer(uvicorn.Server):
    """Signals are ours: uvicorn would cut connections before calls have ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(server: Server) -> socket.socket:
    """A bound socket. Raises SettingsError for a taken port, a foreign address, or one that the network can reach
    without a list of names that are ours."""
    if not _is_loopback(server.host) and not server.allowed_hosts:
        raise SettingsError(
            f"server.host: {server.host} can be reached from the network",
            "Name the hosts that clients use in server.allowed_hosts, or listen on 127.0.0.1.",
        )
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY by proto
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"server: cannot listen on {server.host}:{server.port}: {error.strerror}",
            "Choose a port over 1023 with --port."
            if error.errno == errno.EACCES
            else "Stop what uses it, or choose another with --port.",
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def serving(gateway: Gateway, tokens: Tokens, settings: Settings, listener: socket.socket) -> AsyncIterator[str]:
    """Serve until the block ends; gives the base URL. Leaving drains the gateway, then closes the connections."""
    port, server, mcp = listener.getsockname()[1], settings.server, McpRoute(gateway, settings)
    config = uvicorn.Config(
        create_app(gateway, tokens, settings, port, mcp),
        http=BoundedProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        ws=RefusingProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
    )
    uvicorn_server = QuietServer(config)
    ended = anyio.Event()

    async def serve() -> None:
        try:
            await uvicorn_server.serve([listener])
        finally:
            ended.set()

    connections = anyio.CancelScope()

    async def speak_mcp() -> None:
        with connections:
            await mcp.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        tasks.start_soon(speak_mcp)
        while not uvicorn_server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await anyio.sleep(0.005)
        try:
            yield f"http://{server.host if ':' not in server.host else f'[{server.host}]'}:{port}"
        finally:
            with anyio.CancelScope(shield=True):
                await gateway.drain()
                connections.cancel()  # whose streams would keep the server
                uvicorn_server.should_exit = True
                await ended.wait()


@asynccontextmanager
async def stop_signals() -> AsyncIterator["StopSignals"]:
    """Hear SIGTERM and SIGINT until the block ends: also while the gateway stops, so that none cuts that short."""
    stop = StopSignals()

    async def hear() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            stop.heard.set()
            async for _ in signals:
                (stop.again if stop.first.is_set() else stop.first).set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        await stop.heard.wait()
        yield stop
        tasks.cancel_scope.cancel()


class StopSignals:
    """`first` asks to stop, `again` not to wait for calls any longer."""

    def __init__(self) -> None:
        self.heard, self.first, self.again = anyio.Event(), anyio.Event(), anyio.Event()
