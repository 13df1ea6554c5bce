"""The built-in tools that act inside the sandbox: bash, python, and the file tools."""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pydantic import JsonValue

from gateway.matching import glob_matches
from gateway.models import Arguments, MediaBlock, ToolDefinition
from gateway.tools.jobs import JOB_TOOLS, start_in_background
from gateway.tools.tool import Alias, Outcome, Tool, ToolContext
from sandboxes import JOBS, WORKSPACE, Entry, ExecResult, FileRefused, Sandbox, Sink

MAX_FILE: Final = 10 << 20
READ_LINES: Final = 2000
MAX_PAGE: Final = 30_000
MAX_LINE: Final = 2000
MAX_ENTRIES: Final = 1000


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def _count(description: str, minimum: int = 0) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "description": description}


_IMAGES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_FILE_PATH: Final = _text("Path of the file, absolute or relative to /workspace.", minLength=1)
_FOLDER: Final = _text("Folder to look in; default: the workspace.", minLength=1)
_TIMEOUT: Final = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "Seconds until the command and everything it started is ended.",
}


async def run_command(
    argv: Sequence[str], arguments: Arguments, ctx: ToolContext, *, default_seconds: float | None = None
) -> Outcome:
    """Run a program in the session's sandbox under the call's time limit; what it prints goes to the sinks."""
    seconds = float(str(arguments.get("timeout_s") or default_seconds or ctx.timeout_seconds))
    if not 0 < seconds <= ctx.max_timeout_seconds:  # NaN is neither
        return Outcome(
            "invalid",
            code="invalid_arguments",
            message=f"timeout_s: {seconds:g} is not within the limit",
            remedy=f"At most {ctx.max_timeout_seconds:g} seconds are allowed here.",
        )
    sandbox = await ctx.sandbox()
    result = await sandbox.exec(
        argv, cwd=str(arguments.get("cwd") or WORKSPACE), timeout_seconds=seconds, stdout=ctx.stdout, stderr=ctx.stderr
    )
    return outcome_of(result, seconds)


def outcome_of(result: ExecResult, seconds: float) -> Outcome:
    """What a finished command means for its call."""
    end = result.exit
    notes = end.notes
    if result.timed_out:
        left = f" with its {end.killed} child process{'es' * (end.killed != 1)}" if end.killed else ""
        return Outcome(
            "timeout",
            code="tool_timeout",
            message=f"ended after {seconds:g} s, killed{left}",
            remedy="Ask for more with timeout_s, or do less at a time.",
            notes=notes,
        )
    match end.how:
        case "exit":
            return Outcome("ok" if end.code == 0 else "exit", exit_code=end.code, notes=notes)
        case "signal":
            name = f"signal {end.code}" if end.code else "a signal; no exit status was seen"
            return Outcome(
                "signal",
                code="command_failed",
                message=f"ended by {name}",
                notes=notes,
                structured={"signal": end.code},
            )
        case "oom":
            return Outcome(
                "oom",
                code="command_failed",
                message="ended by the kernel: out of memory",
                notes=notes,
                remedy="Use less memory, or ask the operator for a higher limit.",
            )
        case "pids":
            return Outcome(
                "pids",
                exit_code=end.code or None,
                code="command_failed",
                notes=notes,
                message="the limit of processes was reached",
                remedy="Start fewer processes at a time.",
            )


@dataclass(frozen=True, slots=True)
class Bash:
    """A new shell for each call."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias(
            "Bash",
            (("timeout", "timeout_s"), ("description", None), ("run_in_background", "background")),
            milliseconds=("timeout",),
        ),
        Alias("execute", (("timeout", "timeout_s"),)),
        Alias("exec_command", (("cmd", "command"), ("workdir", "cwd"))),
        Alias("shell", (("timeout", "timeout_s"),)),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="bash",
        description=(
            "Run a shell command in the sandbox. Each call is a new shell in /workspace: files stay, the "
            "current directory and variables do not, and what is started with & ends with the call; background=true "
            "keeps it: the call returns a job's id at once, for job_output, job_input, job_stop and job_list. A "
            "non-zero exit code is a result, not an error. Large output is stored and comes back as a "
            "preview with a reference for read_result."
        ),
        parameters=_schema(
            ["command"],
            command=_text("The command line.", minLength=1),
            timeout_s=_TIMEOUT,
            cwd=_text("Folder to start in; default: /workspace.", minLength=1),
            background={"type": "boolean", "description": "Run on after this call; default: false."},
        ),
        open_world=True,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        command = str(arguments["command"])
        argv = ["bash", "-c", "--", command]
        if arguments.get("background"):
            return await start_in_background(argv, command, arguments, ctx)
        return await run_command(argv, arguments, ctx)


@dataclass(frozen=True, slots=True)
class Python:
    """A new interpreter for each call."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (Alias("code_execution"), Alias("Python"))
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="python",
        description=(
            "Run Python code in the sandbox, in a new interpreter in /workspace. Print what you want to see. "
            "Files stay between calls, variables do not."
        ),
        parameters=_schema(["code"], code=_text("The program."), timeout_s=_TIMEOUT),
        open_world=True,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        return await run_command(["python3", "-c", str(arguments["code"])], arguments, ctx)


