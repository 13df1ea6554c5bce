"""The server behind the gateway in the conformance run: the tools and resources that the suite asks for by name."""

import base64
import sys
from typing import Any, Final

import anyio
import mcp_types as t
import uvicorn
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

PNG: Final = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100"
        "18dd8db00000000049454e44ae426082"
    )
).decode()
WAV: Final = base64.b64encode(b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0@\x1f\0\0\x80>\0\0\2\0\x10\0data\0\0\0\0").decode()
ANYTHING: Final[dict[str, Any]] = {"type": "object"}
SCHEMA_2020_12: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
TOOLS: Final = {
    "test_simple_text": ("Answers with a text.", ANYTHING),
    "test_image_content": ("Answers with an image.", ANYTHING),
    "test_audio_content": ("Answers with a sound.", ANYTHING),
    "test_embedded_resource": ("Answers with a resource.", ANYTHING),
    "test_multiple_content_types": ("Answers with a text, an image and a resource.", ANYTHING),
    "test_error_handling": ("Reports an error.", ANYTHING),
    "test_tool_with_progress": ("Reports progress.", ANYTHING),
    "json_schema_2020_12_tool": ("Has a schema with all the words of 2020-12.", SCHEMA_2020_12),
}


def _text(text: str) -> t.TextContent:
    return t.TextContent(type="text", text=text)


def _image() -> t.ImageContent:
    return t.ImageContent(type="image", data=PNG, mime_type="image/png")


def _embedded(uri: str, mime_type: str, text: str) -> t.EmbeddedResource:
    return t.EmbeddedResource(type="resource", resource=t.TextResourceContents(uri=uri, mime_type=mime_type, text=text))


async def list_tools(ctx: Any, params: Any) -> t.ListToolsResult:
    return t.ListToolsResult(
        tools=[t.Tool(name=name, description=text, input_schema=schema) for name, (text, schema) in TOOLS.items()]
    )


async def call_tool(ctx: Any, params: t.CallToolRequestParams) -> t.CallToolResult:
    match params.name:
        case "test_simple_text":
            return t.CallToolResult(content=[_text("This is a simple text response for testing.")])
        case "test_image_content":
            return t.CallToolResult(content=[_image()])
        case "test_audio_content":
            return t.CallToolResult(content=[t.AudioContent(type="audio", data=WAV, mime_type="audio/wav")])
        case "test_embedded_resource":
            text = "This is an embedded resource content."
            return t.CallToolResult(content=[_embedded("test://embedded-resource", "text/plain", text)])
        case "test_multiple_content_types":
            resource = _embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
            return t.CallToolResult(content=[_text("Multiple content types test:"), _image(), resource])
        case "test_error_handling":
            text = "This tool intentionally returns an error for testing"
            return t.CallToolResult(content=[_text(text)], is_error=True)
        case "test_tool_with_progress":
            for progress in (0, 50, 100):
                await ctx.session.report_progress(progress, 100)
                await anyio.sleep(0.1)
            return t.CallToolResult(content=[_text("done")])
        case "json_schema_2020_12_tool":
            return t.CallToolResult(content=[_text("ok")])
    raise MCPError(t.INVALID_PARAMS, f"no such tool: {params.name}")


if __name__ == "__main__":
    server = Server("fixture", on_list_tools=list_tools, on_call_tool=call_tool)
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
