"""UpstreamTool: a tool of an MCP server behind the gateway, as one of ours; its results pass hooks and offloading."""

from dataclasses import dataclass
from typing import ClassVar

import anyio

from gateway.errors import Problem
from gateway.models import Arguments, ToolDefinition
from gateway.text import printable
from gateway.tools.tool import Alias, Outcome, ToolContext
from gateway.upstreams import Offered, Upstream, Upstreams

_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class UpstreamTool:
    """Runs on the session's own connection to the server."""

    upstream: Upstream
    offered: Offered
    upstreams: Upstreams
    aliases: ClassVar[tuple[Alias, ...]] = ()

    @property
    def definition(self) -> ToolDefinition:
        return self.offered.definition

    @property
    def needs_sandbox(self) -> bool:
        return bool(self.upstream.command)

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        from mcp.shared.exceptions import MCPError

        from gateway.upstream_link import UpstreamDown

        try:
            link, changed = await self.upstreams.link(ctx.session.id, self.upstream, ctx.sandbox)
        except Problem as problem:
            return Outcome("failed", code=problem.code, message=problem.message, remedy=problem.remedy)
        if self.offered.remote in changed:
            return _held_back(self.definition.name, self.upstream.name)

        try:
            with anyio.fail_after(min(self.upstream.timeout_seconds, ctx.max_timeout_seconds)):
                answer = await link.call(self.offered.remote, arguments, ctx.tell)
        except UpstreamDown as down:
            return Outcome("failed", code="upstream_unavailable", message=down.message, remedy=down.remedy)
        except MCPError as error:
            said = printable(error.error.message[:_ERROR_CHARACTERS])
            return Outcome("failed", code="upstream_refused", message=f"{self.upstream.name} refuses: {said}")
        await ctx.stdout.write(answer.text.encode(errors="replace"))
        if not answer.is_error:
            return Outcome(structured=answer.structured, media=answer.media)
        return Outcome(
            "failed",
            structured=answer.structured,
            media=answer.media,
            code="capability_execution_failed",
            message=f"{self.upstream.name} reports an error",
        )


def _held_back(tool: str, upstream: str) -> Outcome:
    return Outcome(
        "denied",
        code="tool_changed",
        message=f"{tool} is not what was accepted any more: its description or schema has changed",
        remedy=f"The operator looks at it with `sandgate upstreams` and `sandgate upstreams accept {upstream}`.",
    )
