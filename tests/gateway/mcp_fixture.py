"""An MCP server to stand behind the gateway: counts, echoes, hangs, floods, dies; and can be told to list other tools.

Run as a program it speaks stdio; `--port` serves HTTP. `--tools FILE` names a file with the description of `echo`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import mcp_types as t
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

ANYTHING: dict[str, Any] = {"type": "object"}
STRICT: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def build(described: Path | None) -> "Server[Any]":
    count = 0

    async def list_tools(ctx: Any, params: Any) -> t.ListToolsResult:
        text = described.read_text() if described else "Say it again."
        return t.ListToolsResult(
            tools=[
                t.Tool(name="echo", description=text, input_schema={**ANYTHING, "required": ["text"]}),
                t.Tool(name="count", description="Count calls.", input_schema=ANYTHING),
                t.Tool(name="hang", description="Never answer.", input_schema=ANYTHING),
                t.Tool(name="flood", description="Answer with 3 MB.", input_schema=ANYTHING),
                t.Tool(name="die", description="End the server.", input_schema=ANYTHING),
                t.Tool(name="fail", description="Report an error.", input_schema=ANYTHING),
                t.Tool(name="crash", description="Raise.", input_schema=ANYTHING),
                t.Tool(name="lie", description="Break its schema.", input_schema=ANYTHING, output_schema=STRICT),
                t.Tool(name="bad name!", description="An impossible name.", input_schema=ANYTHING),
            ]
        )

    async def call_tool(ctx: Any, params: t.CallToolRequestParams) -> t.CallToolResult:
        nonlocal count
        match params.name:
            case "echo":
                return _text(str((params.arguments or {}).get("text")))
            case "count":
                count += 1
                return t.CallToolResult(
                    content=[t.TextContent(type="text", text=str(count))], structured_content={"count": count}
                )
            case "hang":
                await anyio.sleep_forever()
            case "flood":
                return _text("0123456789abcde\n" * 200_000)
            case "die":
                os._exit(3)
            case "fail":
                return t.CallToolResult(content=[t.TextContent(type="text", text="it failed")], is_error=True)
            case "lie":
                return t.CallToolResult(content=[], structured_content={"n": "no number"})
        raise RuntimeError("secret of the server")

    return Server("fixture", on_list_tools=list_tools, on_call_tool=call_tool)


def _text(text: str) -> t.CallToolResult:
    return t.CallToolResult(content=[t.TextContent(type="text", text=text)])


async def over_stdio(server: "Server[Any]") -> None:
    print("a stray line", file=sys.stderr)
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--tools", type=Path)
    options = parser.parse_args()
    fixture = build(options.tools)
    if options.port is None:
        anyio.run(over_stdio, fixture)
    else:
        import uvicorn

        uvicorn.run(fixture.streamable_http_app(), port=options.port, log_level="error")
