"""Short words for tests that run programs in a sandbox."""

import os

import anyio

from sandboxes import CommandRefused, Sandbox
from sandboxes.conformance import SIGKILL as SIGKILL
from sandboxes.conformance import Ran as Ran
from sandboxes.conformance import host_processes as host_processes
from sandboxes.conformance import read as read
from sandboxes.conformance import run as run
from sandboxes.conformance import sh as sh


async def python(sandbox: Sandbox, code: str, *arguments: str, timeout: float | None = 30) -> Ran:
    return await run(sandbox, "python3", "-c", code, *arguments, timeout=timeout)


FORKS_FOR_EVER = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(20); os._exit(0)
    except OSError:
        time.sleep(0.01)
"""


async def first_refusal(sandbox: Sandbox) -> CommandRefused:
    """Start programs until one is refused, which must come soon."""
    with anyio.fail_after(15):
        while True:
            try:
                await sh(sandbox, "true")
            except CommandRefused as refused:
                return refused


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def gone(marker: str, seconds: float = 2, below: int | None = None) -> bool:
    """Whether no process with the marker is left within the time."""
    with anyio.move_on_after(seconds):
        while host_processes(marker, below):
            await anyio.sleep(0.02)
        return True
    return False
