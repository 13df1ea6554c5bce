"""The gateway's end of the launcher: start it, ask for bubblewraps, hear of their ends."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from sandboxes.errors import SandboxUnavailable

_PROGRAM: Final = Path(__file__).with_name("launcher.py")
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """One bubblewrap to start: `uid` -1 keeps the gateway's; `sources` are shown below `stage`, by name."""

    argv: Sequence[str]
    uid: int = -1
    stage: str = ""
    sources: Sequence[tuple[str, Path]] = ()
    cgroups: Sequence[Path] = ()


@dataclass(slots=True)
class Bubblewrap:
    """A running bubblewrap, as the launcher sees it; `exited` is set when it is reaped."""

    id: str
    pid: int = 0
    status: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Launching:
    """One launcher process. When it dies all its sandboxes die with it, and the next start makes a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._running: dict[str, Bubblewrap] = {}
        self._ids = itertools.count(1)

    async def start(self, start: Start, fds: Sequence[int]) -> Bubblewrap:
        """Start a bubblewrap; the first descriptor is its standard error, the others its 3, 4, 5 and so on."""
        sock = self._ensure()
        child = Bubblewrap(id=str(next(self._ids)))
        self._running[child.id] = child
        with contextlib.suppress(OSError):  # a launcher that is gone has told so: `exited` is set
            socket.send_fds(sock, [_message(child.id, start)], list(fds))
        await child.started.wait()
        if child.pid == 0:
            raise SandboxUnavailable(f"bubblewrap could not be started: {os.strerror(child.status)}")
        return child

    def kill(self, child: Bubblewrap) -> None:
        """Kill the outer bubblewrap; what is inside dies with it. For a start that never became ready."""
        if self._socket is not None and not child.exited.is_set():
            with contextlib.suppress(OSError):
                self._socket.send(b"kill\0" + child.id.encode())

    async def aclose(self) -> None:
        """End the launcher, and with it every sandbox that is left."""
        process = self._process
        self._forget()
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(process.wait, _CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ensure(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={},
                start_new_session=True,
            )  # a terminal's Ctrl-C is for the gateway, which ends us in order
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear)
        self._socket = ours
        return ours

    def _hear(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        word, identifier, number = data.decode().split("\0")
        child = self._running.get(identifier)
        if child is not None:
            self._told(child, word, int(number))

    def _told(self, child: Bubblewrap, word: str, number: int) -> None:
        if word == "started":
            child.pid = number
        else:
            child.status = number
            child.exited.set()
            del self._running[child.id]
        child.started.set()

    def _gone(self) -> None:
        process = self._process
        self._forget()
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _forget(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
        self._socket = self._process = None
        for child in self._running.values():
            child.exited.set()
            child.started.set()
        self._running.clear()


def _message(identifier: str, start: Start) -> bytes:
    fields: list[str] = ["open", identifier, str(start.uid), start.stage, str(len(start.sources))]
    for name, source in start.sources:
        fields += [name, str(source)]
    fields += [str(len(start.cgroups)), *map(str, start.cgroups), *start.argv]
    return b"\0".join(os.fsencode(text) for text in fields)
