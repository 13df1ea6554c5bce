"""What a local sandbox costs: a short command beside a plain subprocess, opening, and memory.

    python -m tests.bench.bench_sandbox
"""

import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from sandboxes import Capture, LocalKind, Sandbox, SandboxSpec

ARGV = ["sh", "-c", "echo hi"]


@dataclass(frozen=True)
class Figures:
    """Times are medians in milliseconds; memory is private and dirty, in MiB."""

    exec_ms: float
    subprocess_ms: float
    exec_ratio: float
    read_file_ms: float
    write_file_ms: float
    open_ms: float
    first_open_ms: float
    runner_and_slots_mib: float


async def measure(calls: int = 300, opens: int = 20) -> Figures:
    """Measure on this machine, now; commands and their yardstick take turns, so that a busy moment meets both."""
    with tempfile.TemporaryDirectory() as folder:
        kind = LocalKind(Path(folder), instance="bench")
        try:
            started = time.perf_counter()
            sandbox = await kind.open(SandboxSpec("bench"))
            first_open_ms = (time.perf_counter() - started) * 1e3
            ours, plain = await _commands(sandbox, calls)
            read_ms, write_ms = await _files(sandbox, calls)
            memory = _private_mib(_runner_pids())
            opened = [await _open(kind, f"bench-{number}") for number in range(opens)]
        finally:
            await kind.aclose()
            for path in (Path(folder) / "workspaces").iterdir():
                await kind.destroy(path.name)
    return Figures(ours, plain, ours / plain, read_ms, write_ms, _median(opened), first_open_ms, memory)


async def _commands(sandbox: Sandbox, calls: int) -> tuple[float, float]:
    ours, plain = [], []
    for _ in range(calls // 50):
        for _ in range(50):
            started = time.perf_counter()
            await sandbox.exec(ARGV, stdout=Capture(1 << 20), stderr=Capture(1 << 20))
            ours.append(time.perf_counter() - started)
        for _ in range(50):
            started = time.perf_counter()
            subprocess.run(ARGV, capture_output=True, check=True)
            plain.append(time.perf_counter() - started)
    return _median(ours), _median(plain)


async def _files(sandbox: Sandbox, calls: int) -> tuple[float, float]:
    reads, writes = [], []
    for _ in range(calls):
        started = time.perf_counter()
        await sandbox.write("file", b"x" * 1000)
        written = time.perf_counter()
        async for _ in sandbox.read("file"):
            pass
        reads.append(time.perf_counter() - written)
        writes.append(written - started)
    return _median(reads), _median(writes)


async def _open(kind: LocalKind, session_id: str) -> float:
    started = time.perf_counter()
    sandbox = await kind.open(SandboxSpec(session_id))
    opened = time.perf_counter() - started
    await sandbox.aclose()
    return opened


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def _runner_pids() -> list[int]:
    """Our runner and its slots: descendants of this process that run the runner's file."""
    from tests.sandboxes.support import host_processes

    return host_processes("/run/sandgate/runner.py")


def _private_mib(pids: list[int]) -> float:
    kib = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
    return kib / 1024


if __name__ == "__main__":
    for name, value in asdict(anyio.run(measure)).items():
        print(f"{name:22} {value:8.2f}")
    print(f"{'load':22} {os.getloadavg()[0]:8.2f}")
