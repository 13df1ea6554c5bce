"""The virtual kind: bashkit, a shell and a file system that are a library. No program, no kernel feature, no root; for
text work. Its files are in the memory of one process for each sandbox, and gone with it."""

import contextlib
import importlib.metadata
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from sandboxes import interpreter
from sandboxes.capture import Capture
from sandboxes.cgroups import Counters
from sandboxes.channel import Channel
from sandboxes.direct import DirectSandbox
from sandboxes.errors import SandboxError, SandboxUnavailable
from sandboxes.kind import Probe, SandboxKind, SandboxSpec
from sandboxes.sandbox import HOME, JOBS, TERMINALS, WORKSPACE

CANNOT: Final = (
    "run programs (python, git, compilers, what you upload): it has its own versions of some 160 text tools, no more",
    "send signals: a shell that kills itself exits with 128 plus the signal's number",
    "have processes: /proc is made up, processes are not limited, and a call waits for what it started with &",
    "pass arguments that are no UTF-8 to a command",
    "hold back a file from a command by its mode",
    "stop a tool in its middle: what is killed ends before its next step, a jq that runs away after its 60 s",
    "keep its files when the gateway restarts, or when a command uses up the memory",
)
"""What the kind cannot do; `probe()` tells it as a fact."""
BUDGETS: Final = (
    "a file holds 10 MB; all together 100 MB in 10,000 files; folders are 100 deep; a command runs for 60 s and prints "
    "10 MiB"
)
"""bashkit's own limits: 0.20 lets no Python program set those of its files, and holds every path of a command to them,
whatever is mounted there."""
NOT_ENFORCED: Final = ("cpus: each command may keep a processor busy",)
_BASE_ENV: Final = {"HOME": HOME, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "SHELL": "/bin/bash", "PWD": WORKSPACE}
_MOST_BYTES: Final = 100_000_000
_OPEN_SECONDS: Final = 10.0
_PROBE_SESSION: Final = "_probe"
_REMEDY: Final = "Install it: pip install 'sandgate[server]'."
_START_REMEDY: Final = (
    "Give its sandboxes more memory; run the gateway as an ordinary user, or as a root that may become another user."
)


class VirtualSandbox(DirectSandbox):
    """One interpreter process, and the channel to it."""

    kind = "virtual"
    lacks = frozenset({JOBS, TERMINALS})

    def __init__(self, spec: SandboxSpec, link: Channel, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(spec.session_id, link, {**_BASE_ENV, **spec.env}, self._wait, restored=False)
        self._process = process
        small = spec.limits.workspace_size < _MOST_BYTES
        self.not_enforced = (*NOT_ENFORCED, *(("workspace_size: 100 MB, whatever less is asked",) if small else ()))

    @property
    def pid(self) -> int:
        """The interpreter's, on this machine."""
        return self._process.pid

    def counters(self) -> Counters:
        return Counters()

    async def _wait(self) -> None:
        await anyio.to_thread.run_sync(self._process.wait)


class VirtualKind(SandboxKind[VirtualSandbox]):
    """Sandboxes by bashkit. Nothing of them is on disk: both arguments are what every kind is made with."""

    name = "virtual"
    lacks = VirtualSandbox.lacks | {"python3"}

    def __init__(self, state_dir: Path, *, instance: str) -> None:
        super().__init__()

    async def _probe(self) -> Probe:
        """Open a sandbox and run a command in it."""
        try:
            sandbox = await self.open(SandboxSpec(_PROBE_SESSION))
            try:
                out = Capture(1000)
                await sandbox.exec(["echo", "works"], stdout=out, stderr=out, timeout_seconds=_OPEN_SECONDS)
            finally:
                await self.destroy(_PROBE_SESSION)
        except SandboxError as error:
            return Probe(self.name, works=False, reason=error.message, remedy=error.remedy)
        if out.text() != "works\n":
            return Probe(self.name, works=False, reason=f"bashkit: {out.text().strip()[:200]}", remedy=_REMEDY)
        facts = {"bashkit": importlib.metadata.version("bashkit"), "cannot": "; ".join(CANNOT), "at most": BUDGETS}
        return Probe(self.name, works=True, not_enforced=NOT_ENFORCED, facts=facts)

    async def _build(self, spec: SandboxSpec, undo: contextlib.AsyncExitStack) -> VirtualSandbox:
        if spec.read_only:
            raise SandboxUnavailable("a virtual sandbox shows no paths of this machine", "Leave read_only out.")
        ours, process = await _interpreter(spec.limits.memory)
        return VirtualSandbox(spec, Channel(ours, process.kill, files_lost=True), process)

    async def _remove(self, session_id: str) -> None:
        """The files went with the sandbox."""


async def _interpreter(memory: int) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """A new one that is ready, and our end of its channel; nothing is left of one that does not get so far."""
    with contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(ours.close)
        with theirs:
            process = await anyio.to_thread.run_sync(_started, theirs, memory)
        undo.callback(_ended, process)
        await _ready(ours)
        undo.pop_all()
    return ours, process


def _started(channel: socket.socket, memory: int) -> "subprocess.Popen[bytes]":
    """An interpreter with an empty environment, no input and no output but the channel."""
    package = importlib.util.find_spec("bashkit")
    if package is None or package.origin is None:
        raise SandboxUnavailable("bashkit is not installed", _REMEDY)
    number, packages = str(channel.fileno()), str(Path(package.origin).parent.parent)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", interpreter.__file__, number, packages, str(memory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(channel.fileno(),),
            env={},
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxUnavailable(f"the interpreter could not be started: {error}") from error


async def _ready(ours: socket.socket) -> None:
    ours.setblocking(False)
    with anyio.move_on_after(_OPEN_SECONDS):
        await anyio.wait_readable(ours)
    with contextlib.suppress(OSError):
        if ours.recv(64) == interpreter.READY:
            return
    raise SandboxUnavailable("the interpreter did not start", _START_REMEDY)


def _ended(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
