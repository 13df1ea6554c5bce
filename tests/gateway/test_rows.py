"""What must hold for every call, whichever way it came: hooks see it, and the record has all of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.client import Client
from gateway.gateway import Gateway
from gateway.hooks.hook import Continue, Hook, HookContext, Skip
from gateway.models import ToolCall, ToolResult
from tests.gateway.conftest import Served, called, opened, running, served
from tests.gateway.test_mcp import agent_token, speaking, texts

pytestmark = pytest.mark.anyio

SEEN: list[Any] = []
RAN: list[str] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()
    RAN.clear()


class Sees(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue | Skip:
        SEEN.append((ctx.session.id, ctx.session.turn_id, call.id, call.tool, call.call_id))
        return Skip("no") if call.arguments.get("text") == "skip" else Continue()


class Rewrites(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue(arguments={"text": f"{call.arguments['text']}!"})

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        block = result.content[0].model_copy(update={"text": result.text.upper()})
        return Continue(result=result.model_copy(update={"content": (block,)}))


def echo(text: str) -> str:
    """Say it."""
    RAN.append(text)
    return text


def sections(*hooks: str) -> dict[str, Any]:
    return {
        "profiles": {"default": {"kind": "none"}},
        "tools": [{"use": f"{__name__}:echo"}],
        "hooks": [{"use": f"{__name__}:{name}"} for name in hooks],
    }


@pytest.fixture
async def seeing(state_dir: Path) -> AsyncIterator[Gateway]:
    async with running(state_dir, **sections("Sees")) as gateway:
        yield gateway


async def by_json(server: Served) -> str:
    return str((await server.call(await server.session(), "echo", text="skip"))["status"])


async def by_client(server: Served) -> str:
    async with Client(server.url, agent_token(server)) as client, client.session() as session:
        return (await session.call("echo", {"text": "skip"}, idempotency_key="k")).status


async def by_stream(server: Served) -> str:
    async with Client(server.url, agent_token(server)) as client:
        session = await client.open_session()
        async with session.stream("echo", {"text": "skip"}) as call:
            async for _ in call:
                pass
        return call.result.status


async def by_dispatch(server: Served) -> str:
    tool_use = {"type": "tool_use", "id": "x", "name": "echo", "input": {"text": "skip"}}
    async with Client(server.url, agent_token(server)) as client, client.session() as session:
        assert "skipped: no." in (await session.dispatch(tool_use))["content"]
        return str((await session.calls())[0].status)


async def by_turn(server: Served) -> str:
    async with Client(server.url, agent_token(server)) as client:
        session = await client.open_session()
        async with session.turn("hi") as turn:
            return (await turn.call("echo", {"text": "skip"})).status


async def by_mcp(server: Served) -> str:
    async with speaking(server, agent_token(server)) as client:
        result = await client.call_tool("echo", {"text": "skip"})
        assert texts(result) == "skipped: no."
        return str((result.structured_content or {})["status"])


async def by_old_mcp(server: Served) -> str:
    async with speaking(server, agent_token(server), "legacy") as client:
        return str(((await client.call_tool("echo", {"text": "skip"})).structured_content or {})["status"])


@pytest.mark.parametrize("way", [by_json, by_client, by_stream, by_dispatch, by_turn, by_mcp, by_old_mcp])
async def test_hooks_see_a_call_whichever_way_it_comes(
    state_dir: Path, way: Callable[[Served], Awaitable[str]]
) -> None:
    """seed-facts 12 row 10."""
    async with served(state_dir, **sections("Sees")) as server:
        assert await way(server) == "skipped"
    assert [one[3] for one in SEEN] == ["echo"]
    assert RAN == []


async def test_each_of_many_calls_at_once_is_seen(seeing: Gateway) -> None:
    """seed-facts 12 row 10: a batch is as many calls."""
    session = await opened(seeing)
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(lambda text: called(seeing, session, "echo", text=text), str(number))
    assert sorted(one[2] for one in SEEN) == [f"c-{number:04d}" for number in range(1, 21)]
    assert len(RAN) == 20


async def test_hook_knows_session_turn_and_call(state_dir: Path) -> None:
    """seed-facts 12 row 11."""
    async with served(state_dir, **sections("Sees")) as server, Client(server.url, agent_token(server)) as client:
        session = await client.open_session()
        await session.call("echo", {"text": "hi"}, call_id="mine", turn_id="t-9")
        assert [(session.id, "t-9", "c-0001", "echo", "mine")] == SEEN


async def test_hooks_see_only_calls_that_are_valid_and_the_others_are_recorded(seeing: Gateway) -> None:
    """seed-facts 12 row 5, 11 row 15, 4.3: an audit misses nothing."""
    session = await opened(seeing)
    await called(seeing, session, "no_such_tool", text="hi")
    await called(seeing, session, "echo", wrong="hi")
    assert SEEN == []
    assert [
        (one.tool, one.status, one.error and one.error.code, one.decisions)
        for one in await seeing.journal.calls(session.id)
    ] == [("no_such_tool", "invalid", "unknown_tool", ()), ("echo", "invalid", "invalid_arguments", ())]


async def test_record_keeps_what_was_asked_and_what_happened(state_dir: Path) -> None:
    """seed-facts 12 row 9, 11 row 3: original and effective arguments, raw and final result, decisions with their
    time; skipped calls too."""
    async with running(state_dir, **sections("Sees", "Rewrites")) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "echo", text="hi")
        skipped = await called(gateway, session, "echo", text="skip")
        first, second = await gateway.journal.calls(session.id)
    assert (result.text, skipped.status, RAN) == ("HI!", "skipped", ["hi!"])
    assert (first.original_arguments, first.arguments) == ({"text": "hi"}, {"text": "hi!"})
    assert first.raw_digest != first.final_digest
    assert [(one.hook, one.point, one.decision) for one in first.decisions] == [
        ("Sees", "pre_tool_call", "continue"),
        ("Rewrites", "pre_tool_call", "rewrite"),
        ("Rewrites", "post_tool_call", "rewrite"),
    ]
    times = [one.at for one in first.decisions]
    assert first.finished is not None
    assert [first.accepted, *times, first.finished] == sorted([first.accepted, *times, first.finished])
    assert all(one.duration_ms >= 0 for one in first.decisions)
    assert [(one.decision, one.reason) for one in second.decisions] == [("skip", "no")]
    assert second.original_arguments == {"text": "skip"}
