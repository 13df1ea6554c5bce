"""`make bench`: every figure, side by side with the peers' in one run; also as JSON in `.bench/latest.json`.

`python -m tests.bench docker http` measures these sections only.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.approvals import measure_approvals
from tests.bench.docker import measure_docker
from tests.bench.figures import Figure, at_most, shown
from tests.bench.hooks import measure_hooks
from tests.bench.http import measure_floods, measure_http
from tests.bench.peers.run import measure_peers
from tests.bench.sandbox import measure_sandbox
from tests.bench.stores import measure_stores

ROOT = Path(__file__).parents[2]
LATEST = ROOT / ".bench" / "latest.json"


def main() -> int:
    sections = {
        "sandbox": measure_sandbox,
        "hooks": measure_hooks,
        "docker": measure_docker,
        "http": measure_http,
        "floods": measure_floods,
        "approvals": measure_approvals,
        "stores": measure_stores,
        "peers": _peers,
        "tests": _tests,
    }
    unknown = [name for name in sys.argv[1:] if name not in sections]
    if unknown:
        print(f"no such section: {', '.join(unknown)}; there are: {', '.join(sections)}", file=sys.stderr)
        return 2
    figures = [figure for name in sys.argv[1:] or sections for figure in sections[name]()]
    machine = _machine()
    _print(figures, machine)
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(json.dumps({"machine": machine, "figures": [asdict(one) for one in figures]}, indent=1))
    return 0


def _peers() -> list[Figure]:
    figures = []
    for peer in measure_peers():
        if "error" in peer:
            figures.append(Figure(f"peer: {peer['name']}", float("nan"), "ms", note=f"not measured: {peer['error']}"))
            continue
        note = f"{peer['p50_ms'] / peer['plain_ms']:.1f} x plain; version {peer['version']}"
        figures.append(shown(f"peer: {peer['name']}, echo hi, p50", peer["p50_ms"], "ms", note))
    return figures


def _tests() -> list[Figure]:
    started = time.perf_counter()
    done = subprocess.run(["make", "--no-print-directory", "test"], cwd=ROOT, capture_output=True, check=False)
    note = "" if done.returncode == 0 else f"FAILED with {done.returncode}"
    return [at_most("make test", (time.perf_counter() - started) / 60, "min", 5, note)]


def _machine() -> dict[str, str]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
    }


def _print(figures: list[Figure], machine: dict[str, str]) -> None:
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine.items()))
    for column in ("figure", "value", "unit", "target", "holds", "note"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for one in figures:
        holds = "" if one.holds is None else "yes" if one.holds else "NO"
        value = f"{one.value:,.3f}" if one.value < 1 else f"{one.value:,.2f}"
        table.add_row(one.name, value, one.unit, one.target or "", holds, one.note)
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
