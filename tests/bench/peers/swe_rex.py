# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "swe-rex>=1.4.0",
#   "aiohttp>=3.12", # its client imports this; swe-rex 1.4.0 does not declare it
# ]
# ///
"""Time SWE-ReX: its own server on loopback, asked over HTTP by its own client, which connects anew for each call."""

import asyncio
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peer_timing import calls_wanted, check_hi, report, time_async_calls
from swerex.runtime.abstract import Command
from swerex.runtime.remote import RemoteRuntime


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(port: int, token: str) -> Iterator[None]:
    """Run the server until the block ends. Its stdout, one line a request, is dropped; stderr is ours."""
    server = [str(Path(sys.executable).with_name("swerex-remote")), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([*server, "--auth-token", token], stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


async def main() -> None:
    port, token = free_port(), secrets.token_hex(16)
    with serving(port, token):
        runtime = RemoteRuntime(auth_token=token, host="http://127.0.0.1", port=port)
        await runtime.wait_until_alive(timeout=60)

        async def run() -> None:
            done = await runtime.execute(Command(command="echo hi", shell=True))
            check_hi(done.exit_code, done.stdout)

        calls = calls_wanted()
        report("SWE-ReX", "swe-rex", await time_async_calls(run, calls), calls)


if __name__ == "__main__":
    asyncio.run(main())
