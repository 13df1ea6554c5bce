"""Background jobs as an agent uses them, over both kinds that have them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.models import SessionRequest, ToolResult
from gateway.sessions import Session
from sandboxes import JOB_LOG_BYTES
from sandboxes.conformance import host_processes
from tests.gateway.conftest import OPERATOR, called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]
KINDS = [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("local", "docker")]
on_both = pytest.mark.parametrize("kind", KINDS)


def profile(kind: str, **more: Any) -> dict[str, Any]:
    return {"default": {"kind": kind, **more}}


@asynccontextmanager
async def working(
    state_dir: Path, kind: str, folder: Path = Path(), **sections: Any
) -> AsyncIterator[tuple[Gateway, Session]]:
    """A gateway with one session, which is closed at the end: a container would outlive its gateway."""
    async with running(state_dir, folder, **{"profiles": profile(kind), **sections}) as gateway:
        session = await opened(gateway)
        yield gateway, session
        await gateway.close_session(session)


async def started(gateway: Gateway, session: Session, command: str) -> str:
    result = await called(gateway, session, "bash", command=command, background=True)
    assert result.status == "ok", result
    assert isinstance(result.structured, dict)
    return str(result.structured["job"])


def told(result: ToolResult) -> Any:
    """What a result says as data."""
    assert result.status == "ok", result
    return result.structured


@on_both
async def test_a_job_from_its_start_to_its_end(state_dir: Path, kind: str) -> None:
    async with working(state_dir, kind) as (gateway, session):
        result = await called(gateway, session, "bash", command="echo up; read line; echo got $line", background=True)
        assert (result.structured, result.text.partition(";")[0]) == ({"job": "j-0001"}, "started job j-0001")
        with anyio.fail_after(30):
            while (first := await called(gateway, session, "job_output", job="j-0001")).content == ():
                await anyio.sleep(0.02)
        assert (first.content[0].text, told(first)["state"]) == ("up\n", "running")
        assert (await session.measured()).jobs == 1
        assert (await called(gateway, session, "job_input", job="j-0001", text="this\n")).structured == {
            "job": "j-0001",
            "bytes": 5,
        }
        last = await called(gateway, session, "job_output", job="j-0001", wait_s=30)
        assert (last.content[0].text, told(last)["state"], told(last)["code"]) == ("got this\n", "exit", 0)
        assert last.notes[0].startswith("job j-0001 has ended with exit code 0")
        again = await called(gateway, session, "job_output", job="j-0001", offset=3)
        assert again.content[0].text == "got this\n"
        assert (await session.measured()).jobs == 0
        [listed] = told(await called(gateway, session, "job_list"))
        assert (listed["job"], listed["bytes"]) == ("j-0001", 12)
        assert listed["command"] == "echo up; read line; echo got $line"


@on_both
async def test_another_agents_spelling_is_understood(state_dir: Path, kind: str) -> None:
    """Claude Code's: run_in_background, BashOutput, TaskOutput, KillShell."""
    async with working(state_dir, kind) as (gateway, session):
        await called(gateway, session, "Bash", command="echo hi; sleep 300.201", run_in_background=True)
        output = await called(gateway, session, "TaskOutput", task_id="j-0001", block=True, timeout=500)
        assert output.text.startswith("hi\nnote: job j-0001 is running")
        assert (await called(gateway, session, "BashOutput", bash_id="j-0001")).content == ()
        stopped = await called(gateway, session, "KillShell", shell_id="j-0001")
        assert stopped.text.startswith("job j-0001 has ended with signal 9")
        assert host_processes("300.201", below=0) == []


@on_both
async def test_jobs_end_with_their_session(state_dir: Path, kind: str) -> None:
    async with working(state_dir, kind) as (gateway, session):
        await started(gateway, session, "setsid sleep 300.202 & sleep 300.202")
        report = await gateway.close_session(session)
        assert (report.failed, host_processes("300.202", below=0)) == ((), [])


@on_both
async def test_a_flood_has_a_bound_everywhere(state_dir: Path, kind: str) -> None:
    """A19: neither the gateway's disk nor an answer grows with what a job writes."""
    async with working(state_dir, kind) as (gateway, session):
        job = await started(gateway, session, "yes")
        with anyio.fail_after(60):
            while told(await called(gateway, session, "job_output", job=job, offset=-10))["kept_from"] == 0:
                await anyio.sleep(0.05)
        page = await called(gateway, session, "job_output", job=job, offset=0)
        assert len(page.content[0].text) == 30_000
        assert any("are gone" in note for note in page.notes)
        stopped = told(await called(gateway, session, "job_stop", job=job))
        assert stopped["bytes"] - stopped["kept_from"] <= 2 * JOB_LOG_BYTES
        kept = sum(path.stat().st_size for path in state_dir.rglob("*") if path.is_file())
        assert kept < JOB_LOG_BYTES


