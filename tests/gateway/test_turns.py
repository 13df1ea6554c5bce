"""The four points of an agent's turn: what hooks may say there, over HTTP and through the client's loop."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.client import Client, Refused, Session
from gateway.hooks.function import hook
from gateway.hooks.hook import (
    Accept,
    Continue,
    Hook,
    HookContext,
    Reject,
    Retry,
    Skip,
    Stop,
    TurnContext,
    TurnInfo,
)
from gateway.models import LlmAnswer, LlmCall, TokenUsage, ToolCall, TurnAnswer, TurnRequest
from tests.gateway.conftest import Served, served

pytestmark = pytest.mark.anyio

NO_SANDBOX: dict[str, Any] = {"default": {"kind": "none"}}
SAYS: dict[str, Any] = {}
"""What the hooks below answer at each point, or what they raise; a list is used up one by one."""
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    SAYS.clear()
    SEEN.clear()


class Says(Hook):
    def _said(self, point: str, otherwise: Any) -> Any:
        said = SAYS.get(point, otherwise)
        if isinstance(said, list):
            said = said.pop(0) if said else otherwise
        if isinstance(said, Exception):
            raise said
        return said

    async def pre_agent_turn(self, ctx: TurnContext, request: TurnRequest) -> Any:
        return self._said("pre_agent_turn", Continue())

    async def pre_llm_call(self, ctx: TurnContext, call: LlmCall) -> Any:
        return self._said("pre_llm_call", Continue())

    async def post_llm_call(self, ctx: TurnContext, answer: LlmAnswer) -> Any:
        return self._said("post_llm_call", Accept())

    def post_agent_turn(self, ctx: TurnContext, answer: TurnAnswer) -> Any:
        return self._said("post_agent_turn", Accept())


class Sees(Hook):
    """The last in the list: what the hooks before left."""

    async def pre_agent_turn(self, ctx: TurnContext, request: TurnRequest) -> Continue:
        SEEN.append(request.user_content)
        return Continue()

    async def pre_llm_call(self, ctx: TurnContext, call: LlmCall) -> Continue:
        SEEN.append(ctx.turn)
        return Continue()

    async def post_llm_call(self, ctx: TurnContext, answer: LlmAnswer) -> Accept:
        SEEN.append(answer.content)
        return Accept()

    async def post_agent_turn(self, ctx: TurnContext, answer: TurnAnswer) -> Accept:
        SEEN.append(answer.content)
        return Accept()

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        SEEN.append(ctx.turn)
        return Continue()


@hook
async def twice_said(ctx: TurnContext, request: TurnRequest) -> Continue:
    return Continue(user_content=f"{request.user_content} {request.user_content}")


def echo(text: str) -> str:
    """Say it."""
    return text


def hooks(*names: str, **more: Any) -> dict[str, Any]:
    return {
        "profiles": NO_SANDBOX,
        "tools": [{"use": f"{__name__}:echo"}],
        "hooks": [{"use": f"{__name__}:{name}", **more} for name in names],
    }


def client_of(server: Served) -> Client:
    return Client(server.url, server.agent.headers["authorization"].split()[1])


@pytest.fixture
async def server(state_dir: Path) -> AsyncIterator[Served]:
    async with served(state_dir, **hooks("Says", "Sees")) as one:
        yield one


@pytest.fixture
async def session(server: Served) -> AsyncIterator[Session]:
    async with client_of(server) as client, client.session() as one:
        yield one


BODIES: dict[str, dict[str, Any]] = {
    "pre_agent_turn": {"user_content": "hi"},
    "pre_llm_call": {},
    "post_llm_call": {"content": "hello"},
    "post_agent_turn": {"content": "bye"},
}


async def at(server: Served, session: Session, turn: str, point: str) -> dict[str, Any]:
    """Ask at one point, over HTTP."""
    path = f"/v1/sessions/{session.id}/turns"
    path = path if point == "pre_agent_turn" else f"{path}/{turn}/{point}"
    answer = await server.agent.post(path, json=BODIES[point])
    assert answer.is_success, answer.text
    decision: dict[str, Any] = answer.json()
    return decision


@pytest.mark.parametrize(
    ("point", "said", "expected"),
    [
        ("pre_agent_turn", Continue(), ("continue", "hi", "", None)),
        ("pre_agent_turn", Continue(user_content="HI"), ("continue", "HI", "", None)),
        ("pre_agent_turn", Continue(user_content=({"type": "text", "text": "HI"},)), ("continue", ..., "", None)),
        ("pre_agent_turn", Skip("closed today"), ("skip", None, "closed today", "skipped")),
        ("pre_agent_turn", Skip(""), ("skip", None, "skipped by a hook that gave no reason", "skipped")),
        ("pre_llm_call", Continue(), ("continue", None, "", None)),
        ("pre_llm_call", Skip("cached"), ("skip", None, "cached", None)),
        ("pre_llm_call", Stop("no budget"), ("stop", None, "no budget", "stopped")),
        ("post_llm_call", Accept(), ("accept", "hello", "", None)),
        ("post_llm_call", Accept("HELLO"), ("accept", "HELLO", "", None)),
        ("post_llm_call", Accept(""), ("accept", "", "", None)),
        ("post_llm_call", Retry("be kind"), ("retry", None, "be kind", None)),
        ("post_llm_call", Reject("rude"), ("reject", None, "rude", "rejected")),
        ("post_agent_turn", Accept(), ("accept", "bye", "", "completed")),
        ("post_agent_turn", Retry("run the tests"), ("retry", None, "run the tests", None)),
    ],
    ids=str,
)
async def test_each_point_has_its_own_decisions(
    server: Served, session: Session, point: str, said: Any, expected: tuple[Any, ...]
) -> None:
    """seed-facts 12 rows 2 and 3; 4.3."""
    SAYS[point] = said
    begun = await at(server, session, "", "pre_agent_turn")
    decision = begun if point == "pre_agent_turn" else await at(server, session, begun["turn_id"], point)
    word, content, reason, outcome = expected
    if content is ...:
        content = [{"type": "text", "text": "HI"}]
    assert decision == {
        "turn_id": begun["turn_id"],
        "decision": word,
        "content": content,
        "reason": reason,
        "outcome": outcome,
    }


def of(kind: Any, *values: Any, **more: Any) -> Any:
    """A decision that no type checker would let pass."""
    return kind(*values, **more)


NO_DECISION: dict[str, list[Any]] = {
    "pre_agent_turn": [
        *(None, True, Stop(), Accept(), Continue(user_content=""), Continue(user_content=()), Continue(arguments={})),
        *(of(Continue, user_content=7), of(Skip, None)),
    ],
    "pre_llm_call": [None, "continue", Accept(), Retry("x"), Continue(user_content="x"), of(Stop, 7)],
    "post_llm_call": [None, Continue(), Skip(), of(Accept, 7), Retry(""), Reject(" "), of(Retry, None)],
    "post_agent_turn": [None, Continue(), Accept("other"), Reject("no"), Retry("")],
}


@pytest.mark.parametrize(
    ("point", "said"),
    [(point, said) for point, answers in NO_DECISION.items() for said in [*answers, RuntimeError("broken")]],
    ids=str,
)
async def test_what_is_no_decision_of_the_point_ends_the_turn(
    server: Served, session: Session, point: str, said: Any
) -> None:
    """seed-facts 12 row 2, 4.3: closed, at every point."""
    SAYS[point] = said
    begun = await at(server, session, "", "pre_agent_turn")
    decision = begun if point == "pre_agent_turn" else await at(server, session, begun["turn_id"], point)
    assert (decision["decision"], decision["outcome"], decision["content"]) == ("hook", "hook", None)
    assert decision["reason"].startswith("Says: ")
    gone = await server.agent.post(f"/v1/sessions/{session.id}/turns/{begun['turn_id']}/pre_llm_call", json={})
    assert (gone.status_code, gone.json()["code"]) == (422, "turn_ended")


@pytest.mark.parametrize("point", list(BODIES))
async def test_open_hook_that_breaks_lets_the_turn_go_on(state_dir: Path, point: str) -> None:
    """seed-facts 12 row 8."""
    SAYS[point] = RuntimeError("broken")
    async with served(state_dir, **hooks("Says", on_failure="open")) as server, client_of(server) as client:
        session = await client.open_session()
        begun = await at(server, session, "", "pre_agent_turn")
        decision = begun if point == "pre_agent_turn" else await at(server, session, begun["turn_id"], point)
    assert decision["decision"] in ("continue", "accept")


async def test_each_hook_gets_what_the_one_before_left(state_dir: Path) -> None:
    three = hooks("twice_said", "twice_said", "Sees")
    async with served(state_dir, **three) as server, client_of(server) as client:
        session = await client.open_session()
        async with session.turn("a") as turn:
            assert turn.user_content == "a a a a"
    assert SEEN == ["a a a a"]


async def test_retries_at_a_model_call_are_bounded(server: Served, session: Session) -> None:
    """seed-facts 4.3: unbounded there; here five in a row, then the answer is rejected."""
    SAYS["post_llm_call"] = Retry("again")
    begun = await at(server, session, "", "pre_agent_turn")
    words = [(await at(server, session, begun["turn_id"], "post_llm_call"))["decision"] for _ in range(6)]
    assert words == ["retry"] * 5 + ["reject"]
    record = await server.agent.get(f"/v1/sessions/{session.id}/turns/{begun['turn_id']}")
    assert record.json()["outcome"] == "rejected"
    assert record.json()["reason"] == "retried 5 times in a row, the last time for: again"


async def test_accepted_answer_counts_retries_anew(server: Served, session: Session) -> None:
    SAYS["post_llm_call"] = [*[Retry("again")] * 5, Accept(), *[Retry("again")] * 5, Accept()]
    begun = await at(server, session, "", "pre_agent_turn")
    words = [(await at(server, session, begun["turn_id"], "post_llm_call"))["decision"] for _ in range(12)]
    assert words == [*["retry"] * 5, "accept"] * 2


async def test_turn_that_must_go_on_is_bounded(server: Served, session: Session) -> None:
    """seed-facts 1.3, 1.8: a hook that always cancels the exit ends somewhere."""
    SAYS["post_agent_turn"] = Retry("more")
    begun = await at(server, session, "", "pre_agent_turn")
    decisions = [await at(server, session, begun["turn_id"], "post_agent_turn") for _ in range(6)]
    assert [one["decision"] for one in decisions] == ["retry"] * 5 + ["accept"]
    assert (decisions[-1]["outcome"], decisions[-1]["content"]) == ("completed", "bye")


async def test_turn_of_another_session_or_of_nobody_is_absent(server: Served, session: Session) -> None:
    """Foreign = absent."""
    other = await server.session()
    begun = await at(server, session, "", "pre_agent_turn")
    for id in (begun["turn_id"], "t-0009", "t-1", "t-", "x", "t-٣"):
        answer = await server.agent.post(f"/v1/sessions/{other['id']}/turns/{id}/pre_llm_call", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        assert (await server.agent.get(f"/v1/sessions/{other['id']}/turns/{id}")).status_code == 404


@pytest.mark.parametrize(
    ("point", "body"),
    [
        ("", {}),
        ("", {"user_content": ""}),
        ("", {"user_content": []}),
        ("", {"user_content": 7}),
        ("", {"user_content": "hi", "more": 1}),
        ("/T/post_llm_call", {"usage": {"input_tokens": -1}}),
        ("/T/post_llm_call", {"content": 7}),
        ("/T/pre_llm_call", {"messages": "none"}),
        ("/T/no_such_point", {}),
    ],
)
async def test_bad_report_is_refused(server: Served, session: Session, point: str, body: dict[str, Any]) -> None:
    begun = await at(server, session, "", "pre_agent_turn")
    path = f"/v1/sessions/{session.id}/turns{point.replace('T', begun['turn_id'], 1)}"
    answer = await server.agent.post(path, json=body)
    assert answer.status_code in (404, 405, 422)
    assert answer.json()["status"] == answer.status_code


# the client's loop


def chat_call(id: str, tool: str, arguments: str) -> Any:
    """A tool call as OpenAI's Chat Completions gives it, as an object."""
    return SimpleNamespace(id=id, type="function", function=SimpleNamespace(name=tool, arguments=arguments))


