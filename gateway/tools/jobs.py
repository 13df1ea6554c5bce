"""Background jobs: what `bash(background=true)` starts, and the tools that look after it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import anyio
from pydantic import JsonValue

from gateway.models import Arguments, ToolDefinition
from gateway.text import printable, whole_characters
from gateway.tools.tool import Alias, Outcome, ToolContext
from sandboxes import JOB_LOG_BYTES, MOST_JOBS, WORKSPACE, Job, JobOutput, Jobs

PAGE_BYTES: Final = 30_000
_POLL_SECONDS: Final = (0.02, 0.5)
_JOB: Final = {"type": "string", "minLength": 1, "description": "The job's id, as bash gave it."}


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


async def start_in_background(argv: Sequence[str], title: str, arguments: Arguments, ctx: ToolContext) -> Outcome:
    """Start a job named after this call, and return at once."""
    sandbox = await ctx.sandbox()
    name = f"j-{ctx.call_id.removeprefix('c-')}"
    await sandbox.jobs.start(name, argv, title=title, cwd=str(arguments.get("cwd") or WORKSPACE))
    await ctx.stdout.write(f"started job {name}; job_output shows what it writes, job_stop ends it\n".encode())
    notes = ("timeout_s does not end a job: job_stop does, and the end of the session",)
    return Outcome(structured={"job": name}, notes=notes if "timeout_s" in arguments else ())


@dataclass(frozen=True, slots=True)
class JobOutputTool:
    """A page of a job's output; without an offset what came since the last page."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias("BashOutput", (("bash_id", "job"), ("filter", None))),
        Alias("TaskOutput", (("task_id", "job"), ("block", None), ("timeout", "wait_s")), milliseconds=("timeout",)),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="job_output",
        description=(
            "Show what a background job wrote (standard output and error as they came) and whether it runs: what is "
            f"new since the last look, or from a byte offset on; at most {PAGE_BYTES:,} bytes a call. Of a job that "
            f"writes much the last {JOB_LOG_BYTES >> 20} MiB is kept. With wait_s it waits so long for the job to end."
        ),
        parameters=_schema(
            ["job"],
            job=_JOB,
            offset={"type": "integer", "description": "First byte, counted from the start; negative: from the end."},
            wait_s={"type": "number", "minimum": 0, "description": "Seconds to wait for its end; default 0."},
        ),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        name, seconds = str(arguments["job"]), float(str(arguments.get("wait_s", 0)))
        if not seconds <= ctx.max_timeout_seconds:
            return Outcome(
                "invalid",
                code="invalid_arguments",
                message=f"wait_s: {seconds:g} is over the limit",
                remedy=f"At most {ctx.max_timeout_seconds:g} seconds are allowed here; look again after that.",
            )
        jobs = (await ctx.sandbox()).jobs
        await _ended(jobs, name, seconds)
        offset = int(str(arguments["offset"])) if "offset" in arguments else ctx.job_offsets.get(name, 0)
        output = await jobs.read(name, offset, PAGE_BYTES)
        page = _page(output)
        end = ctx.job_offsets[name] = output.start + len(page)
        await ctx.stdout.write(page)
        return Outcome(
            structured={**_described(output.job), "start": output.start, "end": end},
            notes=tuple(_notes(output, offset, end)),
        )


async def _ended(jobs: Jobs, name: str, seconds: float) -> None:
    """Wait for a job's end, at most so long."""
    pause, longest = _POLL_SECONDS
    with anyio.move_on_after(seconds):
        while (await jobs.read(name, 0, 0)).job.exit is None:
            await anyio.sleep(pause)
            pause = min(2 * pause, longest)


def _page(output: JobOutput) -> bytes:
    """Its bytes without an unfinished character at their end, where the rest of that may still come."""
    if output.job.exit is not None and output.start + len(output.data) >= output.job.total:
        return output.data
    return whole_characters(output.data) or output.data


