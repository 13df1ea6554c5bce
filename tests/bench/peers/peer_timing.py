"""What each peer's script shares: time its command beside a plain subprocess, and print one JSON line.

Standard library only, and imported by file name: a script's own folder is on its path, this repository is not.
"""

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from statistics import median

IMAGE = "sandgate/sandbox"
"""What the Docker peers run, so that none waits for a download."""
WARM_UP_CALLS = 5
DEFAULT_CALLS = 100


def calls_wanted() -> int:
    """The number of calls to time: the script's only argument, else 100."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_CALLS


def check_hi(exit_code: int, stdout: str) -> None:
    """Raise RuntimeError unless the command succeeded and printed exactly `hi`."""
    if (exit_code, stdout) != (0, "hi\n"):
        raise RuntimeError(f"expected exit code 0 and 'hi\\n', got {exit_code} and {stdout!r}")


def run_plain() -> None:
    """Run the same command with nothing around it."""
    done = subprocess.run(["sh", "-c", "echo hi"], capture_output=True)
    check_hi(done.returncode, done.stdout.decode())


def time_calls(run: Callable[[], None], calls: int) -> float:
    """Return the median of `calls` runs in milliseconds, after a few that do not count."""
    taken = []
    for _ in range(WARM_UP_CALLS + calls):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP_CALLS:]) * 1000


async def time_async_calls(run: Callable[[], Awaitable[None]], calls: int) -> float:
    """As `time_calls`, awaiting each run in the loop that is already running."""
    taken = []
    for _ in range(WARM_UP_CALLS + calls):
        start = time.perf_counter()
        await run()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP_CALLS:]) * 1000


def report(name: str, distribution: str, peer_ms: float, calls: int) -> None:
    """Time the plain command in this same process, and print everything as one JSON line."""
    row = {
        "name": name,
        "version": version(distribution),
        "p50_ms": round(peer_ms, 4),
        "plain_ms": round(time_calls(run_plain, calls), 4),
        "calls": calls,
    }
    print(json.dumps(row))