async def looped(session: Session, *replies: tuple[str | None, list[Any]]) -> tuple[Any, list[Any]]:
    """An agent's whole loop, over a model that answers just that; the turn, and what the model was told."""
    model, told = iter(replies), []
    async with session.turn("hi") as turn:
        async for step in turn:
            content, calls = next(model)
            usage = SimpleNamespace(prompt_tokens=10, completion_tokens=2, total_tokens=12)
            told.append(await step.answered(content, calls, usage=usage))
    return turn, told


async def test_loop_makes_the_models_calls_and_ends_with_its_answer(session: Session) -> None:
    calls = [chat_call("a", "echo", '{"text": "1"}'), chat_call("b", "echo", '{"text": "2"}')]
    turn, told = await looped(session, ("", calls), ("done", []))
    assert told == [
        [
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ],
        [],
    ]
    assert (turn.answer, turn.outcome) == ("done", "completed")
    record = await turn.record()
    assert (record.step_count, record.tool_call_counts) == (2, {"echo": 2})
    assert record.token_usage == TokenUsage(input_tokens=20, output_tokens=4)
    assert {(one.hook, one.point) for one in record.decisions} == {
        (name, point) for name in ("Says", "Sees") for point in BODIES
    }
    assert [one.turn_id for one in await session.calls()] == [turn.id, turn.id]


