"""Hooks around a call: order, chaining, what stops it, and that whatever breaks closes."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.hooks.hook import Before, Continue, Hook, HookContext, Skip
from gateway.hooks.registered import HANGING_THREADS, Registered
from gateway.models import Stream, ToolCall, ToolResult
from gateway.pipeline import Pipeline
from gateway.sessions import Session
from tests.gateway.conftest import called, opened

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


@pytest.fixture
async def session(gateway: Gateway) -> Session:
    return await opened(gateway)


def use(gateway: Gateway, *hooks: Hook | Registered) -> None:
    """Give a running gateway these hooks."""
    pipeline = Pipeline([one if isinstance(one, Registered) else Registered(one) for one in hooks])
    gateway.runner = replace(gateway.runner, pipeline=pipeline)


class Adds(Hook):
    """Appends a word to the command before, and to the text after."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        return Continue(arguments={**call.arguments, "command": f"{call.arguments['command']} {self.word}"})

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        block = result.content[0]
        block = block.model_copy(update={"text": f"{block.text.strip()} after-{self.word}"})
        return Continue(result=result.model_copy(update={"content": (block,)}))


class Answers(Hook):
    """Gives whatever it was told to at one point."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        self.before, self.after = before, after

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Any:
        return Continue() if self.before is None else self.before

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Any:
        return Continue() if self.after is None else self.after


class Raises(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        raise RuntimeError("broken")


class RaisesAfter(Hook):
    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        raise RuntimeError("broken")


async def ran(session: Session) -> bool:
    """Whether the marker that the calls below make is there."""
    sandbox = await session.sandbox()
    return any(entry.path == "ran" for entry in (await sandbox.list()).entries)


async def test_hooks_run_in_list_order_at_both_points(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 1."""
    use(gateway, Adds("one"), Adds("two"))
    result = await called(gateway, session, "bash", command="echo zero")
    assert result.text == "zero one two after-one after-two"
    assert result.hooks == ("Adds",)


async def test_first_skip_ends_the_chain(gateway: Gateway, session: Session) -> None:
    later = Raises()
    use(gateway, Answers(before=Skip("not today")), later)
    result = await called(gateway, session, "bash", command="touch ran")
    assert (result.status, result.error and result.error.message) == ("skipped", "not today")
    assert not result.is_error
    assert not await ran(session)


@pytest.mark.parametrize("reason", ["", "  \n"])
async def test_skip_without_a_reason_gets_a_default_text(gateway: Gateway, session: Session, reason: str) -> None:
    use(gateway, Answers(before=Skip(reason)))
    result = await called(gateway, session, "bash", command="true")
    assert result.error is not None
    assert result.error.message == "skipped by a hook that gave no reason"


@pytest.mark.parametrize(
    "answer",
    [
        False,
        0,
        "",
        {},
        True,
        "allow",
        Continue,
        Continue(arguments=[]),  # type: ignore[arg-type]
        Skip(reason=None),  # type: ignore[arg-type]
    ],
    ids=repr,
)
async def test_what_is_no_decision_before_the_tool_closes(gateway: Gateway, session: Session, answer: Any) -> None:
    """A58: silence is not consent."""
    hook = Answers()
    hook.before = answer
    use(gateway, hook)
    result = await called(gateway, session, "bash", command="touch ran")
    assert result.status == ("hook" if answer is not None else "ok")
    assert not await ran(session)


