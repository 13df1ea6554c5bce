"""HaystackHook: Haystack's own hook objects, unmodified, at our tool points."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from haystack.components.agents.state import State
from haystack.components.agents.state.state_utils import replace_values
from haystack.dataclasses import ChatMessage
from haystack.dataclasses import ToolCall as PendingCall
from haystack.hooks import FunctionHook, hook
from haystack.hooks.human_in_the_loop import (
    AlwaysAskPolicy,
    BlockingConfirmationStrategy,
    ConfirmationHook,
    ConfirmationUIResult,
    NeverAskPolicy,
    SimpleConsoleUI,
)
from haystack.hooks.tool_result_offloading import (
    AlwaysOffload,
    FileSystemToolResultStore,
    NeverOffload,
    OffloadOverChars,
    ToolResultOffloadHook,
)
from haystack.hooks.tool_result_offloading.types import OffloadPolicy

from gateway.adapters.haystack import HaystackHook
from gateway.build import build_hook, hook_settings
from gateway.errors import SettingsError
from gateway.hooks.registered import Registered
from gateway.models import ToolResult
from gateway.settings import HookSettings
from tests.gateway.conftest import called, opened, running

pytestmark = pytest.mark.anyio

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def echo(text: str, times: int = 1) -> str:
    """Say it."""
    return text * times


def breaks() -> str:
    """Raise something."""
    raise RuntimeError("broken")


SETTINGS: dict[str, Any] = {
    "tools": [{"use": f"{__name__}:echo"}, {"use": f"{__name__}:breaks"}],
    "profiles": {"default": {"kind": "none"}},
}


class adapted:
    """Puts a hook where the configuration finds it: `my_hooks.py` would hold it under a name."""

    hook: HaystackHook


def entries(one: Any, **options: Any) -> dict[str, Any]:
    """Settings of a gateway with this hook; a Haystack object is named as an object of a module is."""
    adapted.hook = HaystackHook(one, **options)
    return {**SETTINGS, "hooks": [{"use": f"{__name__}:adapted.hook"}]}


async def said(state_dir: Path, settings: dict[str, Any], tool: str = "echo", **arguments: Any) -> ToolResult:
    async with running(state_dir, **settings) as gateway:
        return await called(gateway, await opened(gateway), tool, **arguments)


# Haystack's own: human in the loop


class ScriptedUI(SimpleConsoleUI):
    """A confirmation UI that needs no person."""

    def __init__(self, *answers: ConfirmationUIResult) -> None:
        self.answers = list(answers)

    def get_user_confirmation(
        self, tool_name: str, tool_description: str, tool_params: dict[str, Any]
    ) -> ConfirmationUIResult:
        SEEN.append((tool_name, tool_description, tool_params, threading.current_thread() is threading.main_thread()))
        return self.answers.pop(0)


def confirming(*answers: ConfirmationUIResult) -> ConfirmationHook:
    strategy = BlockingConfirmationStrategy(confirmation_policy=AlwaysAskPolicy(), confirmation_ui=ScriptedUI(*answers))
    return ConfirmationHook(confirmation_strategies={("echo", "other"): strategy})


async def test_a_confirmed_call_runs(state_dir: Path) -> None:
    """seed-facts 3: the UI sees the tool as the session does, in a worker thread, and the call goes on."""
    result = await said(state_dir, entries(confirming(ConfirmationUIResult("confirm"))), text="hello")
    assert (result.status, result.text) == ("ok", "hello")
    assert SEEN == [("echo", "Say it.", {"text": "hello"}, False)]


async def test_a_rejected_call_is_skipped_with_the_feedback(state_dir: Path) -> None:
    """seed-facts 3, 12 row 7: a rejection is what the agent reads; it is a skip, not an error."""
    answer = ConfirmationUIResult("reject", feedback="not on Sundays")
    result = await said(state_dir, entries(confirming(answer)), text="hello")
    assert (result.status, result.error and result.error.message) == (
        "skipped",
        "Tool execution for 'echo' was rejected by the user. With user feedback: not on Sundays",
    )


async def test_a_modified_call_runs_with_what_was_changed(state_dir: Path) -> None:
    """seed-facts 3: new parameters are validated as any rewrite is."""
    good = ConfirmationUIResult("modify", new_tool_params={"text": "bye ", "times": 2})
    bad = ConfirmationUIResult("modify", new_tool_params={"txt": "bye"})
    async with running(state_dir, **entries(confirming(good, bad))) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "echo", text="hello")).text == "bye bye "
        assert (await called(gateway, session, "echo", text="hello")).status == "invalid"


async def test_calls_are_confirmed_one_by_one(state_dir: Path) -> None:
    """seed-facts 9 rows 2 and 3: of two equal calls at once each has its own decision."""
    answers = [ConfirmationUIResult("confirm"), ConfirmationUIResult("reject")]
    statuses: list[str] = []
    async with running(state_dir, **entries(confirming(*answers))) as gateway:
        session = await opened(gateway)

        async def call() -> None:
            statuses.append((await called(gateway, session, "echo", text="same")).status)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(call)
    assert sorted(statuses) == ["ok", "skipped"]


# Haystack's own: offloading


def offloading(root: Path) -> ToolResultOffloadHook:
    strategies: dict[str | tuple[str, ...], OffloadPolicy] = {
        "echo": OffloadOverChars(10),
        ("breaks", "other"): AlwaysOffload(),
        "*": NeverOffload(),
    }
    return ToolResultOffloadHook(FileSystemToolResultStore(str(root)), strategies, preview_chars=4)


async def test_a_result_is_offloaded_to_haystacks_store(state_dir: Path, tmp_path: Path) -> None:
    """seed-facts 2.1, 2.4: by Haystack's policies, with its pointer; what is not longer than its limit stays."""
    async with running(state_dir, **entries(offloading(tmp_path / "store"))) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "echo", text="0123456789")).text == "0123456789"
        result = await called(gateway, session, "echo", text="0123456789a")
    [file] = (tmp_path / "store").iterdir()
    assert file.read_text() == "0123456789a"
    assert result.status == "ok"
    assert str(file) in result.text
    assert "0123" in result.text
    assert "456789a" not in result.text


