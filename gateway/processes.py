"""Programs of the operator's, on the host: run to their end with bounded output, killed with all that they started."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, Process

from sandboxes import Capture

OUTPUT_BYTES: Final = 1 << 20
_LEFT_SECONDS: Final = 0.5
"""How long output is still read after the program's end: what it left behind may hold the pipe open."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended: a negative code is the signal. Each output is its first and last half MiB."""

    exit_code: int
    stdout: Capture
    stderr: Capture


async def run(argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: Path) -> Ran:
    """Run a program; where this is cancelled, it and everything below it is dead. What it starts in the background and
    leaves is left. Raises OSError where it cannot be started."""
    process = await anyio.open_process(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd,
        start_new_session=True,
    )  # fmt: skip
    ran = Ran(0, Capture(OUTPUT_BYTES), Capture(OUTPUT_BYTES))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_feed, process, stdin)
            tasks.start_soon(_keep, process.stdout, ran.stdout)
            tasks.start_soon(_keep, process.stderr, ran.stderr)
            code = await process.wait()
            tasks.cancel_scope.deadline = anyio.current_time() + _LEFT_SECONDS
    finally:
        if process.returncode is None:
            kill_tree(process.pid)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    return Ran(code, ran.stdout, ran.stderr)


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # it does not want to read it all
        await process.stdin.send(data)
    await process.stdin.aclose()


async def _keep(stream: ByteReceiveStream | None, capture: Capture) -> None:
    assert stream is not None
    async for chunk in stream:
        await capture.write(chunk)


def kill_tree(root: int) -> None:
    """End a process that leads a session, all of that session, and all below it. They are stopped first, so that none
    forks away; what had left both before, by forking twice, is not found."""
    stopped: set[int] = set()
    while found := _tree(root) - stopped:
        for pid in found:
            _send(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _tree(root: int) -> set[int]:
    parents, found = {}, {root}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    parents[int(folder.name)] = int(fields[1])
                    if int(fields[3]) == root:
                        found.add(int(folder.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