async def test_none_is_a_broken_hook(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 2. A58."""

    class SaysNothing(Hook):
        async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Any:
            return None

    use(gateway, SaysNothing())
    result = await called(gateway, session, "bash", command="touch ran")
    assert result.status == "hook"
    assert result.error is not None
    assert "NoneType is not a decision of pre_tool_call" in result.error.message
    assert not await ran(session)


async def test_hook_that_raises_before_the_tool_closes(gateway: Gateway, session: Session) -> None:
    """A58."""
    use(gateway, Raises())
    result = await called(gateway, session, "bash", command="touch ran")
    assert result.status == "hook"
    assert not await ran(session)


async def test_open_hook_that_raises_lets_the_call_pass(gateway: Gateway, session: Session) -> None:
    use(gateway, Registered(Raises(), on_failure="open"))
    result = await called(gateway, session, "bash", command="echo hi")
    assert (result.status, result.text) == ("ok", "hi")
    [record] = await gateway.journal.calls(session.id)
    assert [one.decision for one in record.decisions] == ["broken (open)"]


async def test_slow_hook_closes(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 8. A58: a hook that hangs is broken after its limit."""

    class Hangs(Hook):
        async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
            await anyio.sleep_forever()
            raise AssertionError

    use(gateway, Registered(Hangs(), timeout_seconds=0.1))
    result = await called(gateway, session, "bash", command="touch ran")
    assert result.status == "hook"
    assert not await ran(session)


async def test_sync_hook_is_not_called_again_while_four_of_its_threads_hang(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 30, A58; once they are through, it is."""

    class Blocks(Hook):
        calls = 0
        released = threading.Event()

        def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
            self.calls += 1
            self.released.wait(60)
            return Continue()

    hook = Blocks()
    registered = Registered(hook, timeout_seconds=0.05)
    use(gateway, registered)
    try:
        for _ in range(HANGING_THREADS):
            assert (await called(gateway, session, "bash", command="true")).status == "hook"
        refused = await called(gateway, session, "bash", command="true")
        assert refused.error is not None
        assert "still hang" in refused.error.message
        assert hook.calls == HANGING_THREADS
    finally:
        hook.released.set()
    with anyio.fail_after(60):
        while registered.hanging:
            await anyio.sleep(0.01)
    registered.timeout_seconds = 60
    assert (await called(gateway, session, "bash", command="true")).status == "ok"


async def test_hook_that_breaks_after_the_tool_withholds_the_output(gateway: Gateway, session: Session) -> None:
    """A58: withheld from the caller, kept for the operator until retention."""
    use(gateway, RaisesAfter())
    result = await called(gateway, session, "bash", command="echo secret")
    assert (result.status, result.content, result.references) == ("hook", (), ())
    [row] = await gateway.journal.results(session.id)
    assert row.withheld
    content = b"".join([chunk async for chunk in gateway.results.read(session.id, row.key)])
    assert content == b"secret\n"


async def test_post_hook_may_not_give_another_calls_result(gateway: Gateway, session: Session) -> None:
    other = ToolResult(id="c-9999", tool="bash", status="ok")
    use(gateway, Answers(after=Continue(result=other)))
    assert (await called(gateway, session, "bash", command="true")).status == "hook"


async def test_rewrite_that_breaks_the_schema_is_invalid_and_names_the_hook(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 5."""
    use(gateway, Answers(before=Continue(arguments={"comand": "true"})))
    result = await called(gateway, session, "bash", command="touch ran")
    assert result.status == "invalid"
    assert result.error is not None
    assert result.error.message.startswith("Answers rewrote the arguments")
    assert not await ran(session)


async def test_hook_runs_only_for_its_tools(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 4."""
    use(gateway, Registered(Raises(), tools=("read_*", "ls")))
    assert (await called(gateway, session, "bash", command="true")).status == "ok"
    assert (await called(gateway, session, "ls")).status == "hook"
    assert (await called(gateway, session, "read_file", file_path="x")).status == "hook"


async def test_post_hook_sees_failures_with_the_effective_arguments(gateway: Gateway, session: Session) -> None:
    seen: list[tuple[str, Any]] = []

    class Looks(Hook):
        async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
            seen.append((result.status, ctx.call.arguments["command"]))
            return Continue()

    use(gateway, Answers(before=Continue(arguments={"command": "exit 7"})), Looks())
    result = await called(gateway, session, "bash", command="true")
    assert (result.status, result.exit_code) == ("exit", 7)
    assert seen == [("exit", "exit 7")]


async def test_post_hook_sees_large_output_cut_and_its_whole_body(gateway: Gateway, session: Session) -> None:
    seen: dict[str, Any] = {}

    class Looks(Hook):
        async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
            assert ctx.body is not None
            seen["shown"] = len(result.content[0].text)
            seen["size"] = ctx.body.size("stdout")
            seen["middle"] = await ctx.body.read("stdout", 2_000_000, 2_000_003)
            return Continue()

    use(gateway, Looks())
    await called(gateway, session, "bash", command="head -c 4000000 /dev/zero | tr '\\0' 'x'")
    assert seen["size"] == 4_000_000
    assert seen["middle"] == b"xxx"
    assert seen["shown"] < (1 << 20) + 100


async def test_replaced_content_is_what_is_stored(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 25. What a program wrote is gone once a post hook replaced it."""

    class Replaces(Hook):
        async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
            block = result.content[0].model_copy(update={"text": "clean\n" * 10_000})
            return Continue(result=result.model_copy(update={"content": (block,)}))

    use(gateway, Replaces())
    result = await called(gateway, session, "bash", command="seq 1 100000")
    [reference] = result.references
    stored = b"".join([chunk async for chunk in gateway.results.read(session.id, reference.reference.split("/")[-1])])
    assert stored == b"clean\n" * 10_000


class Redacts(Hook):
    async def filter_output(
        self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield chunk.replace(b"secret", b"******")


async def test_filtered_output_is_all_that_leaves(gateway: Gateway, session: Session) -> None:
    use(gateway, Redacts())
    result = await called(gateway, session, "bash", command="echo a secret; echo a secret >&2")
    assert [block.text for block in result.content] == ["a ******\n", "a ******\n"]


async def test_broken_filter_withholds_the_output(gateway: Gateway, session: Session) -> None:
    """A58."""

    class Breaks(Hook):
        async def filter_output(
            self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]
        ) -> AsyncIterator[bytes]:
            async for chunk in chunks:
                raise RuntimeError(chunk)
                yield b""

    use(gateway, Breaks())
    result = await called(gateway, session, "bash", command="echo secret; seq 1 200000")
    assert (result.status, result.content) == ("hook", ())
    assert result.error is not None
    assert "filter_output" in result.error.message


async def test_session_may_only_tighten_permissions(gateway: Gateway) -> None:
    session = await opened(gateway, permission={"rules": [{"tools": ["write_*"], "otherwise": "deny"}]})
    denied = await called(gateway, session, "write_file", file_path="x", content="y")
    assert (denied.status, denied.error and denied.error.code) == ("denied", "permission_denied")
    assert (await called(gateway, session, "bash", command="true")).status == "ok"


async def test_permission_is_judged_after_hooks_and_recorded(gateway: Gateway) -> None:
    session = await opened(gateway, permission="deny")
    use(gateway, Answers())
    assert (await called(gateway, session, "bash", command="true")).status == "denied"
    [record] = await gateway.journal.calls(session.id)
    assert [(one.hook, one.decision) for one in record.decisions] == [("Answers", "continue"), ("permission", "deny")]


async def test_hook_uses_the_sandbox(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 11."""

    class Acts(Hook):
        async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
            await ctx.sandbox.write_file("note", b"from a hook")
            done = await ctx.sandbox.execute("cat note; exit 3", timeout_seconds=5)
            return Skip(f"{done.exit_code} {done.stdout} {await ctx.sandbox.read_file('note')!r}")

    use(gateway, Acts())
    result = await called(gateway, session, "bash", command="true")
    assert result.error is not None
    assert result.error.message == "3 from a hook b'from a hook'"


async def test_hook_module_beside_the_configuration_is_importable(tmp_path: Path, state_dir: Path) -> None:
    from tests.gateway.conftest import running

    (tmp_path / "hooks_beside_the_file.py").write_text(
        "from gateway.hooks.hook import Hook, Skip\n"
        "class Refuses(Hook):\n"
        "    def __init__(self, why): self.why = why\n"
        "    async def pre_tool_call(self, ctx, call): return Skip(self.why)\n"
    )
    hook = {"use": "hooks_beside_the_file:Refuses", "options": {"why": "because"}, "tools": ["bash"]}
    async with running(state_dir, tmp_path, hooks=[hook]) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="true")
    assert (result.status, result.error and result.error.message) == ("skipped", "because")
