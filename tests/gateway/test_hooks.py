"""Hooks as the configuration names them: functions and classes, their signatures, tools, inputs, context, lifecycle."""

import functools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import anyio
import pytest
from pydantic import Field, JsonValue

from gateway.build import build_hook
from gateway.errors import SettingsError, Unprocessable
from gateway.hooks.function import FunctionHook, hook
from gateway.hooks.hook import Continue, Hook, HookContext, Skip
from gateway.hooks.registered import Registered
from gateway.inputs import Depends, SessionInput
from gateway.models import CallRequest, Stream, ToolCall, ToolResult
from gateway.settings import HookSettings
from gateway.tools.tool import ToolContext
from sandboxes import SandboxHook
from tests.gateway.conftest import called, opened, running, served

pytestmark = pytest.mark.anyio

SEEN: list[Any] = []
NO_SANDBOX: dict[str, Any] = {"default": {"kind": "none"}}


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def named(*names: str, **more: Any) -> list[dict[str, Any]]:
    """Entries of `[[hooks]]` for what this module holds."""
    return [{"use": f"{__name__}:{name}", **more} for name in names]


def echo(text: str) -> str:
    """Say it."""
    return text


ECHO = [{"use": f"{__name__}:echo"}]


# functions


@hook
async def shouts(ctx: HookContext, call: ToolCall) -> Continue:
    return Continue(arguments={"text": call.arguments["text"].upper()})  # type: ignore[union-attr]


@hook
def whispers(ctx: HookContext, result: ToolResult) -> Continue:
    SEEN.append(threading.current_thread() is threading.main_thread())
    block = result.content[0].model_copy(update={"text": result.text.lower()})
    return Continue(result=result.model_copy(update={"content": (block,)}))


@hook
def postponed(ctx: "HookContext", call: "ToolCall") -> "Continue":
    return Continue()


def plain(ctx: HookContext, call: ToolCall) -> Continue:
    SEEN.append("sync")
    return Continue()


async def plain_async(ctx: HookContext, call: ToolCall) -> Continue:
    SEEN.append("async")
    return Continue()


pair = FunctionHook(function=plain, async_function=plain_async)


async def test_functions_are_hooks_at_the_point_of_what_they_are_given(state_dir: Path) -> None:
    """seed-facts 1.6; seed-facts 12 row 30: a sync hook is always off the loop."""
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("shouts", "whispers")) as gateway:
        result = await called(gateway, await opened(gateway), "echo", text="Hi")
        [record] = await gateway.journal.calls(result_session := gateway.sessions.open[0].id)
    assert (result.text, result.hooks) == ("hi", ("shouts", "whispers"))
    assert record.arguments == {"text": "HI"}
    assert (record.session_id, SEEN) == (result_session, [False])


async def test_of_a_pair_the_async_function_is_called(state_dir: Path) -> None:
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("pair")) as gateway:
        await called(gateway, await opened(gateway), "echo", text="hi")
    assert SEEN == ["async"]
    assert pair.name == "plain"


