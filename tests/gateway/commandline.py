"""The command `sandgate` as its users run it: a process of its own."""

import os
import pty
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SANDGATE = str(Path(sys.executable).with_name("sandgate"))
SECONDS = 30.0


def environment(**variables: str) -> dict[str, str]:
    """The tests' own, without any SANDGATE_* of the developer's; nothing of the home folder is used."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SANDGATE_")}
    return {**kept, "NO_COLOR": "1", **variables}


def sandgate(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [SANDGATE, *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def on_terminal(*arguments: str, **variables: str) -> bytes:
    """Run one command on a terminal; returns every byte that it sent there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [SANDGATE, *arguments], env=environment(**variables), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # what a terminal without users answers
        pass
    finally:
        os.close(ours)
        process.wait(SECONDS)
    return seen


@dataclass
class Serving:
    """A gateway that runs; `said` is what it printed until it listened."""

    process: subprocess.Popen[bytes]
    url: str
    said: str
    state_dir: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A client's command on the same machine."""
        return sandgate(
            *arguments, cwd=None, SANDGATE_URL=self.url, SANDGATE_STATE_DIR=str(self.state_dir), **variables
        )

    def token(self, role: str) -> str:
        return (self.state_dir / "tokens" / role).read_text().strip()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Its exit code, and what else it said, on stdout and on stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@contextmanager
def serve(state_dir: Path, *arguments: str, cwd: Path | None = None, **variables: str) -> Iterator[Serving]:
    """`sandgate serve` on a free port, stopped at the end."""
    with subprocess.Popen(
        [SANDGATE, "serve", "--port", "0", "--state-dir", str(state_dir), *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            said = _until_listening(process)
            yield Serving(process, said.split()[3], said, state_dir)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_listening(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    said, deadline = b"", time.monotonic() + SECONDS
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while b"export SANDGATE_URL" not in said:
            assert ready.select(deadline - time.monotonic()), "the gateway does not listen"
            chunk = os.read(process.stdout.fileno(), 65536)
            assert chunk, process.stderr.read().decode()
            said += chunk
    return said.decode()