async def test_hooks_see_the_counts_of_the_turn(session: Session) -> None:
    """seed-facts 1.1: `step_count` is 0 at the first model call and the calls that it asks for come after step 1."""
    await looped(session, ("", [chat_call("a", "echo", '{"text": "1"}')]), ("done", []))
    first, call, second = [one for one in SEEN if isinstance(one, TurnInfo)]
    assert (first.step_count, call.step_count, second.step_count) == (0, 1, 1)
    assert (first.tool_call_counts, second.tool_call_counts) == ({}, {"echo": 1})
    assert (first.token_usage.total, second.token_usage.total) == (0, 12)


async def test_call_of_no_turn_has_none(session: Session) -> None:
    await session.call("echo", {"text": "hi"})
    await session.call("echo", {"text": "hi"}, turn_id="the agent's own")
    assert SEEN == [None, None]


@pytest.mark.parametrize(
    ("point", "said", "expected"),
    [
        ("pre_agent_turn", Skip("closed"), ("closed", "skipped", "closed", 0)),
        ("pre_llm_call", Skip("cached"), ("cached", "completed", "", 0)),
        ("pre_llm_call", Stop("no budget"), (None, "stopped", "no budget", 0)),
        ("post_llm_call", Reject("rude"), (None, "rejected", "rude", 1)),
        ("post_llm_call", Accept("polite"), ("polite", "completed", "", 1)),
        ("post_llm_call", [Retry("kinder")], ("second", "completed", "", 2)),
        ("post_agent_turn", [Retry("more")], ("second", "completed", "", 2)),
        ("pre_llm_call", RuntimeError("broken"), (None, "hook", "Says: pre_llm_call raised", 0)),
    ],
    ids=str,
)
async def test_loop_obeys_every_decision(session: Session, point: str, said: Any, expected: tuple[Any, ...]) -> None:
    """seed-facts 12 row 3."""
    SAYS[point] = said
    turn, told = await looped(session, ("first", []), ("second", []))
    answer, outcome, reason, asked = expected
    assert (turn.answer, turn.outcome, len(told)) == (answer, outcome, asked)
    assert turn.reason.startswith(reason)