def _nested() -> Callable[..., Any]:
    def inner(ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    return inner


class Callables:
    def method(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    @classmethod
    def of_class(cls, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    @staticmethod
    def static(ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    def __call__(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()


class MyContext(HookContext):
    """A subclass is not exactly what hooks are given."""


def unannotated(ctx, call):  # type: ignore[no-untyped-def]
    return Continue()


def lonely(ctx: HookContext) -> Continue:
    return Continue()


def optional(ctx: HookContext, call: Optional[ToolCall]) -> Continue:  # noqa: UP045
    return Continue()


def subclassed(ctx: MyContext, call: ToolCall) -> Continue:
    return Continue()


def extra(ctx: HookContext, call: ToolCall, more: int = 0) -> Continue:
    return Continue()


def unknown(ctx: HookContext, call: "NoSuchThing") -> Continue:  # type: ignore[name-defined]  # noqa: F821
    return Continue()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda ctx, call: Continue(), "a lambda has no name"),
        (_nested(), "a function inside a function"),
        (Callables().method, "a method of one object"),
        (Callables(), "not a function"),
        (functools.partial(plain), "not a function"),
        (unannotated, "not a hook's signature"),
        (lonely, "not a hook's signature"),
        (optional, "not a hook's signature"),
        (subclassed, "not a hook's signature"),
        (unknown, "names what is not there"),
        (extra, "neither given by the gateway nor a session input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_function_that_is_no_hook_is_refused_at_registration(function: Any, reason: str) -> None:
    """seed-facts 1.6, 1.7 and 12 row 28: with the reason, before anything runs."""
    with pytest.raises(SettingsError, match=reason):
        Registered(hook(function))


@pytest.mark.parametrize(
    "given", [{}, {"function": plain_async}, {"async_function": plain}], ids=["none", "async as sync", "sync as async"]
)
def test_pair_whose_halves_are_missing_or_swapped_is_refused(given: dict[str, Any]) -> None:
    """seed-facts 1.6."""
    with pytest.raises(SettingsError):
        FunctionHook(**given)


def test_pair_for_two_points_is_refused() -> None:
    async def after(ctx: HookContext, result: ToolResult) -> Continue:
        return Continue()

    after.__qualname__ = "after"
    with pytest.raises(SettingsError, match="a pair for two points: post_tool_call, pre_tool_call"):
        FunctionHook(function=plain, async_function=after)


@pytest.mark.parametrize("function", [Callables.of_class, Callables.static, plain])
def test_class_and_static_methods_are_functions_of_a_name(function: Callable[..., Any]) -> None:
    """seed-facts 1.7."""
    assert list(Registered(hook(function)).methods) == ["pre_tool_call"]


# classes


class TooFew(Hook):
    async def pre_tool_call(self, call: ToolCall) -> Continue:  # type: ignore[override]
        return Continue()


class TooMany(Hook):
    async def post_tool_call(self, ctx: HookContext, result: ToolResult, more: int = 0) -> Continue:
        return Continue()


class OnlyKeywords(Hook):
    async def pre_tool_call(self, *, ctx: HookContext, call: ToolCall) -> Continue:  # type: ignore[override]
        return Continue()


class NotAGenerator(Hook):
    async def filter_output(self, ctx: HookContext, stream: Stream, chunks: Any) -> Any:  # type: ignore[override]
        return chunks


class SyncGenerator(Hook):
    def filter_output(self, ctx: HookContext, stream: Stream, chunks: Any) -> Any:
        yield b""


class OtherPoint(Hook):
    async def pre_run(self, ctx: HookContext) -> Continue:
        return Continue()


class NoMethods(Hook):
    pass


class Prepares(SandboxHook):
    """seed-facts 6.2: the other kind of hook."""


class NeedsOptions(Hook):
    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError("limit is zero or more")
        self.limit = limit

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"use": "TooFew"}, "takes other parameters than (ctx, call)"),
        ({"use": "TooMany"}, "neither given by the gateway nor a session input"),
        ({"use": "OnlyKeywords"}, "takes other parameters than (ctx, call)"),
        ({"use": "NotAGenerator"}, "not an async generator"),
        ({"use": "SyncGenerator"}, "not an async generator"),
        ({"use": "OtherPoint"}, "pre_run is no point of a hook"),
        ({"use": "NoMethods"}, "has none of pre_agent_turn"),
        ({"use": "plain"}, "a plain function"),
        ({"use": "SEEN"}, "not a Hook"),
        ({"use": "Callables"}, "not a Hook"),
        ({"use": "Prepares"}, "not a Hook"),
        ({"use": "shouts", "options": {"loud": True}}, "not a Hook"),
        ({"use": "NeedsOptions"}, "missing 1 required positional argument"),
        ({"use": "NeedsOptions", "options": {"limit": 1, "more": 2}}, "unexpected keyword argument"),
        ({"use": "NeedsOptions", "options": {"limit": -1}}, "limit is zero or more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hook_that_could_not_be_called_is_refused_at_load(entry: dict[str, Any], reason: str) -> None:
    """seed-facts 1.4 and 12 row 28."""
    with pytest.raises(SettingsError) as refused:
        build_hook(HookSettings(**{**entry, "use": f"{__name__}:{entry['use']}"}), Path())
    assert reason in refused.value.message
    assert refused.value.remedy


# what a hook is given is its own


class Tampers(Hook):
    """Changes what it was given, in place, and says that it changed nothing."""

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        call.arguments["text"] = ctx.call.original_arguments["text"] = "tampered"
        ctx.session.hook_context["a"] = ctx.session.inputs["a"] = "tampered"
        return Continue()

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        SEEN.append((ctx.call.arguments, ctx.call.original_arguments, ctx.session.hook_context))
        return Continue()


async def test_what_a_hook_changes_in_place_changes_nothing(state_dir: Path) -> None:
    """A change that is not a decision would be neither validated nor recorded."""
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("Tampers", "Tampers")) as gateway:
        session = await opened(gateway, hook_context={"a": [1]})
        result = await called(gateway, session, "echo", text="hi")
    assert result.text == "hi"
    assert SEEN == [({"text": "hi"}, {"text": "hi"}, {"a": [1]})] * 2


class NotJson(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        endless: list[Any] = []
        endless.append(endless)
        return Continue(arguments={"text": {"set": {1}, "endless": endless}[str(call.arguments["text"])]})  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", ["set", "endless"])
async def test_arguments_that_are_no_json_are_a_broken_hook(state_dir: Path, kind: str) -> None:
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("NotJson")) as gateway:
        result = await called(gateway, await opened(gateway), "echo", text=kind)
    assert (result.status, result.error and result.error.code) == ("hook", "hook_failed")


class LongReason(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Skip:
        return Skip("x" * 5_000_000)


async def test_reason_without_measure_is_cut(state_dir: Path) -> None:
    """A58: a hook that floods."""
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("LongReason")) as gateway:
        result = await called(gateway, await opened(gateway), "echo", text="hi")
    assert result.status == "skipped"
    assert len(result.text) < 11_000


# context, inputs


class Notes(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        SEEN.append(ctx.session.hook_context)
        return Continue()


async def test_call_adds_to_the_sessions_context_and_never_replaces_it(state_dir: Path) -> None:
    """Design section 7."""
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("Notes")) as gateway:
        session = await opened(gateway, hook_context={"user": "ann"})
        contexts: list[dict[str, JsonValue]] = [{}, {"step": 3}]
        for context in contexts:
            active = await gateway.start_call(
                session, CallRequest(tool="echo", arguments={"text": "hi"}, hook_context=context)
            )
            await active.wait()
        with pytest.raises(Unprocessable, match="hook_context: 'user' is the session's"):
            await gateway.start_call(session, CallRequest(tool="echo", hook_context={"user": "bob"}))
    assert SEEN == [{"user": "ann"}, {"user": "ann", "step": 3}]


class Repository(SessionInput):
    input_id = "acme.repository"

    name: str
    tags: list[str] = Field(default_factory=list)


class OnlyOwn(Hook):
    async def pre_tool_call(
        self, ctx: HookContext, call: ToolCall, repository: Annotated[Repository, Depends(Repository)]
    ) -> Continue | Skip:
        SEEN.append(list(repository.tags))
        repository.tags.append("changed by the hook")
        return Continue() if repository.name.startswith("acme/") else Skip("not your repository")


@hook
def short(ctx: HookContext, call: ToolCall, *, repository: Annotated[Repository, Depends()]) -> Continue:
    SEEN.append(list(repository.tags))
    return Continue()


def where(ctx: ToolContext, repository: Annotated[Repository, Depends()]) -> str:
    """Say which repository this is."""
    return f"{repository.name} {repository.tags} {ctx.session.inputs['acme.repository']}"


async def test_declared_inputs_are_injected_each_a_copy_of_its_own(state_dir: Path) -> None:
    """seed-facts 4.6 and 12 row 26."""
    tools = [{"use": f"{__name__}:where"}]
    async with running(state_dir, profiles=NO_SANDBOX, tools=tools, hooks=named("OnlyOwn", "short")) as gateway:
        session = await opened(gateway, inputs={"acme.repository": {"name": "acme/site", "tags": ["a"]}})
        result = await called(gateway, session, "where")
        other = await opened(gateway, inputs={"acme.repository": {"name": "other"}})
        skipped = await called(gateway, other, "where")
        [definition] = [one for one in session.tools if one.name == "where"]
    assert result.text == "acme/site ['a'] {'name': 'acme/site', 'tags': ['a']}"
    assert (skipped.status, SEEN) == ("skipped", [["a"], ["a"], []])
    assert definition.parameters.get("properties", {}) == {}


async def test_input_survives_a_restart(state_dir: Path) -> None:
    tools = [{"use": f"{__name__}:where"}]
    async with running(state_dir, profiles=NO_SANDBOX, tools=tools) as gateway:
        session = await opened(gateway, inputs={"acme.repository": {"name": "acme/site"}})
    async with running(state_dir, profiles=NO_SANDBOX, tools=tools) as gateway:
        [again] = gateway.sessions.open
        assert again.id == session.id
        assert (await called(gateway, again, "where")).text.startswith("acme/site")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs: 'acme.repository' is missing"),
        ({"acme.repository": {}}, "inputs.acme.repository.name: Field required"),
        ({"acme.repository": {"name": 1}}, "inputs.acme.repository.name: Input should be a valid string"),
        ({"acme.repository": {"name": "a"}, "more": 1}, "inputs: nothing in this session declares 'more'"),
    ],
)
async def test_missing_or_wrong_input_fails_the_opening_before_anything_is_there(
    state_dir: Path, inputs: dict[str, Any], message: str
) -> None:
    """seed-facts 4.6 and 12 row 26; over HTTP 422."""
    profiles = {"default": {"kind": "virtual"}}
    async with served(state_dir, profiles=profiles, hooks=named("OnlyOwn")) as server:
        answer = await server.agent.post("/v1/sessions", json={"inputs": inputs, "collect": ["*"]})
        assert (answer.status_code, answer.json()["detail"]) == (422, message)
        assert await server.gateway.journal.sessions() == []


async def test_input_of_a_hook_over_other_tools_is_not_asked_for(state_dir: Path) -> None:
    hooks = named("OnlyOwn", tools=["no_such_tool_here"])
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=hooks) as gateway:
        assert (await called(gateway, await opened(gateway), "echo", text="hi")).status == "ok"