@pytest.mark.needs("local")
async def test_pages_never_cut_a_character(state_dir: Path) -> None:
    """R22."""
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        job = await started(gateway, session, "printf 'x'; for i in {1..3000}; do printf 'aé€😀'; done")
        await called(gateway, session, "job_output", job=job, offset=0, wait_s=30)
        text, end = "", 0
        while end < 30_001:
            page = await called(gateway, session, "job_output", job=job, offset=end)
            text, end = text + page.content[0].text, told(page)["end"]
        assert text == "x" + "aé€😀" * 3000


HOOKS = """
from gateway.hooks.hook import Continue, Hook, Skip


class NoServers(Hook):
    async def pre_tool_call(self, ctx, call):
        return Skip("no servers here") if "http.server" in str(call.arguments) else Continue()


class Redact(Hook):
    async def filter_output(self, ctx, stream, chunks):
        async for chunk in chunks:
            yield chunk.replace(b"secret", b"******")
"""


@on_both
async def test_jobs_pass_the_pipeline(tmp_path: Path, state_dir: Path, kind: str) -> None:
    """Hooks before and after, permission and journal, as for every call."""
    (tmp_path / "job_hooks.py").write_text(HOOKS)
    sections: dict[str, Any] = {
        "profiles": profile(kind, permission="quiet"),
        "permissions": {"quiet": {"rules": [{"tools": ["job_input"], "otherwise": "deny"}]}},
        "hooks": [{"use": "job_hooks:NoServers"}, {"use": "job_hooks:Redact", "tools": ["job_*"]}],
    }
    async with working(state_dir, kind, tmp_path, **sections) as (gateway, session):
        skipped = await called(gateway, session, "bash", command="python3 -m http.server", background=True)
        assert skipped.status == "skipped"
        job = await started(gateway, session, "echo the secret; sleep 0.1")
        shown = await called(gateway, session, "job_output", job=job, wait_s=30)
        assert shown.content[0].text == "the ******\n"
        assert (await called(gateway, session, "job_input", job=job, text="x")).status == "denied"
        records = await gateway.journal.calls(session.id)
        assert [(one.tool, one.status) for one in records] == [
            ("bash", "skipped"),
            ("bash", "ok"),
            ("job_output", "ok"),
            ("job_input", "denied"),
        ]


@pytest.mark.needs("local")
async def test_what_cannot_be_done_is_told(state_dir: Path) -> None:
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        missing = await called(gateway, session, "job_output", job="j-0009")
        assert missing.error is not None
        assert (missing.status, missing.error.code) == ("failed", "missing_job")
        assert "job_list" in missing.error.remedy
        job = await started(gateway, session, "exit 3")
        long = await called(gateway, session, "job_output", job=job, wait_s=601)
        assert (long.status, long.error and long.error.code) == ("invalid", "invalid_arguments")
        assert told(await called(gateway, session, "job_output", job=job, wait_s=30))["code"] == 3
        closed = await called(gateway, session, "job_input", job=job, text="x")
        assert (closed.status, closed.error and closed.error.code) == ("failed", "command_failed")
        noted = await called(gateway, session, "bash", command="cat", background=True, timeout_s=5)
        assert noted.notes == ("timeout_s does not end a job: job_stop does, and the end of the session",)
        deaf = await called(gateway, session, "bash", command="sleep 300.203", background=True)
        much = await called(gateway, session, "job_input", job=told(deaf)["job"], text="x" * 1_000_000)
        assert any("send the rest later" in note for note in much.notes)


@pytest.mark.needs("local")
async def test_on_local_a_restart_ends_jobs_and_is_told(state_dir: Path) -> None:
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        job = await started(gateway, session, "sleep 300.204")
    assert host_processes("300.204", below=0) == []
    async with running(state_dir) as gateway:
        again = next(one for one in gateway.sessions if one.id == session.id)
        gone = await called(gateway, again, "job_output", job=job)
        assert gone.error is not None
        assert gone.error.code == "missing_job"
        assert "jobs end with their sandbox" in gone.error.remedy


async def test_kinds_without_jobs_refuse_them_and_name_what_works(state_dir: Path) -> None:
    async with running(state_dir, profiles={**profile("virtual"), "bare": {"kind": "none"}}) as gateway:
        session = await opened(gateway)
        assert [tool.name for tool in session.tools if tool.name.startswith("job_")] == []
        refused = await called(gateway, session, "bash", command="sleep 1", background=True)
        assert refused.error is not None
        assert (refused.status, refused.error.code) == ("invalid", "unsupported_tool")
        assert "local or docker" in refused.error.remedy
        bare = gateway.sessions.find(
            OPERATOR, (await gateway.open_session(OPERATOR, SessionRequest(profile="bare"))).id
        )
        unknown = await called(gateway, bare, "job_list")
        assert (unknown.status, unknown.error and unknown.error.code) == ("invalid", "unknown_tool")
