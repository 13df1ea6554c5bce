"""read_result: how an agent reads on in what was too large to show."""

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from gateway.models import Arguments, ToolDefinition
from gateway.text import whole_characters
from gateway.tools.tool import Alias, Outcome, Tool, ToolContext

PAGE_BYTES: Final = 30_000
_LINES: Final = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Pages of a stored result, by bytes, by lines or by pattern; or the whole of it into a file."""

    aliases: ClassVar[tuple[Alias, ...]] = ()
    needs_sandbox: ClassVar[bool] = False
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="read_result",
        description=(
            f"Read a stored result of this session, at most {PAGE_BYTES:,} bytes a call: from a byte offset, "
            'by lines ("1-200"), or the lines that match a regular expression (RE2). save_to writes all of '
            "it into a file of the workspace instead."
        ),
        parameters={
            "type": "object",
            "additionalProperties": False,
            "required": ["reference"],
            "properties": {
                "reference": {"type": "string", "minLength": 1, "description": "sandgate://... as a result gave it."},
                "offset": {"type": "integer", "minimum": 0, "description": "First byte; default 0."},
                "lines": {
                    "type": "string",
                    "pattern": r"^\d{1,12}(-\d{1,12})?$",
                    "description": "A line or a range of lines, from 1.",
                },
                "grep": {"type": "string", "minLength": 1, "description": "Show only lines that match."},
                "save_to": {"type": "string", "minLength": 1, "description": "Path of a file in the workspace."},
            },
        },
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        ways = [name for name in ("offset", "lines", "grep", "save_to") if name in arguments]
        if len(ways) > 1:
            return Outcome(
                "invalid",
                code="invalid_arguments",
                message=f"{' and '.join(ways)} exclude each other",
                remedy="Give one of them.",
            )
        reference = str(arguments["reference"])
        match ways:
            case ["lines"]:
                first, last = _range(str(arguments["lines"]))
                text, cut = await ctx.results.lines(reference, first, last, PAGE_BYTES)
            case ["grep"]:
                text, cut = await ctx.results.grep(reference, str(arguments["grep"]), PAGE_BYTES)
            case ["save_to"]:
                return await _save(reference, str(arguments["save_to"]), ctx)
            case _:
                return await _page(reference, int(str(arguments.get("offset", 0))), ctx)
        await ctx.stdout.write(text.encode(errors="replace"))
        return Outcome(notes=("the page is full; ask for a narrower part",) if cut else ())


def _range(text: str) -> tuple[int, int]:
    found = _LINES.fullmatch(text)
    assert found is not None  # the schema's pattern
    first = max(1, int(found[1]))
    return first, int(found[2] or first)


async def _page(reference: str, offset: int, ctx: ToolContext) -> Outcome:
    size = await ctx.results.size(reference)
    content = bytearray()
    async for chunk in ctx.results.read(reference, offset, offset + PAGE_BYTES):
        content += chunk
    page = bytes(content) if offset + len(content) >= size else whole_characters(bytes(content))
    end = offset + len(page)
    await ctx.stdout.write(page)
    return Outcome(notes=(f"bytes {offset}-{end} of {size}; go on with offset={end}",) if end < size else ())


async def _save(reference: str, path: str, ctx: ToolContext) -> Outcome:
    sandbox = await ctx.sandbox()
    await ctx.results.size(reference)
    size = await sandbox.write(path, ctx.results.read(reference, 0, None))
    await ctx.stdout.write(f"wrote {size:,} bytes to {path}\n".encode(errors="surrogateescape"))
    return Outcome(structured={"bytes": size})


RESULT_TOOLS: Final[tuple[Tool, ...]] = (ReadResult(),)