async def test_feedback_is_told_to_the_model(session: Session) -> None:
    """To calls that were not made as their answer: its API wants one for each."""
    SAYS["post_llm_call"] = [Retry("be kind"), Retry("not that tool")]
    _, told = await looped(session, ("a", []), ("", [chat_call("x", "echo", "{}")]), ("done", []))
    assert told == [
        [{"role": "user", "content": "be kind"}],
        [{"role": "tool", "tool_call_id": "x", "content": "not run: not that tool"}],
        [],
    ]
    assert await session.calls() == ()


async def test_step_that_was_not_answered_is_told(session: Session) -> None:
    async with session.turn("hi") as turn:
        with pytest.raises(RuntimeError, match=r"step\.answered"):
            [step async for step in turn]


async def test_refusal_of_a_call_in_the_loop_is_raised_as_it_is(session: Session) -> None:
    async with session.turn("hi") as turn:
        step = await anext(aiter(turn))
        calls = [chat_call("a", "x" * 300, "{}"), chat_call("b", "x" * 300, "{}")]
        with pytest.raises(Refused, match="tool: String should have at most 200 characters"):
            await step.answered("", calls)


async def test_turn_goes_on_after_a_restart(state_dir: Path) -> None:
    """An open turn keeps its counts and its number; the next one has another."""
    async with served(state_dir, **hooks("Sees")) as server, client_of(server) as client:
        session = await client.open_session()
        async with session.turn("hi") as turn:
            await turn.post_llm_call("a", usage={"input_tokens": 5, "output_tokens": 1})
        async with session.turn("hi") as ended:
            await ended.post_agent_turn("bye")
    SEEN.clear()
    async with served(state_dir, **hooks("Sees")) as server, client_of(server) as client:
        again = await client.attach(session.id)
        path = f"/v1/sessions/{again.id}/turns"
        assert (await server.agent.post(f"{path}/{turn.id}/pre_llm_call", json={})).status_code == 200
        gone = await server.agent.post(f"{path}/{ended.id}/pre_llm_call", json={})
        assert gone.json()["code"] == "turn_ended"
        async with again.turn("hi") as third:
            assert third.id == "t-0003"
    [seen, _] = SEEN
    assert (seen.step_count, seen.token_usage.total) == (1, 6)
