"""What our values are in MCP's types: tools, results of calls, problems."""

from collections.abc import Iterator
from typing import Any, Final

import mcp_types as mcp
from mcp.shared.exceptions import MCPError

from gateway.errors import Problem
from gateway.models import MediaBlock, Reference, ToolDefinition, ToolResult
from gateway.text import joined, printable

TEXT_BYTES: Final = 256 * 1024
"""Of one text block. Clients of the SDK refuse an event over 1 MiB; JSON may double a text."""
STRUCTURED_CHARACTERS: Final = 128 * 1024
MEDIA_CHARACTERS: Final = 512 * 1024
RECORD: Final = "sandgate/result"


def tool(definition: ToolDefinition) -> mcp.Tool:
    return mcp.Tool(
        name=definition.name,
        description=definition.description,
        input_schema=definition.parameters,
        annotations=mcp.ToolAnnotations(
            read_only_hint=definition.read_only,
            destructive_hint=definition.destructive,
            open_world_hint=definition.open_world,
        ),
    )


def call_result(result: ToolResult) -> mcp.CallToolResult:
    """Text for the model first, then images and sounds, then a link for each stored result; `structured_content` is the
    tool's own object, or how the call ended. The whole record but its text is in `_meta`."""
    record = result.model_dump(mode="json", exclude={"content", "structured"}, exclude_defaults=True)
    ended = {"status": result.status, "exit_code": result.exit_code}
    return mcp.CallToolResult(
        content=[
            mcp.TextContent(type="text", text=bounded(result.text)),
            *_media(result),
            *map(_link, result.references),
        ],
        structured_content=_small(result.structured) if isinstance(result.structured, dict) else ended,
        is_error=result.is_error,
        _meta={RECORD: record},
    )


def _media(result: ToolResult) -> Iterator[mcp.ImageContent | mcp.AudioContent]:
    """The images and sounds that an event has room for; the text names each, also one that is left out."""
    room = MEDIA_CHARACTERS
    for block in result.content:
        if isinstance(block, MediaBlock) and len(block.data) <= room:
            room -= len(block.data)
            if block.type == "image":
                yield mcp.ImageContent(type="image", data=block.data, mime_type=block.mimeType)
            else:
                yield mcp.AudioContent(type="audio", data=block.data, mime_type=block.mimeType)


def refused(problem: Problem) -> mcp.CallToolResult:
    """What never became a call: the model should read why."""
    text = f"{problem.title}: {problem.message}. {problem.remedy}".strip()
    return mcp.CallToolResult(content=[mcp.TextContent(type="text", text=printable(text))], is_error=True)


def error(problem: Problem, **data: str) -> MCPError:
    """The same for requests that are no calls; -32602 is the specification's code for a resource that is not there."""
    code = mcp.INVALID_PARAMS if problem.status < 500 else mcp.INTERNAL_ERROR
    text = f"{problem.message}. {problem.remedy}".strip()
    return MCPError(code, printable(text), {"code": problem.code, **data})


def bounded(text: str) -> str:
    """The text, or head and tail of it where it is too large for one event."""
    if len(text) <= TEXT_BYTES // 4:
        return text
    whole = text.encode(errors="replace")
    if len(whole) <= TEXT_BYTES:
        return text
    half = TEXT_BYTES // 2
    return joined(whole[:half], whole[-half:], len(whole))


def _small(structured: dict[str, Any]) -> dict[str, Any]:
    size = len(str(structured))
    return structured if size <= STRUCTURED_CHARACTERS else {"left_out": f"an object of about {size:,} characters"}


def _link(reference: Reference) -> mcp.ResourceLink:
    return mcp.ResourceLink(
        type="resource_link",
        name=reference.reference.rpartition("/")[2],
        uri=reference.reference,
        mime_type=reference.media_type,
        size=reference.bytes,
        description=f"The whole {reference.stream}.",
    )