async def _read(sandbox: Sandbox, path: str) -> bytes:
    content = bytearray()
    async for chunk in sandbox.read(path, 0, MAX_FILE + 1):
        content += chunk
    if len(content) > MAX_FILE:
        raise FileRefused(f"{path}: over {MAX_FILE >> 20} MiB", "Use bash: sed -n, head, rg.", code="content_too_large")
    return bytes(content)


async def _read_text(sandbox: Sandbox, path: str) -> str:
    return _decoded(path, await _read(sandbox, path))


def _decoded(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise FileRefused(f"{path}: not UTF-8 text", "Use bash: xxd, file, iconv.", code="invalid_encoding") from None


async def _say(sink: Sink, text: str) -> None:
    await sink.write(text.encode(errors="surrogateescape"))


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Numbered lines of a text file, a page at a time."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (Alias("Read", (("pages", None),)), Alias("view", (("path", "file_path"),)))
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="read_file",
        description=(
            f"Read a text file as numbered lines. Pages by itself: at most {READ_LINES} lines and "
            f"{MAX_PAGE:,} characters a call; go on with offset. Lines are cut at {MAX_LINE:,} characters. An image "
            "(PNG, JPEG, GIF, WebP) comes back as one."
        ),
        parameters=_schema(
            ["file_path"],
            file_path=_FILE_PATH,
            offset=_count("First line, from 1.", 1),
            limit=_count("How many lines.", 1),
        ),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        sandbox = await ctx.sandbox()
        path, first = str(arguments["file_path"]), int(str(arguments.get("offset", 1)))
        content = await _read(sandbox, path)
        if (kind := image_type(content)) is not None:
            data = base64.b64encode(content).decode()
            return Outcome(media=(MediaBlock(type="image", data=data, mimeType=kind),))
        lines = _decoded(path, content).split("\n")
        if lines[-1] == "":
            lines.pop()
        wanted = lines[first - 1 : first - 1 + min(int(str(arguments.get("limit", READ_LINES))), READ_LINES)]
        page, size = [], 0
        for number, line in enumerate(wanted, start=first):
            shown = f"{number:6d}\t{line[:MAX_LINE]}\n"
            size += len(shown)
            if size > MAX_PAGE:
                break
            page.append(shown)
        await _say(ctx.stdout, "".join(page))
        last = first - 1 + len(page)
        notes = (f"lines {first}-{last} of {len(lines)}; go on with offset={last + 1}",) if last < len(lines) else ()
        return Outcome(notes=notes)


def image_type(content: bytes) -> str | None:
    """The media type of an image that models look at, by its first 12 bytes."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES.items() if content.startswith(magic)), None)


@dataclass(frozen=True, slots=True)
class WriteFile:
    """A whole file, written or not at all."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias("Write"),
        Alias("create", (("path", "file_path"), ("file_text", "content"))),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="write_file",
        description="Write a file, replacing it if it is there; parent folders are made.",
        parameters=_schema(["file_path", "content"], file_path=_FILE_PATH, content=_text("The whole content.")),
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        sandbox = await ctx.sandbox()
        path, content = str(arguments["file_path"]), str(arguments["content"]).encode(errors="surrogatepass")
        size = await sandbox.write(path, content)
        await _say(ctx.stdout, f"wrote {size:,} bytes to {path}\n")
        return Outcome(structured={"bytes": size})


@dataclass(frozen=True, slots=True)
class EditFile:
    """One exact replacement; ambiguous ones are refused."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias("Edit"),
        Alias("str_replace", (("path", "file_path"), ("old_str", "old_string"), ("new_str", "new_string"))),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="edit_file",
        description=(
            "Replace old_string by new_string in a text file. Fails unless old_string is there exactly once, "
            "or replace_all is true."
        ),
        parameters=_schema(
            ["file_path", "old_string", "new_string"],
            file_path=_FILE_PATH,
            old_string=_text("What to replace, exactly.", minLength=1),
            new_string=_text("What to put there."),
            replace_all={"type": "boolean", "description": "Replace every place; default: false."},
        ),
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        sandbox = await ctx.sandbox()
        path, old, new = (str(arguments[name]) for name in ("file_path", "old_string", "new_string"))
        text = await _read_text(sandbox, path)
        found = text.count(old)
        if found != 1 and not (found and arguments.get("replace_all")):
            raise FileRefused(
                f"{path}: old_string is there {found} times",
                code="search_replace_failed",
                remedy="Quote the place exactly, with more of its surroundings, or set replace_all."
                if found
                else "Read the file and quote the place exactly, with its white space.",
            )
        mode = (await sandbox.list(path)).entries[0].mode & 0o777
        if await _read_text(sandbox, path) != text:
            raise FileRefused(f"{path}: changed meanwhile", "Read it again.", code="file_changed")
        await sandbox.write(path, text.replace(old, new).encode(), mode=mode)
        await _say(ctx.stdout, f"{found} replacement{'s' * (found != 1)} in {path}\n")
        return Outcome(structured={"replacements": found})


@dataclass(frozen=True, slots=True)
class Ls:
    """One folder."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (Alias("LS"),)
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="ls",
        description=f"List a folder: kind, size and name of at most {MAX_ENTRIES:,} entries.",
        parameters=_schema([], path=_FOLDER),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        sandbox = await ctx.sandbox()
        listing = await sandbox.list(str(arguments.get("path", WORKSPACE)), max_entries=MAX_ENTRIES)
        await _say(ctx.stdout, "".join(f"{_ls_line(entry)}\n" for entry in listing.entries))
        return Outcome(notes=() if listing.complete else (f"only the first {len(listing.entries):,} entries",))


def _ls_line(entry: Entry) -> str:
    mark = {"directory": "/", "symlink": "@"}.get(entry.kind, "")
    return f"{entry.kind:9} {entry.size:>12,} {entry.path}{mark}"


@dataclass(frozen=True, slots=True)
class Glob:
    """Files by pattern, the newest first."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (Alias("Glob"),)
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="glob",
        description=(
            "Find files by a pattern such as **/*.py (** is any depth, * one name), the newest first, at most "
            f"{MAX_ENTRIES:,}."
        ),
        parameters=_schema(["pattern"], pattern=_text("The pattern, relative to path.", minLength=1), path=_FOLDER),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        sandbox = await ctx.sandbox()
        listing = await sandbox.list(str(arguments.get("path", WORKSPACE)), recursive=True)
        pattern = str(arguments["pattern"]).removeprefix("./")
        found = [one for one in listing.entries if one.kind == "file" and glob_matches(one.path, pattern)]
        found.sort(key=lambda one: (-one.modified, one.path))
        await _say(ctx.stdout, "".join(f"{one.path}\n" for one in found[:MAX_ENTRIES]))
        cut = len(found) > MAX_ENTRIES or not listing.complete
        return Outcome(structured={"files": len(found)}, notes=("not all files are shown",) if cut else ())


@dataclass(frozen=True, slots=True)
class Grep:
    """Lines by regular expression, by ripgrep inside the sandbox."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias("Grep", (("-i", "ignore_case"), ("-n", None), ("head_limit", "max_matches"), ("-C", "context"))),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="grep",
        description=(
            "Search files for a regular expression (ripgrep's). Shows path:line:text, at most max_matches "
            "lines (default 250). Files named in .gitignore and hidden files are searched too."
        ),
        parameters=_schema(
            ["pattern"],
            pattern=_text("The regular expression.", minLength=1),
            path=_FOLDER,
            glob=_text("Only files whose name matches, such as *.py.", minLength=1),
            output_mode={"enum": ["content", "files_with_matches", "count"], "description": "Default: content."},
            ignore_case={"type": "boolean"},
            context=_count("Lines around each match."),
            max_matches=_count("Most lines to show.", 1),
        ),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        page = Page(ctx.stdout, int(str(arguments.get("max_matches", 250))))
        sandbox = await ctx.sandbox()
        result = await sandbox.exec(
            _rg(arguments), stdout=page, stderr=ctx.stderr, cwd=WORKSPACE, timeout_seconds=ctx.timeout_seconds
        )
        notes = ("more matches were left out; narrow the pattern or the path",) if page.cut else ()
        if result.timed_out or result.exit.how != "exit":
            return outcome_of(result, ctx.timeout_seconds)
        if result.exit.code == 1:
            return Outcome(notes=("no match",))
        if result.exit.code == 2 and not page.lines:
            return Outcome(
                "failed",
                code="command_failed",
                message="the search failed; stderr says why",
                remedy="Check the pattern and the path.",
            )
        return Outcome(notes=notes)


def _rg(arguments: Arguments) -> list[str]:
    mode = {"files_with_matches": ["--files-with-matches"], "count": ["--count"]}
    argv = [
        "rg",
        "--no-config",
        "--color=never",
        "--no-heading",
        "--hidden",
        "--no-ignore",
        "--sort=path",
        f"--max-columns={MAX_LINE}",
        "--max-columns-preview",
        *mode.get(str(arguments.get("output_mode")), ["--line-number", "--with-filename"]),
    ]
    if arguments.get("ignore_case"):
        argv.append("--ignore-case")
    if arguments.get("context"):
        argv.append(f"--context={arguments['context']}")
    if arguments.get("glob"):
        argv.append(f"--glob={arguments['glob']}")
    return [*argv, "--regexp", str(arguments["pattern"]), "--", str(arguments.get("path", "."))]


@dataclass(slots=True)
class Page:
    """A sink that lets only the first lines, and `MAX_PAGE` bytes, through."""

    sink: Sink
    max_lines: int
    lines: int = 0
    size: int = 0
    cut: bool = False

    async def write(self, chunk: bytes) -> None:
        if self.cut:
            return
        end = self._fitting(chunk)
        self.cut = end < len(chunk)
        self.size += end
        self.lines += chunk.count(b"\n", 0, end)
        if end:
            await self.sink.write(chunk[:end])

    def _fitting(self, chunk: bytes) -> int:
        end = min(len(chunk), MAX_PAGE - self.size)
        at, lines = 0, self.lines
        while lines < self.max_lines:
            newline = chunk.find(b"\n", at, end)
            if newline < 0:
                return end
            at, lines = newline + 1, lines + 1
        return min(at, end)


@dataclass(frozen=True, slots=True)
class CommandTool:
    """A program with an argv template, from the configuration: `{name}` in an item stands for that argument."""

    needs_sandbox: ClassVar[bool] = True
    definition: ToolDefinition
    argv: tuple[str, ...]
    timeout_seconds: float | None = None
    aliases: ClassVar[tuple[Alias, ...]] = ()

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        properties = self.definition.parameters["properties"]
        defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
        argv = filled(self.argv, {**defaults, **arguments}, properties)
        return await run_command(argv, {}, ctx, default_seconds=self.timeout_seconds)


def need_of(tool: Tool) -> str:
    """What the tool is nothing without, a program or `JOBS`; empty where any sandbox has what it needs."""
    if isinstance(tool, CommandTool):
        return tool.argv[0]
    if tool in JOB_TOOLS:
        return JOBS
    return "python3" if isinstance(tool, Python) else ""


def filled(argv: Sequence[str], arguments: Arguments, names: Iterable[str]) -> list[str]:
    """The template with each `{name}` replaced, once; an item that is nothing but an absent argument is left out."""
    known = re.compile("|".join(r"\{" + re.escape(name) + r"\}" for name in names) or r"(?!)")
    kept = [item for item in argv if not (known.fullmatch(item) and item[1:-1] not in arguments)]
    return [known.sub(lambda place: _plain(arguments.get(place[0][1:-1], "")), item) for item in kept]


def _plain(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


SANDBOX_TOOLS: Final[tuple[Tool, ...]] = (
    Bash(),
    Python(),
    ReadFile(),
    WriteFile(),
    EditFile(),
    Ls(),
    Glob(),
    Grep(),
    *JOB_TOOLS,
)
