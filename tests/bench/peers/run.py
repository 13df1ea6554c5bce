"""Measure the peers in turn, each in a Python environment of its own.

With uv, `uv run --script` makes the environments and keeps them in its cache; without it, each is a virtualenv in
`.bench/peers/`, filled by pip from the same inline metadata (PEP 723).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[2] / ".bench" / "peers"
PEERS = {
    "SWE-ReX": "swe_rex.py",
    "llm-sandbox (bubblewrap)": "llm_sandbox_bubblewrap.py",
    "OpenAI Agents SDK (unix-local)": "openai_agents_unix_local.py",
    "bashkit": "bashkit_shell.py",
    "llm-sandbox (docker)": "llm_sandbox_docker.py",
    "OpenAI Agents SDK (docker)": "openai_agents_docker.py",
    "pydantic-ai-backend's sandboxd": "pydantic_ai_sandboxd.py",
}
# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
METADATA = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
ERROR_CHARS = 300


class PeerTime(TypedDict):
    """One peer: its numbers, or `error` alone beside the name. Never both."""

    name: str
    version: NotRequired[str]
    p50_ms: NotRequired[float]
    plain_ms: NotRequired[float]
    calls: NotRequired[int]
    error: NotRequired[str]


class NotMeasured(Exception):
    """A step towards a peer's number failed; the message is the reason."""


def measure_peers(calls: int = 100, timeout: float = 600) -> list[PeerTime]:
    """Run every peer's script, one after another.

    `timeout` is in seconds, for each peer, with the making of its environment. A peer that fails costs nobody else
    their number.
    """
    return [_measure(name, HERE / script, calls, timeout) for name, script in PEERS.items()]


def run_script(name: str, arguments: Sequence[str], timeout: float = 600) -> Any:
    """Run a script of another shape to its end, and return the JSON that it prints. Raises NotMeasured."""
    deadline, script = time.monotonic() + timeout, HERE / name
    stdout = _run([*_command(script, deadline), str(script), *arguments], deadline)
    return json.loads(stdout.splitlines()[-1])


def _measure(name: str, script: Path, calls: int, timeout: float) -> PeerTime:
    deadline = time.monotonic() + timeout
    try:
        command = _command(script, deadline)
        return _parse(name, _run([*command, str(script), str(calls)], deadline))
    except NotMeasured as exc:
        return {"name": name, "error": str(exc)}


def _command(script: Path, deadline: float) -> list[str]:
    """Return what runs `script` in its own environment, made first where uv does not make it."""
    uv = _find_uv()
    if uv is None:
        return [str(_virtualenv(script, deadline))]
    # The Python that runs us, so that the peers' numbers and ours are from the same one.
    return [uv, "run", "--quiet", "--python", sys.executable, "--script"]


def _find_uv() -> str | None:
    return shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)


def _virtualenv(script: Path, deadline: float) -> Path:
    home = ENVIRONMENTS / script.stem
    python = home / "bin" / "python"
    # `venv` installs pip last: without it, the folder is what an interrupted run left.
    if not (home / "bin" / "pip").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(home)], deadline)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *_dependencies(script)], deadline)
    return python


def _dependencies(script: Path) -> list[str]:
    header = METADATA.search(script.read_text())
    if header is None:
        raise NotMeasured(f"{script.name} has no inline metadata")
    lines = header["content"].splitlines()
    dependencies: list[str] = tomllib.loads("\n".join(line[2:] for line in lines))["dependencies"]
    return dependencies


def _run(command: list[str], deadline: float) -> str:
    """Return the command's stdout; raise NotMeasured when it fails or the deadline passes.

    It runs in a process group of its own, and in an empty folder that is its temporary directory too. The whole group
    is killed at the deadline, for uv's child or a script's server would hold the pipes open; a killed script leaves its
    workspace in the folder, which goes.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**_environment(os.environ), "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as exc:
            raise NotMeasured(f"cannot start {command[0]}: {exc}") from exc
        with process:
            try:
                stdout, stderr = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except BaseException as exc:
                os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the id is still its own
                if isinstance(exc, subprocess.TimeoutExpired):
                    raise NotMeasured("not done within the time limit") from None
                raise
    if process.returncode != 0:
        raise NotMeasured(_reason(stderr) or f"exit code {process.returncode}")
    return stdout


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Leave out what would put this repository, or our own environment, on a peer's path."""
    return {key: value for key, value in ours.items() if not key.startswith("PYTHON") and key != "VIRTUAL_ENV"}


def _reason(stderr: str) -> str:
    """The last line that says something: of a traceback, the exception."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:ERROR_CHARS] if lines else ""


def _parse(name: str, stdout: str) -> PeerTime:
    try:
        row = json.loads(stdout.splitlines()[-1])
        return {
            "name": name,
            "version": str(row["version"]),
            "p50_ms": float(row["p50_ms"]),
            "plain_ms": float(row["plain_ms"]),
            "calls": int(row["calls"]),
        }
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise NotMeasured(f"unreadable answer: {stdout[-ERROR_CHARS:]!r}") from exc


if __name__ == "__main__":
    for peer in measure_peers():
        print(json.dumps(peer))