async def test_sessions_that_share_a_store_overwrite_nothing(state_dir: Path, tmp_path: Path) -> None:
    """seed-facts 2.3, 9 row 39: the same tool at the same step in two sessions."""
    async with running(state_dir, **entries(offloading(tmp_path / "store"))) as gateway:
        for number in range(2):
            await called(gateway, await opened(gateway), "echo", text=f"{number}" * 20)
    assert sorted(file.read_text() for file in (tmp_path / "store").iterdir()) == ["0" * 20, "1" * 20]


async def test_an_error_is_not_offloaded(state_dir: Path, tmp_path: Path) -> None:
    """seed-facts 2.1: also under Always; Haystack sees that it is one."""
    result = await said(state_dir, entries(offloading(tmp_path / "store")), "breaks")
    assert (result.status, (tmp_path / "store").exists()) == ("failed", False)


async def test_a_callers_store_is_none_of_haystacks(state_dir: Path, tmp_path: Path) -> None:
    """design 7: what a caller says in hook_context names no store object; its other keys are there."""
    async with running(state_dir, **entries(offloading(tmp_path / "store"))) as gateway:
        session = await opened(gateway, hook_context={"tool_result_store": "file:///tmp/elsewhere", "x": 1})
        assert (await called(gateway, session, "echo", text="0" * 20)).status == "ok"
    assert len(list((tmp_path / "store").iterdir())) == 1


# functions and classes of one's own


@hook
def louder(state: State) -> None:
    SEEN.append((state.get("hook_context"), state.get("step_count"), threading.current_thread().name))
    [call] = state.data["messages"][-1].tool_calls
    changed = PendingCall(call.tool_name, {**call.arguments, "text": call.arguments["text"].upper()}, id=call.id)
    state.set("messages", [ChatMessage.from_assistant(tool_calls=[changed])], handler_override=replace_values)


@hook
async def louder_async(state: State) -> None:
    SEEN.append(threading.current_thread() is threading.main_thread())
    louder.run(state)


@hook
def takes_away(state: State) -> None:
    state.set("messages", [ChatMessage.from_assistant("no")], handler_override=replace_values)


@hook
def adds_a_call(state: State) -> None:
    calls = [*state.data["messages"][-1].tool_calls, PendingCall("echo", {"text": "more"}, id="more")]
    state.set("messages", [ChatMessage.from_assistant(tool_calls=calls)], handler_override=replace_values)


@hook
def swaps_the_tool(state: State) -> None:
    [call] = state.data["messages"][-1].tool_calls
    other = PendingCall("breaks", {}, id=call.id)
    state.set("messages", [ChatMessage.from_assistant(tool_calls=[other])], handler_override=replace_values)


@hook
def raises(state: State) -> None:
    raise RuntimeError("broken")


@hook
def runs_the_tool(state: State) -> None:
    state.data["tools"][0].invoke(text="x")


