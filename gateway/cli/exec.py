"""`sandgate exec`: one command in a sandbox, as if it ran here."""

import codecs
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, BinaryIO, Final

import anyio
import anyio.to_thread
from cyclopts import Parameter

from gateway.cli.options import StateDir
from gateway.cli.output import OUTPUT_KEEPS
from gateway.cli.remote import RemoteError, ask
from gateway.client import Client, Session
from gateway.models import STREAMS, Stream, ToolResult
from gateway.text import printable

OWN_FAILURE: Final = 125
TIMED_OUT: Final = 124
UNDECIDED: Final = (
    "The session ends here, and its question with it: decide while it waits (server.approval_wait_seconds)."
)
_BY_SIGNAL: Final = 128
_SIGNAL: Final = re.compile(r"ended by signal (\d+)")


class NotRun(RemoteError):
    """The command did not run; told apart from whatever code it could have ended with."""

    exit_code = OWN_FAILURE


Command = Annotated[str, Parameter(allow_leading_hyphen=True, help="The program and its arguments.")]
Profile = Annotated[str, Parameter(name=["--profile", "-p"], help="The session's profile.")]
Timeout = Annotated[float | None, Parameter(name="--timeout", help="In seconds; default: the profile's.")]
Keep = Annotated[bool, Parameter(name="--keep", negative="", help="Leave the session open; stderr has its id.")]


def exec_command(
    *command: Command,
    profile: Profile = "default",
    timeout: Timeout = None,
    keep: Keep = False,
    state_dir: StateDir = None,
) -> int:
    """Run one command in a new session of the running gateway, and close the session.

    Write `--` before the command; for a shell's syntax run a shell: -- sh -c 'ls | wc -l'. Standard input is not read.
    Where: the gateway at SANDGATE_URL, else at http://127.0.0.1:8710. Who runs it: SANDGATE_TOKEN, else the agent's
    token of the state folder. On a terminal, control characters in the output are shown as escapes; elsewhere its
    bytes come as they are.

    Exit code: the command's; 124 if it took too long; 128 + n if signal n ended it; 125 if it did not run.
    """
    if not command:
        raise NotRun("no command", "Write it after two dashes: sandgate exec -- echo hello")
    if command[0].startswith("-"):
        raise NotRun(f"no such option: {command[0]}", "sandgate exec --help lists them; the command comes after them.")
    arguments: dict[str, Any] = {"command": shlex.join(command)}
    if timeout is not None:
        arguments["timeout_s"] = timeout
    try:
        return ask("agent", state_dir, lambda client: _interruptible(client, profile, arguments, keep=keep))
    except RemoteError as error:
        raise NotRun(error.message, error.remedy) from error


async def _interruptible(client: Client, profile: str, arguments: dict[str, Any], *, keep: bool) -> int:
    """SIGTERM and Ctrl-C end the command and close the session, then us."""
    code = OWN_FAILURE
    async with anyio.create_task_group() as tasks:

        async def stop_at_signal() -> None:
            nonlocal code
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for one in signals:
                    code = _BY_SIGNAL + one
                    tasks.cancel_scope.cancel()
                    return

        tasks.start_soon(stop_at_signal)
        code = await _run(client, profile, arguments, keep=keep)
        tasks.cancel_scope.cancel()
    return code


async def _run(client: Client, profile: str, arguments: dict[str, Any], *, keep: bool) -> int:
    streams = {"stdout": Output(sys.stdout.buffer), "stderr": Output(sys.stderr.buffer)}
    async with _session(client, profile, keep=keep) as session, session.stream("bash", arguments) as call:
        shown = False
        async for chunk in call:
            shown = True
            await streams[chunk.stream].write(chunk.data)
    for stream in STREAMS:
        if not shown:  # a hook had to see the output first
            await streams[stream].write(_content(call.result, stream))
        await streams[stream].end()
    return _exit_code(call.result)


@asynccontextmanager
async def _session(client: Client, profile: str, *, keep: bool) -> AsyncIterator[Session]:
    if not keep:
        async with client.session(profile, labels={"client": "sandgate exec"}) as session:
            yield session
        return
    session = await client.open_session(profile, labels={"client": "sandgate exec"})
    print(f"session {session.id}", file=sys.stderr)
    yield session


class Output:
    """One of our own streams: bytes as they are, or, on a terminal, nothing that it would obey."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape") if file.isatty() else None

    async def write(self, data: bytes, *, final: bool = False) -> None:
        if self._decoder is not None:
            data = printable(self._decoder.decode(data, final), keep=OUTPUT_KEEPS).encode()
        if data:  # in a thread: whoever reads us may be slow, and signals must be heard
            await anyio.to_thread.run_sync(self._put, data, abandon_on_cancel=True)

    async def end(self) -> None:
        """Show a character that was never finished."""
        await self.write(b"", final=True)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()


def _content(result: ToolResult, stream: Stream) -> bytes:
    return "".join(one.text for one in result.content if (one.stream or "stdout") == stream).encode(errors="replace")


def _exit_code(result: ToolResult) -> int:
    match result.status:
        case "ok" | "exit":
            return result.exit_code or 0
        case "signal" | "oom":
            found = _SIGNAL.match(result.error.message) if result.error else None
            _explain(result)
            return _BY_SIGNAL + (int(found[1]) if found else signal.SIGKILL)
        case "timeout":
            _explain(result)
            return TIMED_OUT
        case "pids" if result.exit_code:
            _explain(result)
            return result.exit_code
    _explain(result)
    return OWN_FAILURE


def _explain(result: ToolResult) -> None:
    """Say on stderr why a command did not end by itself."""
    if result.error is not None:
        remedy = f" {UNDECIDED if result.status == 'pending' else result.error.remedy}".rstrip()
        text = f"sandgate: {result.status}: {result.error.message}.{remedy}"
        print(printable(text.replace("timeout_s", "--timeout")), file=sys.stderr)  # as it is called here
