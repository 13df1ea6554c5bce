"""Link: one connection to an MCP server. One task owns it: the SDK's scopes must be left where they were entered."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx2
import mcp_types as mcp
from anyio.abc import TaskStatus
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from gateway.errors import SandgateError
from gateway.models import MediaBlock
from gateway.text import printable
from sandboxes import Sandbox, SandboxError

logger = logging.getLogger(__name__)

START_SECONDS: Final = 30.0
"""Python servers need 1.3 s on a quiet machine."""
MESSAGE_BYTES: Final = 16 << 20
"""Of one message; a server that sends a longer one is ended."""
MOST_TOOLS: Final = 1000
_STDERR_BYTES: Final = 2000
_REPORT_CHARACTERS: Final = 500
_CLOSED: Final = -32000


class UpstreamDown(SandgateError):
    """The server did not start, does not answer as it must, or is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool of a server said."""

    text: str
    structured: dict[str, Any] | None
    media: tuple[MediaBlock, ...]
    is_error: bool


Streams = AbstractAsyncContextManager[Any]


class Link:
    """A connected server. `own` runs it in a task; `tools` is what it listed when it was connected."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name = name
        self.tools: tuple[mcp.Tool, ...] = ()
        self._streams = streams
        self._client: Client | None = None
        self._end = anyio.Event()

    @property
    def alive(self) -> bool:
        return self._client is not None and not self._end.is_set()

    def close(self) -> None:
        """Let the owning task end; what runs on it is answered with UpstreamDown."""
        self._end.set()

    async def own(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, list, and hold the connection until `close`. Before it has started it raises UpstreamDown."""
        started = False
        try:
            with anyio.fail_after(START_SECONDS) as limit:
                async with Client(self._streams, cache=None) as client:
                    self.tools = await _listed(client)
                    limit.deadline = float("inf")
                    self._client, started = client, True
                    task_status.started()
                    await self._end.wait()
        except Exception as error:  # the SDK raises whatever broke, in groups
            if not started:
                raise UpstreamDown(f"{self.name} cannot be used: {_why(error)}", "See the gateway's log.") from error
            logger.info("upstream %s: %s", self.name, _why(error))
        finally:
            self._end.set()

    async def call(self, tool: str, arguments: Mapping[str, Any], tell: Callable[[str], None]) -> Answer:
        """Raises UpstreamDown where the connection is gone or the answer makes no sense, MCPError where it refuses."""
        if self._client is None or self._end.is_set():
            raise UpstreamDown(f"{self.name} is gone", "The next call connects again.")

        async def report(progress: float, total: float | None, message: str | None) -> None:
            tell(printable(message[:_REPORT_CHARACTERS]) if message else _fraction(progress, total))

        try:
            result = await self._client.call_tool(tool, dict(arguments), progress_callback=report)
        except MCPError as error:
            if error.error.code == _CLOSED:
                self.close()
                raise UpstreamDown(f"{self.name} is gone", "The next call connects again.") from error
            raise
        except (RuntimeError, ValueError) as error:  # the SDK's words for an answer that breaks the tool's own schema
            raise UpstreamDown(f"{self.name} answered what its own schema forbids") from error
        return _answer(result)


def _fraction(progress: float, total: float | None) -> str:
    return f"{progress:g}" if total is None else f"{progress:g} of {total:g}"


async def _listed(client: Client) -> tuple[mcp.Tool, ...]:
    tools: list[mcp.Tool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"lists over {MOST_TOOLS:,} tools")
        if cursor is None:
            return tuple(tools)


def _answer(result: mcp.CallToolResult) -> Answer:
    texts: list[str] = []
    media: list[MediaBlock] = []
    for block in result.content:
        match block:
            case mcp.TextContent():
                texts.append(block.text)
            case mcp.ImageContent() | mcp.AudioContent():
                media.append(_media(block))
            case mcp.ResourceLink():
                texts.append(f"{block.name}: {block.uri}")
            case mcp.EmbeddedResource(resource=mcp.TextResourceContents() as resource):
                texts.append(resource.text)
            case mcp.EmbeddedResource(resource=mcp.BlobResourceContents() as resource):
                texts.append(
                    f"[{resource.mime_type or 'bytes'} of {resource.uri}: {len(resource.blob) * 3 // 4:,} bytes]"
                )
    structured = result.structured_content if isinstance(result.structured_content, dict) else None
    return Answer("\n".join(texts), structured, tuple(media), bool(result.is_error))


def _media(block: mcp.ImageContent | mcp.AudioContent) -> MediaBlock:
    if isinstance(block, mcp.ImageContent):
        return MediaBlock(type="image", data=block.data, mimeType=block.mime_type)
    return MediaBlock(type="audio", data=block.data, mimeType=block.mime_type)


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, SandboxError | SandgateError):
        return error.message
    if isinstance(error, TimeoutError):
        return f"no answer within {START_SECONDS:g} s"
    return printable(f"{type(error).__name__}: {error}"[:300])


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """The SDK's streams to a server that the gateway itself reaches."""
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=httpx2.Timeout(START_SECONDS, read=None)) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield streams


@asynccontextmanager
async def inside(sandbox: Sandbox, argv: tuple[str, ...], env: Mapping[str, str]) -> AsyncIterator[Any]:
    """The SDK's streams to a server that is started in a sandbox, and killed there with all that it started."""
    async with await sandbox.start(argv, env=env, stdin=True) as process, anyio.create_task_group() as tasks:
        to_us, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        sent, to_it = anyio.create_memory_object_stream[SessionMessage](0)
        said = bytearray()

        async def hear() -> None:
            async with to_us:
                async for line in _lines(process.stdout):
                    with contextlib.suppress(ValueError):  # servers print other things as well
                        await to_us.send(SessionMessage(mcp.jsonrpc_message_adapter.validate_json(line, by_name=False)))
            if said:
                logger.info("an upstream ended, saying: %s", printable(said.decode(errors="replace")))

        async def tell() -> None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for message in to_it:
                    await process.stdin.send(
                        message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                    )

        async def drain() -> None:
            async for chunk in process.stderr:
                said[:] = (said + chunk)[-_STDERR_BYTES:]

        for work in (hear, tell, drain):
            tasks.start_soon(work)
        try:
            yield received, sent
        finally:
            for stream in (received, sent, to_it):
                stream.close()
            tasks.cancel_scope.cancel()


async def _lines(stream: Any) -> AsyncIterator[bytes]:
    """Lines without their ends; one over MESSAGE_BYTES ends them."""
    buffer = bytearray()
    async for chunk in stream:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield bytes(buffer + line)
            buffer.clear()
        buffer += rest
        if len(buffer) > MESSAGE_BYTES:
            return