class Impostor(SessionInput):
    input_id = "acme.repository"


@hook
def impostor(ctx: HookContext, call: ToolCall, repository: Annotated[Impostor, Depends()]) -> Continue:
    return Continue()


@hook
def other_class(ctx: HookContext, call: ToolCall, one: Annotated[Repository, Depends(Repository)]) -> Continue:
    return Continue()


async def test_two_inputs_of_one_id_are_refused(state_dir: Path) -> None:
    """seed-facts 4.6."""
    with pytest.raises(SettingsError, match=r"two session inputs are called 'acme.repository'"):
        async with running(state_dir, profiles=NO_SANDBOX, hooks=named("OnlyOwn", "impostor")):
            pass


def twice(ctx: HookContext, call: ToolCall, one: Annotated[Repository, Depends(Impostor)]) -> Continue:
    return Continue()


def no_input(ctx: HookContext, call: ToolCall, one: Annotated[int, Depends()]) -> Continue:
    return Continue()


@pytest.mark.parametrize(
    ("function", "reason"), [(twice, "names another class"), (no_input, "not a SessionInput with an input_id")]
)
def test_depends_that_means_nothing_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        Registered(hook(function))


# tools of a hook's own


class Remembers(Hook):
    """Counts calls a session, and carries the tool that tells."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.tools = (self.count_calls,)

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        self.calls[ctx.session.id] = self.calls.get(ctx.session.id, 0) + 1
        return Continue()

    def count_calls(self, ctx: ToolContext) -> str:
        """Say how many calls there were."""
        return str(self.calls[ctx.session.id])


async def test_hook_carries_tools_of_its_own(state_dir: Path) -> None:
    """seed-facts 12 row 27."""
    async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("Remembers")) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "echo", text="hi")
        result = await called(gateway, session, "count_calls")
    [definition] = [one for one in session.tools if one.name == "count_calls"]
    assert (result.text, definition.source) == ("2", "hook")


class CarriesEcho(Hook):
    tools = (echo,)


async def test_two_tools_of_one_name_are_refused(state_dir: Path) -> None:
    """seed-facts 12 row 27."""
    with pytest.raises(SettingsError, match="two tools are called 'echo'"):
        async with running(state_dir, profiles=NO_SANDBOX, tools=ECHO, hooks=named("CarriesEcho")):
            pass


# lifecycle


class Warm(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    async def warm_up(self) -> None:
        SEEN.append(("warm", type(self).__name__))

    def close(self) -> None:
        SEEN.append(("closed", type(self).__name__, threading.current_thread() is threading.main_thread()))


class ClosesBadly(Warm):
    def close(self) -> None:
        super().close()
        raise RuntimeError("broken")


class Cold(Warm):
    async def warm_up(self) -> None:
        raise RuntimeError("no key")


shared = Warm()


async def test_one_object_is_warmed_and_closed_once_and_errors_at_the_end_stop_no_other(state_dir: Path) -> None:
    """seed-facts 1.5 and 12 row 29."""
    async with running(state_dir, profiles=NO_SANDBOX, hooks=named("shared", "ClosesBadly", "shared")):
        assert SEEN == [("warm", "Warm"), ("warm", "ClosesBadly")]
        SEEN.clear()
    assert SEEN == [("closed", "ClosesBadly", False), ("closed", "Warm", False)]


async def test_hook_that_does_not_warm_up_stops_the_start_and_the_warm_ones_are_closed(state_dir: Path) -> None:
    with pytest.raises(SettingsError, match="hooks: Cold: warm_up raised RuntimeError: no key"):
        async with running(state_dir, profiles=NO_SANDBOX, hooks=named("Warm", "Cold")):
            pass
    assert SEEN == [("warm", "Warm"), ("closed", "Warm", False)]


# filters


class Filters(Hook):
    """Does to output what its mode says."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def filter_output(
        self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield b"[" + chunk + b"]"
            match self.mode:
                case "raises":
                    raise RuntimeError("broken")
                case "hangs":
                    await anyio.sleep_forever()
                case "no bytes":
                    yield "text"  # type: ignore[misc]
                case "floods":
                    while True:
                        yield b"x" * 1000


