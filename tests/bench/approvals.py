"""What a thousand approvals that nobody decides cost: after their calls ended `pending`, and while calls are held."""

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
import psutil

from gateway.models import CallRequest
from tests.bench.figures import Figure, at_most, shown
from tests.gateway.conftest import opened, running

COUNT = 1000
IDLE_SECONDS = 10.0
SETTLE_SECONDS = 1.0


def measure_approvals() -> list[Figure]:
    """Each in a process of its own, so that memory is counted from where it was."""
    pending, held = (_measured(seconds) for seconds in (0.01, 600.0))
    return [
        at_most("1,000 pending approvals, memory", pending["megabytes"], "MB", 10),
        at_most("1,000 pending approvals, CPU over 10 idle s", pending["cpu_ms"], "ms", 50),
        shown("1,000 calls held for an approval, memory", held["megabytes"], "MB", "the calls themselves, in process"),
        at_most("1,000 calls held for an approval, CPU over 10 idle s", held["cpu_ms"], "ms", 50),
    ]


def _measured(wait_seconds: float) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(wait_seconds)], capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


async def main(wait_seconds: float) -> None:
    sections: dict[str, Any] = {
        "profiles": {"default": {"permission": "ask"}},
        "server": {"approval_wait_seconds": wait_seconds},
    }
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), **sections) as gateway:
            session, process = await opened(gateway), psutil.Process()
            await (await gateway.start_call(session, CallRequest(tool="read_result"))).wait()
            gc.collect()
            before = process.memory_info().rss
            for number in range(COUNT):
                call = await gateway.start_call(session, CallRequest(tool="ls", arguments={"path": f"{number}"}))
                if wait_seconds < 1:
                    await call.wait()
            while session.running and gateway.approvals.held < COUNT:
                await anyio.sleep(0.1)
            await anyio.sleep(SETTLE_SECONDS)
            gc.collect()
            grown, start = process.memory_info().rss - before, process.cpu_times()
            await anyio.sleep(IDLE_SECONDS)
            end = process.cpu_times()
            gateway.approvals.release()
    milliseconds = (end.user + end.system - start.user - start.system) * 1000
    print(json.dumps({"megabytes": grown / 1e6, "cpu_ms": milliseconds}))


if __name__ == "__main__":
    anyio.run(main, float(sys.argv[1]))