def _notes(output: JobOutput, offset: int, end: int) -> list[str]:
    job = output.job
    notes = [f"job {job.name} {_how(job)}"]
    if 0 <= offset < output.start:
        notes.append(f"bytes {offset}-{output.start} are gone: of a job's output only the end is kept")
    if end < job.total:
        notes.append(f"bytes {output.start}-{end} of {job.total}; go on with offset={end}")
    return notes


def _how(job: Job) -> str:
    seconds = max(0.0, (job.ended or time.time()) - job.started)
    if job.exit is None:
        return f"is running ({seconds:.0f} s)"
    what = f"exit code {job.exit.code}" if job.exit.how == "exit" else f"signal {job.exit.code}"
    return f"has ended with {what} after {seconds:.0f} s"


def _described(job: Job) -> dict[str, JsonValue]:
    """The job as data. `state` is running, exit or signal; `code` the exit code or the signal's number."""
    return {
        "job": job.name,
        "command": job.title,
        "state": job.exit.how if job.exit else "running",
        "code": job.exit.code if job.exit else None,
        "started": job.started,
        "ended": job.ended,
        "kept_from": job.first,
        "bytes": job.total,
    }


@dataclass(frozen=True, slots=True)
class JobInputTool:
    """Input for a running job; what its pipe does not take is not kept."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = ()
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="job_input",
        description=(
            "Write text to the standard input of a background job, with its newlines as you give them; end=true "
            "closes the input after it."
        ),
        parameters=_schema(
            ["job"],
            job=_JOB,
            text={"type": "string", "description": "What to write; default: nothing."},
            end={"type": "boolean", "description": "Close the input; default: false."},
        ),
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        name, data = str(arguments["job"]), str(arguments.get("text", "")).encode(errors="surrogatepass")
        jobs = (await ctx.sandbox()).jobs
        try:
            taken = await jobs.write(name, data, close=bool(arguments.get("end")))
        except anyio.BrokenResourceError:
            return Outcome(
                "failed",
                code="command_failed",
                message=f"job {name} takes no input any more",
                remedy="It has ended or closed its input; job_output says how it is.",
            )
        await ctx.stdout.write(f"wrote {taken:,} bytes to job {name}\n".encode())
        notes = (f"only {taken:,} of {len(data):,} bytes: the job does not read them; send the rest later",)
        return Outcome(structured={"job": name, "bytes": taken}, notes=notes if taken < len(data) else ())


@dataclass(frozen=True, slots=True)
class JobStopTool:
    """The end of a job."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = (
        Alias("KillShell", (("shell_id", "job"),)),
        Alias("KillBash", (("shell_id", "job"),)),
        Alias("TaskStop", (("task_id", "job"), ("shell_id", "job"))),
    )
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="job_stop",
        description="End a background job and everything it started, at once (SIGKILL). Its output can still be read.",
        parameters=_schema(["job"], job=_JOB),
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        job = await (await ctx.sandbox()).jobs.stop(str(arguments["job"]))
        await ctx.stdout.write(f"job {job.name} {_how(job)}\n".encode())
        return Outcome(structured=_described(job))


@dataclass(frozen=True, slots=True)
class JobListTool:
    """All jobs that are kept."""

    needs_sandbox: ClassVar[bool] = True
    aliases: ClassVar[tuple[Alias, ...]] = ()
    definition: ClassVar[ToolDefinition] = ToolDefinition(
        name="job_list",
        description=(
            f"List the background jobs of this session: id, state, bytes written, command. At most {MOST_JOBS} are "
            "kept; the oldest that has ended makes room for a new one."
        ),
        parameters=_schema([]),
        read_only=True,
        destructive=False,
    )

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        jobs = await (await ctx.sandbox()).jobs.list()
        for job in jobs:
            line = f"{job.name} {_how(job)}, {job.total:,} bytes: {printable(job.title)}\n"
            await ctx.stdout.write(line.encode(errors="replace"))
        return Outcome(structured=[_described(job) for job in jobs], notes=() if jobs else ("no background jobs",))


JOB_TOOLS: Final = (JobOutputTool(), JobInputTool(), JobStopTool(), JobListTool())