@hook
def only_looks(state: State) -> None:
    state.set("stop_run", "enough")
    SEEN.append([message.text or message.tool_call_result for message in state.data["messages"]])


BEFORE = [
    (louder, "ok", "HELLO"),
    (louder_async, "ok", "HELLO"),
    (only_looks, "ok", "hello"),
    (takes_away, "skipped", "gave no reason"),
    (adds_a_call, "hook", ""),
    (swaps_the_tool, "hook", ""),
    (raises, "hook", ""),
    (runs_the_tool, "hook", ""),
]


@pytest.mark.parametrize(("one", "status", "text"), BEFORE, ids=lambda one: getattr(one, "name", None))
async def test_a_function_before_the_tool(state_dir: Path, one: FunctionHook, status: str, text: str) -> None:
    """seed-facts 1.2, 1.6, 12 row 30: what is left of the messages decides; whatever else is there closes."""
    result = await said(state_dir, entries(one, point="before_tool"), text="hello")
    assert (result.status, text in result.text) == (status, True)


async def test_a_sync_function_is_off_the_loop(state_dir: Path) -> None:
    """seed-facts 1.6: in Haystack it would block the loop; an async one runs on it."""
    async with running(state_dir, **entries(louder, point="before_tool")) as gateway:
        await called(gateway, await opened(gateway, hook_context={"who": "me"}), "echo", text="x")
    [(context, step, thread)] = SEEN
    assert (context, step, "worker" in thread.lower()) == ({"who": "me"}, 0, True)
    await said(state_dir, entries(louder_async, point="before_tool"), text="x")
    assert SEEN[1] is True


class Shortens:
    """A hook of Haystack's protocol, at after_tool, with a life of its own."""

    def warm_up(self) -> None:
        SEEN.append("warm")

    def close(self) -> None:
        SEEN.append("closed")

    def run(self, state: State) -> None:
        *before, last = state.data["messages"]
        result = last.tool_call_result
        short = ChatMessage.from_tool(result.result[:3], origin=result.origin, error=result.error)
        state.set("messages", [*before, short], handler_override=replace_values)

    def to_dict(self) -> dict[str, Any]:
        return {"type": f"{__name__}.Shortens", "init_parameters": {}}


async def test_a_class_after_the_tool(state_dir: Path) -> None:
    """seed-facts 1.5, 12 row 29: it is warmed and closed once; what it makes of the text is the result."""
    result = await said(state_dir, entries(Shortens(), point="after_tool"), text="hello")
    assert (result.status, result.text, result.hooks) == ("ok", "hel", ("Shortens",))
    assert SEEN == ["warm", "closed"]


@pytest.mark.parametrize(
    ("one", "options", "says"),
    [
        (lambda: ConfirmationHook({}), {"point": "after_tool"}, "it allows before_tool"),
        (lambda: louder, {}, "point None"),
        (lambda: louder, {"point": "before_llm"}, "point 'before_llm'"),
        (lambda: echo, {"point": "before_tool"}, "has no run"),
        (lambda: {"type": "os.system"}, {"point": "before_tool"}, "HaystackHook: "),
        (lambda: {"type": "no.such.Hook"}, {"point": "before_tool"}, "HaystackHook: "),
    ],
)
def test_a_hook_that_does_not_fit_is_refused(one: Callable[[], Any], options: dict[str, Any], says: str) -> None:
    """seed-facts 1.4: at the start, with the reason."""
    with pytest.raises(SettingsError, match=says):
        HaystackHook(one(), **options)


async def test_haystacks_own_form_is_a_configuration(state_dir: Path, tmp_path: Path) -> None:
    """issue, seed-facts 1.7: what Haystack's to_dict writes is an option, and the hook is that again."""
    never = BlockingConfirmationStrategy(confirmation_policy=NeverAskPolicy(), confirmation_ui=SimpleConsoleUI())
    written: dict[str, Any] = {"hook": offloading(tmp_path / "store").to_dict()}
    confirming_never: dict[str, Any] = {"hook": ConfirmationHook({"*": never}).to_dict()}
    for options in (written, confirming_never):
        built = build_hook(HookSettings(use="gateway.adapters.haystack:HaystackHook", options=options), Path())
        assert hook_settings(built).options["hook"] == options["hook"]
    entry = {"use": "gateway.adapters.haystack:HaystackHook", "options": written}
    result = await said(state_dir, {**SETTINGS, "hooks": [entry]}, text="0" * 20)
    assert "offloaded" in result.text
    assert Registered(HaystackHook(louder, point="before_tool")).name == "louder"
