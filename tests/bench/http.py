"""The gateway's own figures, over HTTP, against `sandgate serve` in a process of its own."""

import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.bench.figures import Figure, at_least, at_most

CLIENTS = 8
FLOOD_BYTES = 500_000_000
HOOKS = """
from gateway.hooks.hook import Continue, Hook


class First(Hook):
    async def pre_tool_call(self, ctx, call):
        return Continue()

    async def post_tool_call(self, ctx, result):
        return Continue()


class Second(First):
    pass
"""
CONFIGURATION = """
[server]
port = {port}

[agent]
profiles = ["default", "never"]

[profiles.default]
[profiles.never]

[offload]
rules = [{{ tools = ["bash"], over_chars = 30000 }}, {{ tools = ["python"], when = "never" }}]
"""
TWO_HOOKS = """
[[hooks]]
use = "bench_hooks:First"

[[hooks]]
use = "bench_hooks:Second"
"""


@dataclass(frozen=True)
class Serving:
    """A running `sandgate serve`."""

    port: int
    token: str
    process: psutil.Process
    http: httpx2.Client

    def session(self) -> str:
        answer = self.http.post("/v1/sessions", json={}).raise_for_status()
        return str(answer.json()["id"])

    def call(self, session: str, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = self.http.post(f"/v1/sessions/{session}/calls", json={"tool": tool, "arguments": arguments})
        result: dict[str, Any] = answer.raise_for_status().json()
        return result


@contextmanager
def serving(*, hooks: bool) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        (folder / "bench_hooks.py").write_text(HOOKS)
        (folder / "sandgate.toml").write_text(CONFIGURATION.format(port=port) + (TWO_HOOKS if hooks else ""))
        environment = {**os.environ, "SANDGATE_AGENT_TOKEN": "bench-agent", "SANDGATE_OPERATOR_TOKEN": "bench-operator"}
        process = subprocess.Popen(
            [Path(sys.executable).with_name("sandgate"), "serve", "--state-dir", folder / "state"],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx2.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=120, headers={"authorization": "Bearer bench-agent"}
            ) as http:
                _wait_ready(http)
                yield Serving(port, "bench-agent", psutil.Process(process.pid), http)
        finally:
            process.terminate()
            process.wait(30)


def _wait_ready(http: httpx2.Client) -> None:
    for _ in range(400):
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError("sandgate serve did not become ready")


def measure_http() -> list[Figure]:
    with serving(hooks=True) as server:
        sessions = [server.session() for _ in range(CLIENTS)]
        for session in sessions:
            server.call(session, "bash", command="echo hi")
        one = statistics.median(_load(server, sessions[:1], 300)["times"])
        many = _load(server, sessions, 250)
        rate = len(many["times"]) / many["seconds"]
    return [
        at_most("HTTP bash call of echo hi, two hooks, both records, p50", one, "ms", 3.0, "aim 2"),
        at_least(f"the same with {CLIENTS} clients", rate, "calls/s", 500, "aim 1,000"),
    ]


def _load(server: Serving, sessions: list[str], calls: int) -> dict[str, Any]:
    program = Path(__file__).with_name("http_load.py")
    done = subprocess.run(
        [sys.executable, program, "127.0.0.1", str(server.port), server.token, ",".join(sessions), str(calls)],
        capture_output=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measure_floods() -> list[Figure]:
    """500 MB of output: cut to 1 MB by the rules, and stored; what the gateway's memory grows by, and the digest."""
    code = (
        "import sys; b = b'0123456789abcde\\n' * 65536\n"
        f"for _ in range({FLOOD_BYTES} // len(b)): sys.stdout.buffer.write(b)"
    )
    size = FLOOD_BYTES // (16 * 65536) * 16 * 65536
    whole = hashlib.sha256()
    for _ in range(size // (16 * 65536)):
        whole.update(b"0123456789abcde\n" * 65536)
    with serving(hooks=False) as server:
        session = server.session()
        server.call(session, "bash", command="seq 1 50000")
        with memory_growth(server.process) as capped:
            server.call(session, "python", code=code)
        started = time.perf_counter()
        with memory_growth(server.process) as stored:
            result = server.call(session, "bash", command=f'python3 -c "{code}"')
        seconds = time.perf_counter() - started
        [reference] = result["references"]
        right = float(reference["sha256"] == whole.hexdigest() and reference["bytes"] == size)
    return [
        at_most("500 MB with a 1 MB cap: gateway memory", capped[0], "MB more", 64),
        at_most("500 MB offloaded: gateway memory", stored[0], "MB more", 64, f"{seconds:.1f} s"),
        at_least("500 MB offloaded: sha256 is right", right, "", 1),
    ]


@contextmanager
def memory_growth(process: psutil.Process) -> Iterator[list[float]]:
    """The most that the process's resident memory grew by inside the block, in MB, looked at 50 times a second."""
    base = process.memory_info().rss
    peak, done = [base], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    grown = [0.0]
    try:
        yield grown
    finally:
        done.set()
        watcher.join()
        grown[0] = (peak[0] - base) / 1e6
