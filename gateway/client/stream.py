"""Streams: a call whose output is read as it comes, and taken up again where its connection broke."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

import anyio
import httpx2

from gateway.client.connection import Connection, segment
from gateway.client.errors import ClientError, ConnectionLost, GatewayUnreachable, Refused, StreamInterrupted, mapped
from gateway.models import Stream, ToolResult
from gateway.wire import Accepted, Cancelled, Output

CANCEL_SECONDS: Final = 5.0
RECONNECT_DELAYS: Final = (0.05, 0.1, 0.2, 0.4, 1.0, 2.0, 3.0, 3.0)
"""Seconds between attempts to take up a stream; in sum about as long as the gateway waits for a reader."""
_EVENTS: Final = "text/event-stream"
_STREAM: Final = httpx2.Timeout(60, connect=10, pool=None, read=45)  # a stream says something every 15 s


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `offset..offset+len(data)` of one stream of a running call; `text` never cuts a character in two."""

    stream: Stream
    offset: int
    text: str
    data: bytes = field(repr=False)


class StreamedCall:
    """A call whose output is read as it comes: an async context manager, and inside it an async iterator of chunks.

    A broken connection is taken up again where it broke, or StreamInterrupted says that this was not possible; no
    output is lost or given twice, and only the gateway's own answer ends the iteration. Leaving before that end
    cancels the call. Where a hook must see the output first there are no chunks, only the result.
    """

    def __init__(self, connection: Connection, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.id = ""
        self._connection = connection
        self._path = path
        self._body = body
        self._headers = headers
        self._stack = AsyncExitStack()
        self._events: AsyncIterator[httpx2.ServerSentEvent] | None = None
        self._last_event_id: str | None = None
        self._offsets: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._result: ToolResult | None = None
        self._interrupted = False

    @property
    def result(self) -> ToolResult:
        """How the call ended; RuntimeError before all of it was iterated."""
        if self._result is None:
            raise RuntimeError("a streamed call has its result when its iteration has ended")
        return self._result

    async def __aenter__(self) -> Self:
        """Return when the call is accepted, with `id` the gateway's name for it. Raises as `Session.call` does."""
        await self._connect("POST", self._path, self._headers, body=self._body)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(CANCEL_SECONDS, shield=True):
            with suppress(ClientError):
                await self._stack.aclose()
            if self._result is None and not self._interrupted:
                with suppress(ClientError):
                    await self._connection._ask(Cancelled, "POST", f"{self._path}/{segment(self.id)}/cancel")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while self._result is None:
            try:
                event = await self._event()
            except ConnectionLost as lost:
                await self._take_up(lost)
                continue
            if event.event == "output":
                return self._chunk(event)
            if event.event == "result":
                self._result = self._connection._parsed(ToolResult, event.data)
        raise StopAsyncIteration

    async def _connect(self, method: str, path: str, headers: Mapping[str, str], **request: Any) -> None:
        """Open a stream and read its first event, which names the call."""
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(
                self._connection._open(method, path, headers={**headers, "accept": _EVENTS}, timeout=_STREAM, **request)
            )
            self._events = await stack.enter_async_context(aclosing(_server_events(response)))
            self.id = self._connection._parsed(Accepted, (await self._event()).data).id
            self._stack = stack.pop_all()

    async def _event(self) -> httpx2.ServerSentEvent:
        """The next event. A stream that just ends is as broken as any other."""
        if self._events is None:
            raise RuntimeError("a streamed call is entered before it is iterated")
        with mapped(self._connection.url):
            event = await anext(self._events, None)
        if event is None:
            raise ConnectionLost("the stream ended without a result")
        return event

    def _chunk(self, event: httpx2.ServerSentEvent) -> Chunk:
        output = self._connection._parsed(Output, event.data)
        if output.offset != self._offsets[output.stream]:
            raise self._interruption("a part of its output is missing")
        data = output.text.encode() if output.base64 is None else base64.b64decode(output.base64)
        self._offsets[output.stream] += len(data)
        self._last_event_id = event.id
        return Chunk(output.stream, output.offset, output.text, data)

    async def _take_up(self, cause: ClientError) -> None:
        """Connect again to the same call, after the last event that arrived."""
        await self._stack.aclose()
        headers = {} if self._last_event_id is None else {"last-event-id": self._last_event_id}
        for seconds in RECONNECT_DELAYS:
            await anyio.sleep(seconds)
            try:
                await self._connect("GET", f"{self._path}/{segment(self.id)}", headers)
                return
            except (GatewayUnreachable, ConnectionLost) as error:
                cause = error
            except Refused as error:
                if error.status not in (429, 503):
                    raise self._interruption(error.message) from error
                cause = error
        raise self._interruption(cause.message) from cause

    def _interruption(self, why: str) -> StreamInterrupted:
        self._interrupted = True
        return StreamInterrupted(self.id, why)


async def _server_events(response: httpx2.Response) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
    # the result is one event, and how large it may be is the gateway's to say
    async for event in httpx2.EventSource(response, max_event_size=None):
        yield event
