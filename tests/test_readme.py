"""The README is run: every block marked `console` or `python`, in its order, and its toml is loaded."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.build import build_hook, build_sandbox_hooks, build_tool
from gateway.models import LlmAnswer, LlmCall, TokenUsage, TurnRequest
from gateway.settings import load_settings
from tests.gateway.conftest import called, opened, running

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())

pytestmark = [pytest.mark.needs("local"), pytest.mark.xdist_group("readme")]


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Newcomer"]:
    one = Newcomer(tmp_path_factory.mktemp("newcomer"))
    yield one
    one.stop()


class Newcomer:
    """Somebody with an empty folder, who types what the README says; port 8710 is theirs, or another in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "SANDGATE_STATE_DIR": str(folder / "state"),
            "SANDGATE_URL": f"http://127.0.0.1:{self.port}",
            "SANDGATE_SERVER__PORT": str(self.port),
            "PYTHONPATH": str(ROOT),
        }
        self.gateway: subprocess.Popen[bytes] | None = None
        (folder / "variables").touch()

    def types(self, line: str) -> str:
        """Run one line; `serve &` is kept running until the end."""
        line = line.replace("8710", str(self.port))
        if line == "sandgate serve &":
            self.serve()
            return ""
        done = subprocess.run(
            [
                "bash",
                "-c",
                f". ./variables; {line}; status=$?; declare -p SANDGATE_TOKEN ID 2>/dev/null > variables; exit $status",
            ],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self) -> None:
        """Start the gateway, unless it runs already."""
        if self.gateway is not None:
            return
        self.gateway = subprocess.Popen(
            ["sandgate", "serve"],
            cwd=self.folder,
            env=self.environment,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("sandgate serve did not listen within 20 s")

    def stop(self) -> None:
        if self.gateway is not None:
            self.gateway.send_signal(signal.SIGTERM)
            assert self.gateway.wait(30) == 0


def test_readme_has_the_blocks_that_are_run() -> None:
    assert len(blocks("console")) >= 3
    assert len(blocks("python")) >= 3


def test_console_blocks_do_what_they_show(newcomer: Newcomer) -> None:
    """Each `$ ` line exits 0; the lines under it are in its output (`...` stands for anything)."""
    for block in blocks("console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = command.partition("\n")
            if line == "make demo":
                continue  # run by .ci/run before the tests, and by test_demo
            output = newcomer.types(line)
            for shown in expected.splitlines():
                pattern = ".*".join(re.escape(part) for part in shown.split("..."))
                assert re.search(pattern, output), f"$ {line}\n{output}"


def test_python_blocks_run(newcomer: Newcomer) -> None:
    """The modules beside the configuration and the client's program."""
    newcomer.serve()
    token = newcomer.types("sandgate token agent").strip()
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-"],
            input=block,
            cwd=newcomer.folder,
            env={**newcomer.environment, "SANDGATE_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        if "session.turn" in block:
            assert done.stdout == "It says hi\n"
        if "fsspec.open" in block:
            assert done.stdout.rstrip().endswith("b'0,0\\n1,1\\n2,4\\n3,9\\n4,16'")


@pytest.mark.anyio
async def test_hooks_of_the_readme_do_what_it_says(tmp_path: Path, state_dir: Path) -> None:
    """RateLimit, TokenBudget, ArgumentDefaults: ten lines each."""
    [block] = (one for one in blocks("python") if one.startswith("# my_limits.py"))
    (tmp_path / "my_limits.py").write_text(block)
    options: dict[str, dict[str, Any]] = {
        "RateLimit": {"calls": 2, "seconds": 3600},
        "ArgumentDefaults": {"defaults": {"offset": 7}},
        "TokenBudget": {"tokens": 100},
    }
    hooks = [{"use": f"my_limits:{name}", "options": one} for name, one in options.items()]
    async with running(state_dir, tmp_path, profiles={"default": {"kind": "none"}}, hooks=hooks) as gateway:
        session, other = await opened(gateway), await opened(gateway)
        for one in (session, session, session, other):
            await called(gateway, one, "read_result", reference="0001-bash-stdout")
        records = [*await gateway.journal.calls(session.id), *await gateway.journal.calls(other.id)]
        turn = (await gateway.agent_points.begin(session, TurnRequest(user_content="hi"))).turn_id
        before = await gateway.agent_points.before_llm(session, turn, LlmCall())
        await gateway.agent_points.after_llm(
            session, turn, LlmAnswer(usage=TokenUsage(input_tokens=90, output_tokens=10))
        )
        after = await gateway.agent_points.before_llm(session, turn, LlmCall())
    assert [one.status for one in records] == ["failed", "failed", "skipped", "failed"]
    assert records[0].arguments == {"offset": 7, "reference": "0001-bash-stdout"}
    assert [(one.decision, one.reason) for one in (before, after)] == [
        ("continue", ""),
        ("stop", "100 of 100 tokens are used"),
    ]


def test_toml_blocks_are_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, workspace, ready = (one for one in blocks("toml") if "upstreams" not in one)
    for variable in ("TICKETS_TOKEN", "POLICY_TOKEN"):
        monkeypatch.setenv(variable, "not a real one")
    (tmp_path / "ready.toml").write_text(ready)
    (tmp_path / "sandgate.toml").write_text(text)
    (tmp_path / "workspace.toml").write_text(workspace)
    for block in blocks("python"):
        if (name := re.match(r"# (my_\w+\.py)\n", block)) is not None:
            (tmp_path / name[1]).write_text(block)
    settings, folder = load_settings(tmp_path / "sandgate.toml")
    assert [build_hook(one, folder).name for one in settings.hooks] == ["NoPush"]
    assert [build_tool(one, folder).definition.name for one in settings.tools] == ["greet", "first_lines"]
    [upstreams] = (one for one in blocks("toml") if "upstreams" in one)
    (tmp_path / "upstreams.toml").write_text(text + upstreams)
    assert load_settings(tmp_path / "upstreams.toml")[0].profiles["with-git"].upstreams == ("git",)
    prepared = build_sandbox_hooks(load_settings(tmp_path / "workspace.toml")[0], folder)
    assert [type(one).__name__ for one in prepared["default"]] == ["GitIdentity", "Report"]
    ready_hooks = [build_hook(one, folder).name for one in load_settings(tmp_path / "ready.toml")[0].hooks]
    assert ready_hooks == ["RedactSecrets", "CommandHook validate.py", "HttpHook"]
