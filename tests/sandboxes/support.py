"""Short words for tests that run programs in a sandbox."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from sandboxes import WORKSPACE, Capture, Exit, Sandbox


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    exit: Exit
    out: bytes
    err: bytes
    timed_out: bool
    seconds: float

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace")


async def run(
    sandbox: Sandbox,
    *argv: str,
    stdin: bytes = b"",
    cwd: str = WORKSPACE,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 30,
    max_bytes: int = 1 << 20,
) -> Ran:
    out, err = Capture(max_bytes), Capture(max_bytes)
    result = await sandbox.exec(argv, stdout=out, stderr=err, cwd=cwd, env=env, stdin=stdin, timeout_seconds=timeout)
    return Ran(result.exit, out.head + out.tail, err.head + err.tail, result.timed_out, result.duration_seconds)


async def sh(sandbox: Sandbox, script: str, timeout: float | None = 30) -> Ran:
    return await run(sandbox, "sh", "-c", script, timeout=timeout)


async def python(sandbox: Sandbox, code: str, *arguments: str, timeout: float | None = 30) -> Ran:
    return await run(sandbox, "python3", "-c", code, *arguments, timeout=timeout)


async def read(sandbox: Sandbox, path: str, start: int = 0, end: int | None = None, *, follow: bool = True) -> bytes:
    return b"".join([chunk async for chunk in sandbox.read(path, start, end, follow=follow)])


def host_processes(marker: str, below: int | None = None) -> list[int]:
    """Processes of this machine whose command line holds the marker: descendants of this test run, or all (0)."""
    root = os.getpid() if below is None else below
    parents = {int(folder.name): _parent(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    return [pid for pid in parents if pid != os.getpid() and _descends(pid, root, parents) and _shows(pid, marker)]


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root


def _shows(pid: int, marker: str) -> bool:
    try:
        return marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def gone(marker: str, seconds: float = 2, below: int | None = None) -> bool:
    """Whether no process with the marker is left within the time."""
    with anyio.move_on_after(seconds):
        while host_processes(marker, below):
            await anyio.sleep(0.02)
        return True
    return False


SIGKILL = int(signal.SIGKILL)
