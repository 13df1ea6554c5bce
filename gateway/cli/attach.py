"""`sandgate attach`: a session's terminal in this one."""

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from cyclopts import Parameter

from gateway.cli.options import StateDir
from gateway.cli.remote import RemoteError, ask, find_session
from gateway.client import Client
from gateway.client.terminal import Terminal

PREFIX: Final = b"\x1d"
"""Ctrl-]; then `d` detaches, and a second one types one."""
MODES_RESET: Final = (
    b"\x1b[!p\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1006l\x1b[?1l\x1b[?2004l\x1b[?25h\x1b>\x1b[0m"
)
"""A soft reset; then what it leaves: the other screen, reports of mouse and focus, bracketed paste, a hidden cursor."""
_BY_SIGNAL: Final = 128


def attach_command(
    session: Annotated[str, Parameter(help="Its id, or how it begins.")], /, *, state_dir: StateDir = None
) -> int:
    """Open a session's terminal here. Its shell runs on when you leave, and shows what you missed when you come back.

    Ctrl-] and then d leaves; Ctrl-] twice types one. Who attaches takes the place of whoever is there. What programs
    show comes as it is: this terminal obeys it, and gets its modes back at the end.

    Exit code: the shell's; 128 + n if signal n ended it; 0 on leaving.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RemoteError("attach needs a terminal", "Run it in one; `sandgate exec` runs a command without.")
    return ask("operator", state_dir, lambda client: _attach(client, session))


async def _attach(client: Client, name: str) -> int:
    session = await find_session(client, name)
    async with session.terminal(*_size()) as terminal:
        print(f"attached to {session.id}; Ctrl-] d leaves", file=sys.stderr)
        with raw_terminal(sys.stdin.fileno(), sys.stdout.fileno()):
            code = await _converse(terminal)
    if terminal.replaced:
        raise RemoteError("another reader took this terminal", f"sandgate attach {session.id} takes it back.")
    if code is None:
        print(f"left; sandgate attach {session.id} comes back", file=sys.stderr)
    return code or 0


@contextmanager
def raw_terminal(keys: int, screen: int) -> Iterator[None]:
    """Give every key to us as it is, and the terminal's modes back at the end, whatever was shown meanwhile."""
    modes = termios.tcgetattr(keys)
    tty.setraw(keys, termios.TCSADRAIN)  # keeps what was typed ahead
    try:
        yield
    finally:
        os.write(screen, MODES_RESET)
        termios.tcsetattr(keys, termios.TCSAFLUSH, modes)
        os.write(screen, b"\r\n")


async def _converse(terminal: Terminal) -> int | None:
    """Until the shell ends (its exit code), a signal ends us, or we leave (None)."""
    code: int | None = None

    async def hear_signals(tasks: TaskGroup) -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP) as signals:
            async for one in signals:
                if one != signal.SIGWINCH:
                    code = _BY_SIGNAL + one
                    tasks.cancel_scope.cancel()
                    return
                await terminal.resize(*_size())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear_signals, tasks)
        tasks.start_soon(_type, terminal, tasks)
        async for data in terminal:
            await anyio.to_thread.run_sync(_show, data, abandon_on_cancel=True)
        if terminal.end is not None:
            code = terminal.end.code + (_BY_SIGNAL if terminal.end.how == "signal" else 0)
        tasks.cancel_scope.cancel()
    return code


async def _type(terminal: Terminal, tasks: TaskGroup) -> None:
    """Send what is typed, until the keys that leave."""
    keys = Keys()
    while not keys.left:
        await anyio.wait_readable(sys.stdin.fileno())
        data = os.read(sys.stdin.fileno(), 4096)
        if typed := keys.typed(data):
            await terminal.send(typed)
        if not data:
            break
    tasks.cancel_scope.cancel()


def _show(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


class Keys:
    """Tells the keys that are for us from those that are typed."""

    def __init__(self) -> None:
        self.left = False
        self._prefixed = False

    def typed(self, data: bytes) -> bytes:
        """What of it goes to the shell; `left` is set where it says so."""
        out = bytearray()
        for place in range(len(data)):
            key = data[place : place + 1]
            if self._prefixed:
                self._prefixed = False
                if key == b"d":
                    self.left = True
                    break
                out += key if key == PREFIX else PREFIX + key
            elif key == PREFIX:
                self._prefixed = True
            else:
                out += key
        return bytes(out)


def _size() -> tuple[int, int]:
    """Columns and rows of our own terminal; one that says 0 knows neither."""
    columns, rows = os.get_terminal_size(sys.stdin.fileno())
    return columns or 80, rows or 24
