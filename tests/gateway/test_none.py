"""Sessions without a sandbox: functions and hooks work, everything that needs files says why it does not."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.doctor import examine
from gateway.errors import SettingsError, Unprocessable
from gateway.gateway import Gateway
from gateway.hooks.hook import Before, Continue, Hook, HookContext
from gateway.models import SessionRequest, ToolCall
from gateway.settings import load_settings
from gateway.tools.tool import ToolContext
from tests.gateway.conftest import AGENT, called, opened, running, served, settings_of

pytestmark = pytest.mark.anyio

SEEN: list[tuple[bool, str | None]] = []


class Looks(Hook):
    """Notes what a hook sees of the sandbox."""

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        SEEN.append((ctx.sandbox.is_executable, ctx.sandbox.workspace))
        return Continue()


def repeat(text: str, times: int) -> str:
    """Say it again and again."""
    return text * times


async def act(ctx: ToolContext) -> str:
    """Try to act in a sandbox."""
    return str(await ctx.hook_sandbox.execute("echo hi"))


SECTIONS: dict[str, Any] = {
    "profiles": {"default": {"kind": "none"}},
    "hooks": [{"use": f"{__name__}:Looks"}],
    "tools": [
        {"use": f"{__name__}:repeat"},
        {"use": f"{__name__}:act"},
        {"name": "listing", "argv": ["ls"]},
    ],
}


@pytest.fixture
async def bare(state_dir: Path) -> AsyncIterator[Gateway]:
    async with running(state_dir, **SECTIONS) as gateway:
        yield gateway


async def test_only_tools_without_a_sandbox_are_listed(bare: Gateway) -> None:
    session = await opened(bare)
    assert [tool.name for tool in session.tools] == ["read_result", "repeat", "act"]
    assert (session.record().kind, session.record().channel) == ("none", None)


async def test_functions_run_and_hooks_see_that_there_is_no_sandbox(bare: Gateway) -> None:
    SEEN.clear()
    result = await called(bare, await opened(bare), "repeat", text="a", times=3)
    assert (result.status, result.text) == ("ok", "aaa")
    assert SEEN == [(False, None)]


async def test_large_results_are_stored_and_read(bare: Gateway) -> None:
    session = await opened(bare)
    large = await called(bare, session, "repeat", text="line\n", times=10_000)
    reference = large.references[0].reference
    page = await called(bare, session, "read_result", reference=reference, lines="9999-10000")
    assert (page.status, page.text) == ("ok", "line\nline")
    saved = await called(bare, session, "read_result", reference=reference, save_to="file")
    assert saved.error is not None
    assert (saved.status, saved.error.code) == ("failed", "no_sandbox")


async def test_tools_of_a_sandbox_are_unknown(bare: Gateway) -> None:
    result = await called(bare, await opened(bare), "bash", command="echo hi")
    assert result.error is not None
    assert (result.status, result.error.code) == ("invalid", "unknown_tool")


async def test_acting_in_a_sandbox_says_that_there_is_none(bare: Gateway) -> None:
    result = await called(bare, await opened(bare), "act")
    assert result.error is not None
    assert (result.status, result.error.code) == ("failed", "no_sandbox")
    assert result.error.message == "this profile has no sandbox"


@pytest.mark.parametrize(
    ("field", "value"), [("seed", [{"path": "a", "text": "b"}]), ("collect", ["out/**"]), ("tools", ["bash"])]
)
async def test_requests_for_files_are_refused(bare: Gateway, field: str, value: Any) -> None:
    with pytest.raises(Unprocessable, match=field):
        await bare.open_session(AGENT, SessionRequest.model_validate({field: value}))


async def test_closing_and_starting_again_are_no_trouble(state_dir: Path) -> None:
    async with running(state_dir, **SECTIONS) as gateway:
        session = await opened(gateway)
    async with running(state_dir, **SECTIONS) as gateway:
        again = gateway.sessions.find(AGENT, session.id)
        assert (await called(gateway, again, "repeat", text="a", times=1)).text == "a"
        assert (await gateway.close_session(again)).failed == ()


async def test_files_over_http_are_refused(state_dir: Path) -> None:
    async with served(state_dir, **SECTIONS) as server:
        session = await server.session()
        answer = await server.agent.get(f"/v1/sessions/{session['id']}/files")
        assert (answer.status_code, answer.json()["code"]) == (422, "no_sandbox")
        assert (await server.anonymous.get("/readyz")).json()["kinds"] == [
            {"name": "none", "works": True, "reason": "", "remedy": "", "not_enforced": []}
        ]


@pytest.mark.parametrize("line", ['seed = [{ from = "x" }]', 'collect = [{ match = "x", to = "y" }]'])
def test_profiles_with_files_and_without_a_sandbox_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "sandgate.toml"
    file.write_text(f'[profiles.default]\nkind = "none"\n{line}\n')
    with pytest.raises(SettingsError, match="kind 'none' has no workspace"):
        load_settings(file)


async def test_doctor_says_what_it_is(tmp_path: Path) -> None:
    settings = settings_of(profiles={"default": {"kind": "none"}})
    checks = {one.name: one for one in await examine(settings, tmp_path, tmp_path / "state")}
    assert (checks["kind none"].verdict, checks["kind none"].needed) == ("ok", True)
    assert checks["kind none"].detail == "functions and hooks only; there is no sandbox"
