"""A session's terminal: bytes as they are typed and shown, over a WebSocket."""

from typing import Self

import anyio
import httpx2
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from gateway.client.connection import LOOPBACK, Connection
from gateway.client.errors import ConnectionLost, GatewayUnreachable, refusal
from gateway.wire import REPLACED, Resize, TerminalEnd

_PIECE_BYTES = 32 * 1024
_MESSAGE_BYTES = 1 << 20


class Terminal:
    """The terminal of a session: an async context manager, and inside it an async iterator of what is shown, first
    of what was shown lately (64 KiB at most). Needs asyncio.

    A session has one, with a shell that is started when it is first entered and runs on when it is left. Who enters
    takes the place of whoever is there. After the iteration `end` says how the shell ended, or `replaced` that another
    reader came; where neither is so, ConnectionLost was raised. What is shown is a program's, and meant for a terminal.
    """

    def __init__(self, connection: Connection, path: str, columns: int, rows: int) -> None:
        self.end: TerminalEnd | None = None
        self.replaced = False
        self._connection = connection
        self._url = f"{connection.url.replace('http', 'ws', 1)}{path}?columns={columns}&rows={rows}"
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        """Connect. Raises as every request does: Unauthorized, Forbidden, NotFound, Refused, GatewayUnreachable."""
        where = self._connection.url
        try:
            self._socket = await connect(
                self._url,
                additional_headers=self._connection.headers,
                compression=None,
                max_size=_MESSAGE_BYTES,
                proxy=None if httpx2.URL(where).host in LOOPBACK else True,
                user_agent_header=None,
            )
        except InvalidStatus as error:
            answer = error.response
            response = httpx2.Response(
                answer.status_code, headers=list(answer.headers.raw_items()), content=bytes(answer.body or b"")
            )
            raise refusal(response) from error
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            raise GatewayUnreachable(where, type(error).__name__) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._connected.close()

    async def send(self, data: bytes) -> None:
        """Type; waits where the program takes nothing. Raises ConnectionLost."""
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                await self._connected.send(data[start : start + _PIECE_BYTES])
        except ConnectionClosed as closed:
            raise _lost(closed) from closed

    async def resize(self, columns: int, rows: int) -> None:
        """Give it another size, in characters from 1 to 1000. Raises ConnectionLost."""
        try:
            await self._connected.send(Resize(columns=columns, rows=rows).model_dump_json())
        except ConnectionClosed as closed:
            raise _lost(closed) from closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while self.end is None:
            try:
                message = await self._connected.recv()
            except ConnectionClosed as closed:
                if closed.rcvd is not None and closed.rcvd.code == REPLACED:
                    self.replaced = True
                    break
                raise _lost(closed) from closed
            if isinstance(message, bytes):
                return message
            self.end = self._connection._parsed(TerminalEnd, message)
        raise StopAsyncIteration

    @property
    def _connected(self) -> ClientConnection:
        if self._socket is None:
            raise RuntimeError("a terminal is entered before it is used")
        return self._socket


_WHY = {
    1011: "its session or sandbox has ended",
    1012: "the gateway stops",
    1013: "its program takes no input",
}


def _lost(closed: ConnectionClosed) -> ConnectionLost:
    code = closed.rcvd.code if closed.rcvd is not None else 0
    return ConnectionLost(f"the terminal's connection ended: {_WHY.get(code, 'it broke')}")
