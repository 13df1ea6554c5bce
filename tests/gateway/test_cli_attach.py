"""`sandgate attach` on a real terminal."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from gateway.cli.attach import MODES_RESET, Keys
from tests.gateway.commandline import SANDGATE, SECONDS, Serving, environment, sandgate, serve

pytestmark = pytest.mark.needs("local")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(tmp_path_factory.mktemp("attach") / "state") as one:
        yield one


@pytest.fixture
def session(serving: Serving) -> str:
    """An open session, by its id."""
    told = serving.run("exec", "--keep", "--", "true").stderr
    return told.split()[1]


class Window:
    """A terminal, and the command that has it as its own."""

    def __init__(self, serving: Serving, *arguments: str) -> None:
        self.master, slave = os.openpty()
        self.shown = b""
        self.resize(100, 30)
        self.modes: list[Any] = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            [SANDGATE, *arguments],
            env=environment(SANDGATE_URL=serving.url, SANDGATE_STATE_DIR=str(serving.state_dir)),
            preexec_fn=lambda: os.login_tty(slave),
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, text: bytes) -> bytes:
        """What is shown until that is, and is forgotten then."""
        deadline = time.monotonic() + SECONDS
        while text not in self.shown:
            assert select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self.master, 65536)
        place = self.shown.index(text) + len(text)
        shown, self.shown = self.shown[:place], self.shown[place:]
        return shown

    def ended(self) -> int:
        """Its exit code; the terminal's modes are then what they were."""
        self.until(MODES_RESET)
        code = self.process.wait(SECONDS)
        assert termios.tcgetattr(self._slave) == self.modes
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@contextmanager
def attached(serving: Serving, session: str) -> Iterator[Window]:
    with Window(serving, "attach", session) as window:
        window.until(b"Ctrl-] d leaves")
        yield window


def test_keys_size_and_exit_code_pass(serving: Serving, session: str) -> None:
    with attached(serving, session[:12]) as window:
        window.press(b"stty size\r")
        window.until(b"30 100")
        window.resize(70, 20)
        window.press(b"until stty size | grep '20 70'; do sleep 0.1; done\r")
        window.until(b"\r20 70\r")
        window.press(b"sh -c 'echo re$((1))ady; sleep 1000'\r")
        window.until(b"re1ady")  # so that the interrupt meets a program, and not the shell between two
        window.press(b"\x03")
        window.until(b"$ ")
        window.press(b"echo a$((1))b\r")
        window.until(b"a1b")
        window.press(b"exit 5\r")
        assert window.ended() == 5


def test_leaving_restores_the_terminal_and_coming_back_shows_what_was_missed(serving: Serving, session: str) -> None:
    """The shell's modes are its own: whatever a program has set, ours are given back."""
    with attached(serving, session) as window:
        window.press(b"printf '\\033[?1049h\\033[?25l\\033[?1003h'; read line; echo got $line\r")
        window.until(b"\x1b[?1003h")
        window.press(b"\x1dd")
        assert window.ended() == 0
        window.until(b"left; sandgate attach ")
    with attached(serving, session) as window:
        window.until(b"\x1b[?1003h")
        window.press(b"x\x1d\x1dy\r")
        window.until(b"got x\x1dy")
        window.press(b"\x1dd")
        assert window.ended() == 0


def test_another_reader_takes_the_terminal(serving: Serving, session: str) -> None:
    with attached(serving, session) as first, attached(serving, session) as second:
        assert first.ended() == 1
        first.until(b"another reader took this terminal")
        second.press(b"exit\r")
        assert second.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(serving: Serving, session: str, number: signal.Signals) -> None:
    with attached(serving, session) as window:
        window.press(b"echo a$((1))b\r")
        window.until(b"a1b")
        window.process.send_signal(number)
        assert window.ended() == 128 + number


def test_a_session_that_ends_is_told(serving: Serving, session: str) -> None:
    with attached(serving, session) as window:
        window.press(b"echo a$((1))b\r")
        window.until(b"a1b")
        assert serving.run("close", session).returncode == 0
        assert window.ended() == 1
        window.until(b"its session or sandbox has ended")


def test_without_a_terminal_it_says_what_to_do(serving: Serving, session: str) -> None:
    done = serving.run("attach", session)
    assert (done.returncode, done.stdout) == (1, "")
    assert "attach needs a terminal" in done.stderr


def test_a_session_that_is_not_there_is_told(tmp_path: Path, serving: Serving) -> None:
    with Window(serving, "attach", "s-nothing") as window:
        window.until(b"no session with an id that begins with")
        assert window.process.wait(SECONDS) == 1
    assert re.search(r"(?m)^ .*attach +Open a session's terminal", sandgate("--help").stdout)


@pytest.mark.parametrize(
    ("pieces", "typed", "left"),
    [
        ([b"abc"], b"abc", False),
        ([b"a\x1ddb"], b"a", True),
        ([b"a\x1d", b"d"], b"a", True),
        ([b"a\x1d", b"\x1d", b"d"], b"a\x1dd", False),
        ([b"\x1dx"], b"\x1dx", False),
        ([b""], b"", False),
    ],
)
def test_keys_that_leave_are_told_from_others(pieces: list[bytes], typed: bytes, left: bool) -> None:
    keys = Keys()
    assert (b"".join(map(keys.typed, pieces)), keys.left) == (typed, left)
