"""Sessions of the virtual kind, and of a stranger's that is made of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from gateway.models import ToolResult
from gateway.sessions import Session
from tests.gateway.conftest import called, opened, running
from tests.sandboxes.test_virtual import MEMORY

pytestmark = pytest.mark.anyio

VIRTUAL = {"default": {"kind": "virtual"}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"file_path": "src/a.py", "content": "import os\nprint('TODO')\n"}),
    ("write_file", {"file_path": "src/.b.txt", "content": "todo: nothing\nTODO: all\n"}),
    ("edit_file", {"file_path": "src/a.py", "old_string": "TODO", "new_string": "done: TODO"}),
    ("edit_file", {"file_path": "src/a.py", "old_string": "absent", "new_string": ""}),
    ("read_file", {"file_path": "src/a.py"}),
    ("read_file", {"file_path": "missing"}),
    ("read_file", {"file_path": "/etc/passwd"}),
    ("ls", {"path": "src"}),
    ("glob", {"pattern": "**/*.py"}),
    ("grep", {"pattern": "TODO"}),
    ("grep", {"pattern": "todo", "ignore_case": True, "output_mode": "count"}),
    ("grep", {"pattern": "TODO", "glob": "*.py", "context": 1}),
    ("grep", {"pattern": "TODO", "output_mode": "files_with_matches", "path": "src"}),
    ("grep", {"pattern": "nowhere"}),
    ("bash", {"command": "cat src/a.py | wc -l | tr -d ' '; exit 3"}),
    ("bash", {"command": "pwd", "cwd": "src"}),
    ("bash", {"command": "echo out; echo err >&2"}),
    ("bash", {"command": "sleep 5", "timeout_s": 0.2}),
]


def in_short(result: ToolResult) -> tuple[Any, ...]:
    error = result.error and (result.error.code, result.error.message)
    return result.tool, result.status, result.exit_code, result.text, error


async def answers(gateway: Gateway) -> list[tuple[Any, ...]]:
    session = await opened(gateway)
    return [in_short(await called(gateway, session, tool, **arguments)) for tool, arguments in CALLS]


@pytest.mark.needs("local")
async def test_file_and_text_tools_answer_as_they_do_on_local(tmp_path: Path) -> None:
    async with running(tmp_path / "local") as gateway:
        expected = await answers(gateway)
    async with running(tmp_path / "virtual", profiles=VIRTUAL) as gateway:
        assert await answers(gateway) == expected


async def test_tools_that_lack_their_program_are_not_offered(state_dir: Path) -> None:
    tools = [{"name": "first", "argv": ["head", "-1", "x"]}, {"name": "count", "argv": ["python3", "-c", "print(1)"]}]
    async with running(state_dir, profiles=VIRTUAL, tools=tools) as gateway:
        session = await opened(gateway)
        names = [tool.name for tool in session.tools]
        assert ("bash" in names, "first" in names, "python" in names, "count" in names) == (True, True, False, False)
        result = await called(gateway, session, "python", code="print(1)")
    assert result.error is not None
    assert (result.status, result.error.code) == ("invalid", "unknown_tool")


async def test_a_lost_sandbox_is_seeded_again(state_dir: Path) -> None:
    async with running(state_dir, profiles={"default": {"kind": "virtual", "limits": {"memory": "64MiB"}}}) as gateway:
        session = await opened(gateway, seed=[{"path": "seed", "text": "seeded\n"}])
        await called(gateway, session, "bash", command="echo mine > mine; echo changed > seed")
        lost = await called(gateway, session, "bash", command=MEMORY)
        assert lost.error is not None
        assert (lost.status, lost.error.message) == ("sandbox_lost", "the sandbox has died; its files are lost")
        assert (await called(gateway, session, "bash", command="ls; cat seed")).text == "seed\nseeded"


async def test_files_are_gone_after_a_restart_and_seeds_are_back(state_dir: Path) -> None:
    async with running(state_dir, profiles=VIRTUAL) as gateway:
        session = await opened(gateway, seed=[{"path": "seed", "text": "seeded\n"}])
        await called(gateway, session, "write_file", file_path="mine", content="")
    async with running(state_dir, profiles=VIRTUAL) as gateway:
        again = next(one for one in gateway.sessions if one.id == session.id)
        assert (await called(gateway, again, "bash", command="ls; cat seed")).text == "seed\nseeded"


STRANGER = """
from sandboxes import VirtualKind


class Quiet(VirtualKind):
    name = "quiet"
"""
STRANGERS_TEST = """
import pytest
from sandboxes import SandboxSpec
from sandboxes.conformance import SandboxConformance
from stranger_kinds import Quiet


class TestQuiet(SandboxConformance):
    exceptions = {"test_exec_tells_a_signal_from_a_code": "send signals"}

    @pytest.fixture
    async def sandbox(self, tmp_path):
        kind = Quiet(tmp_path, instance="test")
        yield await kind.open(SandboxSpec("conformance"))
        await kind.aclose()
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    (tmp_path / "stranger_kinds.py").write_text(STRANGER)
    return tmp_path


async def test_a_strangers_kind_serves_sessions(stranger: Path, state_dir: Path) -> None:
    profiles = {"default": {"kind": "stranger_kinds:Quiet"}}
    async with running(state_dir, stranger, profiles=profiles) as gateway:
        session: Session = await opened(gateway)
        assert session.record().kind == "quiet"
        assert (await called(gateway, session, "bash", command="echo hi")).text == "hi"


def test_a_stranger_can_run_the_suite_of_all_kinds(stranger: Path) -> None:
    """The suite is in the wheel, so nothing of `tests` is needed."""
    (stranger / "test_quiet.py").write_text(STRANGERS_TEST)
    chosen = "exec_returns or tells_a_signal or gives_the_same_bytes or links_are_followed"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp=run", "-k", chosen, "test_quiet.py"],
        cwd=stranger,
        capture_output=True,
        text=True,
    )
    assert "3 passed, 1 skipped" in done.stdout, done.stdout
