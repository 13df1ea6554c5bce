"""The MCP server: handlers over the Gateway. A handler never raises anything but MCPError, whose text is ours."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, TypeVar

import anyio
import mcp_types as mcp
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from gateway.calls import ActiveCall, OutputEvent, output_events
from gateway.errors import Problem
from gateway.gateway import Gateway
from gateway.models import CallRequest, ToolResult
from gateway.principals import Principal
from gateway.results import SessionResults
from gateway.sessions import Session
from gateway.text import printable
from gateway.transports.mcp import answers, resources

logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]
_T = TypeVar("_T")

INSTRUCTIONS: Final = (
    "Tools run in a sandbox of this session's own; its files are in /workspace and stay between calls. A large "
    "result comes back as a preview with a sandgate:// reference: read it on with read_result, or as a resource with "
    "?offset=, ?lines= or ?grep=."
)
KEEPALIVE_SECONDS: Final = 5.0
"""A call that says nothing still reports that it runs, so that no client gives up."""
REPORT_SECONDS: Final = 0.1
REPORT_CHARACTERS: Final = 500
MOST_SAID: Final = 16


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and for which session."""

    principal: Principal
    session: Session


@dataclass(frozen=True, slots=True)
class Handlers:
    """What is asked over MCP, in whatever era and over whatever transport; `asker` finds out for whom."""

    gateway: Gateway
    asker: Callable[[Context], Asker]

    async def list_tools(self, ctx: Context, params: mcp.PaginatedRequestParams | None) -> mcp.ListToolsResult:
        tools = [answers.tool(one) for one in self.asker(ctx).session.tools]
        return mcp.ListToolsResult(tools=tools, ttl_ms=0, cache_scope="private")

    async def call_tool(self, ctx: Context, params: mcp.CallToolRequestParams) -> mcp.CallToolResult:
        """Every call passes the pipeline; a tool that was never listed is answered like one that does not exist."""
        reports = (ctx.meta or {}).get("progress_token") is not None
        try:
            request = CallRequest(tool=params.name, arguments=params.arguments or {})
        except ValidationError as error:
            raise MCPError(mcp.INVALID_PARAMS, f"not a call: {error.errors()[0]['msg']}") from None
        try:
            active = await self.gateway.start_call(self.asker(ctx).session, request, streamed=reports)
        except Problem as problem:
            return answers.refused(problem)
        return answers.call_result(await (_reported(ctx, active) if reports else _awaited(active)))

    async def list_resources(self, ctx: Context, params: mcp.PaginatedRequestParams | None) -> mcp.ListResourcesResult:
        session = self.asker(ctx).session
        rows = [one for one in await self.gateway.journal.results(session.id) if not one.withheld]
        start = _place(params.cursor if params else None)
        page = rows[start : start + resources.LISTED]
        more = start + len(page) < len(rows)
        return mcp.ListResourcesResult(
            resources=resources.listed(session, [(one.key, one.media_type, one.bytes) for one in page]),
            next_cursor=str(start + len(page)) if more else None,
            ttl_ms=0,
            cache_scope="private",
        )

    async def list_templates(
        self, ctx: Context, params: mcp.PaginatedRequestParams | None
    ) -> mcp.ListResourceTemplatesResult:
        found = resources.templates(self.asker(ctx).session)
        return mcp.ListResourceTemplatesResult(resource_templates=found, ttl_ms=0, cache_scope="private")

    async def read_resource(self, ctx: Context, params: mcp.ReadResourceRequestParams) -> mcp.ReadResourceResult:
        session = self.asker(ctx).session
        results = SessionResults(session.id, self.gateway.shelf)
        try:
            content = await resources.contents(session, results, str(params.uri))
        except Problem as problem:
            raise answers.error(problem, uri=str(params.uri)) from None
        return mcp.ReadResourceResult(contents=[content], ttl_ms=0, cache_scope="private")


def build_server(gateway: Gateway, asker: Callable[[Context], Asker]) -> Server[Any]:
    """The server for all transports. Arguments are validated by our own pipeline, hence no schemas for the SDK."""
    handlers = Handlers(gateway, asker)
    return Server(
        "sandgate",
        version=version("sandgate"),
        instructions=INSTRUCTIONS,
        on_list_tools=_guarded(handlers.list_tools),
        on_call_tool=_guarded(handlers.call_tool),
        on_list_resources=_guarded(handlers.list_resources),
        on_list_resource_templates=_guarded(handlers.list_templates),
        on_read_resource=_guarded(handlers.read_resource),
        get_tool_input_schema=lambda name: None,
    )


def _guarded(handler: Callable[[Context, Any], Awaitable[_T]]) -> Callable[[Context, Any], Awaitable[_T]]:
    """Without this the SDK sends the text of any exception to clients of the older era."""

    async def guarded(ctx: Context, params: Any) -> _T:
        try:
            return await handler(ctx, params)
        except MCPError:
            raise
        except Problem as problem:
            raise answers.error(problem) from None
        except Exception:
            logger.exception("MCP %s", ctx.method)
            raise MCPError(mcp.INTERNAL_ERROR, "the gateway failed; its log has the reason") from None

    return guarded


async def _awaited(active: ActiveCall) -> ToolResult:
    async with _ends_with_its_client(active):
        return await active.wait()


async def _reported(ctx: Context, active: ActiveCall) -> ToolResult:
    """The result, with reports: seconds so far, and what the program has just printed or the tool says."""
    started, last = anyio.current_time(), 0.0
    said, heard = anyio.create_memory_object_stream[str](MOST_SAID)

    async def report(message: str) -> None:
        nonlocal last
        last = max(last + 0.001, round(anyio.current_time() - started, 3))  # it must increase
        await ctx.session.report_progress(last, message=message or "running")

    async def report_output() -> None:
        async for event in output_events(active, {}, KEEPALIVE_SECONDS):
            text = event.data.decode(errors="replace") if isinstance(event, OutputEvent) else ""
            await report(printable(text[-REPORT_CHARACTERS:], keep="\n\t"))
            await anyio.sleep(REPORT_SECONDS)

    async def report_said() -> None:
        async for message in heard:
            await report(message)

    def hear(message: str) -> None:
        with contextlib.suppress(anyio.WouldBlock):  # a client that is slow misses some
            said.send_nowait(message)

    active.listeners.append(hear)
    async with _ends_with_its_client(active), active, said, heard, anyio.create_task_group() as tasks:
        tasks.start_soon(report_output)
        tasks.start_soon(report_said)
        result = await active.wait()
        tasks.cancel_scope.cancel()
    return result


@asynccontextmanager
async def _ends_with_its_client(active: ActiveCall) -> AsyncIterator[None]:
    """A handler is cancelled when its client cancels or is gone: then so is the call, and it is over when this ends."""
    try:
        yield
    except anyio.get_cancelled_exc_class():
        active.cancel("its client is gone")
        with anyio.CancelScope(shield=True):
            await active.wait()
        raise


def _place(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 12):
        raise MCPError(mcp.INVALID_PARAMS, "cursor: not one of ours")
    return int(cursor)