async def three(ctx: ToolContext) -> str:
    """Say one, two, three."""
    for word in (b"one", b"two"):
        await ctx.stdout.write(word)
    return "three"


@pytest.mark.parametrize("mode", ["raises", "hangs", "no bytes", "floods"])
@pytest.mark.parametrize("on_failure", ["closed", "open"])
async def test_broken_filter_withholds_the_output_or_is_left_out_where_it_may(
    state_dir: Path, mode: str, on_failure: str
) -> None:
    """A58; seed-facts 12 row 8: its time limit and its failure mode hold for a filter too."""
    entry = {"options": {"mode": mode}, "timeout_seconds": 1.5, "on_failure": on_failure}
    tools = [{"use": f"{__name__}:three"}]
    profiles = {"default": {"kind": "none", "limits": {"results_size": "1MiB"}}}
    async with running(state_dir, profiles=profiles, tools=tools, hooks=named("Filters", **entry)) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "three")
        [record] = await gateway.journal.calls(session.id)
    broken = [one for one in record.decisions if one.hook == "Filters"]
    assert [(one.point, one.decision) for one in broken] == [("filter_output", f"broken ({on_failure})")]
    if on_failure == "closed":
        assert (result.status, result.content) == ("hook", ())
    elif mode == "floods":
        assert result.status == "ok"
        assert "[one]xxx" in result.text
    else:
        assert (result.status, result.text) == ("ok", "[one]twothree")
