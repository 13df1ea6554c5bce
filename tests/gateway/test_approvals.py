"""Approvals: one question for one call, decided by a person, used once, across restarts; and what an answer may be."""

import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest

from gateway.calls import ActiveCall
from gateway.errors import NotFound, Unprocessable
from gateway.gateway import Gateway
from gateway.hooks.hook import Ask, Before, Continue, Hook, HookContext, Skip
from gateway.hooks.registered import Registered
from gateway.models import Approval, ApprovalDecision, CallRequest, ToolCall, ToolResult
from gateway.pipeline import Pipeline
from gateway.sessions import Session
from tests.gateway.commandline import serve
from tests.gateway.conftest import Served, called, opened, running, served
from tests.gateway.test_mcp import ERAS, speaking, texts

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

ASKS: dict[str, Any] = {"server": {"approval_wait_seconds": 60}, "profiles": {"default": {"permission": "ask"}}}
IMPATIENT: dict[str, Any] = {**ASKS, "server": {"approval_wait_seconds": 0.05}}


class Asks(Hook):
    def __init__(self, question: str) -> None:
        self.question, self.calls = question, 0

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        self.calls += 1
        return Ask(self.question)


class Adds(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        return Continue(arguments={**call.arguments, "command": f"{call.arguments['command']} added"})


class Skips(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        return Skip("no")


def use(gateway: Gateway, *hooks: Hook) -> None:
    gateway.runner = replace(gateway.runner, pipeline=Pipeline([Registered(one) for one in hooks]))


@pytest.fixture
async def asking(state_dir: Path) -> AsyncIterator[Gateway]:
    """A gateway whose default profile asks for every call, and waits for a minute."""
    async with running(state_dir, **ASKS) as gateway:
        yield gateway


@pytest.fixture
async def impatient(state_dir: Path) -> AsyncIterator[Gateway]:
    """The same, where a call waits for hardly any time."""
    async with running(state_dir, **IMPATIENT) as gateway:
        yield gateway


async def start(gateway: Gateway, session: Session, command: str, key: str | None = None) -> ActiveCall:
    return await gateway.start_call(session, CallRequest(tool="bash", arguments={"command": command}), key)


async def asked(gateway: Gateway, count: int = 1) -> list[Approval]:
    """The approvals that wait, as soon as there are so many."""
    with anyio.fail_after(20):
        while len(found := await gateway.approvals.list()) < count:
            await gateway.approvals.list(after=found[-1].revision if found else 0, wait_seconds=20)
    return list(found)


async def decide(gateway: Gateway, approval: Approval | str, decision: Any = "allow", **more: Any) -> Approval:
    id = approval if isinstance(approval, str) else approval.id
    return await gateway.decide_approval(id, ApprovalDecision(decision=decision, **more))


def told(result: ToolResult) -> tuple[str, str]:
    return result.status, result.error.code if result.error else ""


async def ran(session: Session, name: str) -> bool:
    return any(entry.path == name for entry in (await (await session.sandbox()).list()).entries)


async def decisions(gateway: Gateway, session: Session, call: str) -> list[tuple[str, str]]:
    record = await gateway.call_record(session, call)
    return [(one.hook, one.decision) for one in record.decisions]


# one approval


async def test_one_approval_shows_the_final_arguments_and_all_questions(asking: Gateway) -> None:
    """Seed-facts 12 rows 1 and 6, 11 row 2: the chain goes on after an Ask; what was asked first is shown beside."""
    use(asking, Asks("is it late?"), Adds(), Asks("are you sure?"))
    session = await opened(asking)
    active = await start(asking, session, "echo hi")
    [approval] = await asked(asking)
    assert approval.arguments == {"command": "echo hi added"}
    assert approval.original_arguments == {"command": "echo hi"}
    assert [(one.asked_by, one.question) for one in approval.questions] == [
        ("Asks", "is it late?"),
        ("Asks", "are you sure?"),
        ("permission", "may bash run?"),
    ]
    assert (approval.session_id, approval.call_id, approval.state) == (session.id, "c-0001", "waiting")
    await decide(asking, approval)
    result = await active.wait()
    assert (result.status, result.text) == ("ok", "hi added")
    assert await decisions(asking, session, result.id) == [
        ("Asks", "ask"),
        ("Adds", "rewrite"),
        ("Asks", "ask"),
        ("permission", "ask"),
        ("approval", "allowed"),
    ]


@pytest.mark.parametrize("question", ["", "  \n"])
async def test_question_without_words_gets_a_default_text(gateway: Gateway, question: str) -> None:
    use(gateway, Asks(question))
    await start(gateway, await opened(gateway), "true")
    [approval] = await asked(gateway)
    assert [one.question for one in approval.questions] == ["may this run?"]


async def test_skip_after_an_ask_ends_it_without_asking(gateway: Gateway) -> None:
    use(gateway, Asks("sure?"), Skips())
    result = await called(gateway, await opened(gateway), "bash", command="true")
    assert (result.status, await gateway.approvals.list(None)) == ("skipped", [])


async def test_denied_by_a_rule_is_not_asked_about(gateway: Gateway) -> None:
    use(gateway, Asks("sure?"))
    result = await called(gateway, await opened(gateway, permission="deny"), "bash", command="true")
    assert (told(result), await gateway.approvals.list(None)) == (("denied", "permission_denied"), [])


async def test_rules_over_commands_ask_for_some(gateway: Gateway) -> None:
    rules = {"rules": [{"tools": ["bash"], "ask": ["touch *"], "deny": ["rm *"]}]}
    session = await opened(gateway, permission=rules)
    assert (await called(gateway, session, "bash", command="true")).status == "ok"
    denied = await called(gateway, session, "bash", command="rm -rf x")
    assert (told(denied), "'rm *'" in denied.text) == (("denied", "permission_denied"), True)
    active = await start(gateway, session, "touch ran")
    [approval] = await asked(gateway)
    assert approval.questions[0].question == "may bash run?, by the rule 'touch *'"
    await decide(gateway, approval, "deny", reason="not now")
    result = await active.wait()
    assert (told(result), "not now" in result.text) == (("denied", "approval_denied"), True)
    assert not await ran(session, "ran")


@pytest.mark.parametrize("answer", ["rejected", "REJECT", "ALLOW", "allowed", "", None, True, 1, {"allow": True}, []])
async def test_unknown_answer_is_a_rejection(asking: Gateway, answer: Any) -> None:
    """Seed-facts 3 (every other value ran the tool there), 12 row 7."""
    session = await opened(asking)
    active = await start(asking, session, "touch ran")
    [approval] = await asked(asking)
    decided = await decide(asking, approval, answer)
    assert (decided.state, 'not "allow"' in decided.reason) == ("denied", True)
    assert told(await active.wait()) == ("denied", "approval_denied")
    assert not await ran(session, "ran")


async def test_decided_once_and_the_same_answer_again_changes_nothing(asking: Gateway) -> None:
    session = await opened(asking)
    active = await start(asking, session, "echo x >> ran; cat ran")
    [approval] = await asked(asking)
    first = await decide(asking, approval)
    assert (await active.wait()).text == "x"
    again = await decide(asking, approval)
    assert (again.state, again.decided) == (first.state, first.decided)
    with pytest.raises(Unprocessable, match="decided before: allowed"):
        await decide(asking, approval, "deny")
    with pytest.raises(NotFound):
        await decide(asking, "a-9999")


# waiting


async def test_waiting_call_holds_no_parallel_slot(gateway: Gateway) -> None:
    session = await opened(
        gateway, limits={"parallel_calls": 1}, permission={"rules": [{"tools": ["ls"], "otherwise": "ask"}]}
    )
    waiting = await gateway.start_call(session, CallRequest(tool="ls"))
    [approval] = await asked(gateway)
    assert (await called(gateway, session, "bash", command="echo hi")).text == "hi"
    await decide(gateway, approval)
    assert (await waiting.wait()).status == "ok"


async def test_call_ends_pending_and_the_same_call_runs_after_the_approval(impatient: Gateway) -> None:
    """R85: the wait is bounded, and says how to go on; the approval is used once. R84: nobody's rejection."""
    session = await opened(impatient)
    first = await called(impatient, session, "bash", command="echo x >> ran; cat ran")
    [approval] = await asked(impatient)
    assert told(first) == ("pending", "approval_pending")
    assert (first.structured, approval.id in first.text, "same call again" in first.text) == (
        {"approval_id": approval.id},
        True,
        True,
    )
    assert await decisions(impatient, session, first.id) == [("permission", "ask"), ("approval", "waiting")]
    still = await called(impatient, session, "bash", command="echo x >> ran; cat ran")
    assert (still.structured, len(await asked(impatient))) == ({"approval_id": approval.id}, 1)
    assert (await decide(impatient, approval)).call_id == still.id
    other = await called(impatient, session, "bash", command="echo x >> ran;  cat ran")
    assert told(other) == ("pending", "approval_pending")  # other arguments, to the byte
    done = await called(impatient, session, "bash", command="echo x >> ran; cat ran")
    assert (done.status, done.text) == ("ok", "x")
    assert (await impatient.approvals.get(approval.id)).used is not None
    assert told(await called(impatient, session, "bash", command="echo x >> ran; cat ran")) == (
        "pending",
        "approval_pending",
    )


async def test_approval_is_no_other_sessions(impatient: Gateway) -> None:
    one, other = await opened(impatient), await opened(impatient)
    await called(impatient, one, "bash", command="true")
    [approval] = await asked(impatient)
    await decide(impatient, approval, scope="session")
    assert (await called(impatient, other, "bash", command="true")).status == "pending"
    assert (await called(impatient, one, "bash", command="true")).status == "ok"


async def test_order_of_the_arguments_does_not_matter(impatient: Gateway) -> None:
    session = await opened(impatient)
    await called(impatient, session, "bash", command="true", timeout_s=5)
    [approval] = await asked(impatient)
    await decide(impatient, approval)
    assert (await called(impatient, session, "bash", timeout_s=5, command="true")).status == "ok"


async def test_rejection_reaches_the_next_same_call_once(impatient: Gateway) -> None:
    session = await opened(impatient)
    await called(impatient, session, "bash", command="true")
    [approval] = await asked(impatient)
    await decide(impatient, approval, "deny")
    assert told(await called(impatient, session, "bash", command="true")) == ("denied", "approval_denied")
    assert (await called(impatient, session, "bash", command="true")).status == "pending"


async def test_one_decision_serves_one_of_two_equal_calls(asking: Gateway) -> None:
    """Seed-facts 12 row 7: one decision cannot serve two calls."""
    session = await opened(asking)
    calls = [await start(asking, session, "echo x >> ran; cat ran") for _ in range(2)]
    first, second = await asked(asking, 2)
    assert {first.call_id, second.call_id} == {one.call.id for one in calls}
    await decide(asking, second)
    by_id = {one.call.id: one for one in calls}
    assert (await by_id[second.call_id].wait()).text == "x"
    assert [one.id for one in await asked(asking)] == [first.id]
    await decide(asking, first, "deny")
    assert told(await by_id[first.call_id].wait()) == ("denied", "approval_denied")


async def test_grant_for_the_session_asks_no_more_for_the_same_call(asking: Gateway) -> None:
    """Seed-facts 5: keyed by tool and arguments; what was asked before the grant still is."""
    session = await opened(asking)
    calls = [await start(asking, session, "echo hi") for _ in range(2)]
    first, second = await asked(asking, 2)
    await decide(asking, first, scope="session")
    by_id = {one.call.id: one for one in calls}
    assert (await by_id[first.call_id].wait()).text == "hi"
    assert [one.id for one in await asked(asking)] == [second.id]
    results: list[ToolResult] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(_into, results, called(asking, session, "bash", command="echo hi"))
    assert [one.text for one in results] == ["hi"] * 5
    assert [one.id for one in await asked(asking)] == [second.id]
    await start(asking, session, "echo ho")
    assert len(await asked(asking, 2)) == 2


async def _into(results: list[ToolResult], call: Awaitable[ToolResult]) -> None:
    results.append(await call)


# edited arguments


async def test_edited_arguments_run_and_are_not_hooked_again(asking: Gateway) -> None:
    hook = Asks("sure?")
    use(asking, hook)
    session = await opened(asking)
    active = await start(asking, session, "echo hi")
    [approval] = await asked(asking)
    await decide(asking, approval, arguments={"command": "echo edited"})
    result = await active.wait()
    assert (result.text, hook.calls) == ("edited", 1)
    record = await asking.call_record(session, result.id)
    assert (record.original_arguments, record.arguments) == ({"command": "echo hi"}, {"command": "echo edited"})


async def test_edited_arguments_that_break_the_schema_or_a_rule_are_refused(gateway: Gateway) -> None:
    session = await opened(gateway, permission={"rules": [{"tools": ["bash"], "deny": ["rm *"], "otherwise": "ask"}]})
    active = await start(gateway, session, "echo hi")
    [approval] = await asked(gateway)
    with pytest.raises(Unprocessable, match=r"arguments: .*command"):
        await decide(gateway, approval, arguments={"cmd": "echo"})
    with pytest.raises(Unprocessable, match=r"denied by the profile's permission 'rm \*'"):
        await decide(gateway, approval, arguments={"command": "rm -r ."})
    assert (await gateway.approvals.get(approval.id)).state == "waiting"
    await decide(gateway, approval, arguments={"command": "echo ok"})
    assert (await active.wait()).text == "ok"


# ends that are no decision


async def test_expiry_is_no_rejection(state_dir: Path) -> None:
    """R82, R84: the approval ends by itself, and is told as `expired`; the same call then asks again."""
    server = {"approval_wait_seconds": 60, "approval_expires_seconds": 0.05}
    async with running(state_dir, **{**ASKS, "server": server}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="true")
        assert told(result) == ("expired", "approval_expired")
        assert await decisions(gateway, session, result.id) == [("permission", "ask"), ("approval", "expired")]
        [approval] = await gateway.approvals.list(None)
        assert approval.state == "expired"
        with pytest.raises(Unprocessable, match="has expired"):
            await decide(gateway, approval)
        again = await called(gateway, session, "bash", command="true")
        assert (again.status, len(await gateway.approvals.list(None))) == ("expired", 2)


async def test_expiry_after_pending_is_told_to_the_next_same_call(impatient: Gateway) -> None:
    session = await opened(impatient)
    assert (await called(impatient, session, "bash", command="true")).status == "pending"
    time_is_over(impatient)
    assert (await called(impatient, session, "bash", command="true")).status == "expired"
    assert (await called(impatient, session, "bash", command="true")).status == "pending"


async def test_decision_that_nobody_used_lapses(impatient: Gateway) -> None:
    """R82: what was allowed long ago lets nothing run; the same call asks again."""
    session = await opened(impatient)
    await called(impatient, session, "bash", command="true")
    [approval] = await asked(impatient)
    assert (await decide(impatient, approval)).expires > approval.expires
    time_is_over(impatient)
    assert (await called(impatient, session, "bash", command="true")).status == "pending"
    assert len(await impatient.approvals.list(None)) == 2


def time_is_over(gateway: Gateway) -> None:
    """As if every approval had been there for an hour."""
    gateway.journal._write_one("UPDATE approvals SET expires = ?", (time.time(),))


async def test_session_has_a_bound_of_what_waits(impatient: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.approvals.MOST_WAITING", 2)
    session = await opened(impatient)
    results = [await called(impatient, session, "bash", command=f"echo {number}") for number in (1, 2, 3, 2)]
    assert [told(one)[0] for one in results] == ["pending", "pending", "denied", "pending"]
    assert told(results[2]) == ("denied", "too_many_approvals")
    assert (await called(impatient, await opened(impatient), "bash", command="true")).status == "pending"


async def test_tool_that_is_gone_when_it_is_allowed_does_not_run(asking: Gateway) -> None:
    session = await opened(asking)
    active = await start(asking, session, "true")
    [approval] = await asked(asking)
    asking.runner.toolbox.remove("bash")
    await decide(asking, approval)
    assert told(await active.wait()) == ("invalid", "unknown_tool")


async def test_decision_gives_the_agent_its_idle_time_again(impatient: Gateway) -> None:
    session = await opened(impatient)
    await called(impatient, session, "bash", command="true")
    session.last_used -= 600
    [approval] = await asked(impatient)
    await decide(impatient, approval)
    assert time.time() - session.last_used < 60


async def test_cancelled_call_ends_its_approval(asking: Gateway) -> None:
    session = await opened(asking)
    active = await start(asking, session, "true")
    [approval] = await asked(asking)
    active.cancel("its client is gone")
    assert (await active.wait()).status == "cancelled"
    assert (await asking.approvals.get(approval.id)).state == "expired"


async def test_closing_a_session_ends_its_approvals(impatient: Gateway) -> None:
    session = await opened(impatient)
    await called(impatient, session, "bash", command="true")
    [approval] = await asked(impatient)
    await impatient.close_session(session)
    with pytest.raises(Unprocessable, match="has expired"):
        await decide(impatient, approval)


async def test_key_does_not_remember_pending(impatient: Gateway) -> None:
    """Design 3: with an Idempotency-Key `pending` is the one status that is not remembered."""
    session = await opened(impatient)
    first = await (await start(impatient, session, "echo hi", "key")).wait()
    [approval] = await asked(impatient)
    await decide(impatient, approval)
    second = await (await start(impatient, session, "echo hi", "key")).wait()
    third = await (await start(impatient, session, "echo hi", "key")).wait()
    assert (first.status, second.status, second.text) == ("pending", "ok", "hi")
    assert third == second


async def test_arguments_are_whole_until_decided(impatient: Gateway) -> None:
    command = f"true {'x' * 100_000}"
    session = await opened(impatient)
    await called(impatient, session, "bash", command=command)
    [listed] = await asked(impatient)
    assert isinstance(listed.arguments, dict)
    assert set(listed.arguments) == {"sha256", "bytes", "first"}
    assert (await impatient.approvals.get(listed.id)).arguments == {"command": command}
    decided = await decide(impatient, listed.id)
    assert decided.arguments == listed.arguments
    assert (await called(impatient, session, "bash", command=command)).status == "ok"


async def test_secrets_are_redacted_before_they_are_written_and_run_as_they_were(state_dir: Path) -> None:
    """Design 9: what waits is whole, and without its secrets; the call itself still has them."""
    token = f"ghp_{'a1' * 20}"
    async with running(state_dir, **IMPATIENT, hooks=[{"use": "gateway.hooks.redact:RedactSecrets"}]) as gateway:
        session = await opened(gateway)
        command = f"printf %s {token} | wc -c"
        await called(gateway, session, "bash", command=command)
        [approval] = await asked(gateway)
        assert approval.arguments == {"command": "printf %s [redacted: github-token] | wc -c"}
        assert not any(token.encode() in file.read_bytes() for file in state_dir.glob("sandgate.db*"))
        await decide(gateway, approval)
        assert (await called(gateway, session, "bash", command=command)).text == "44"


# restarts


@pytest.mark.parametrize("before", [True, False], ids=["decided before the restart", "decided after it"])
async def test_restart_between_ask_and_decision_loses_nothing(state_dir: Path, before: bool) -> None:
    """R83: the decision still lands, once."""
    async with running(state_dir, **IMPATIENT) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="echo x >> ran; cat ran")
        [approval] = await asked(gateway)
        if before:
            await decide(gateway, approval)
    async with running(state_dir, **IMPATIENT) as gateway:
        again = next(one for one in gateway.sessions if one.id == session.id)
        if not before:
            await decide(gateway, approval)
        results = [await called(gateway, again, "bash", command="echo x >> ran; cat ran") for _ in range(2)]
        assert (results[0].status, results[0].text, results[1].status) == ("ok", "x", "pending")


async def test_stop_ends_a_waiting_call_at_once_and_keeps_what_it_asked(state_dir: Path) -> None:
    async with running(state_dir, **ASKS) as gateway:
        session = await opened(gateway)
        active = await start(gateway, session, "true")
        [approval] = await asked(gateway)
        started = anyio.current_time()
        await gateway.drain()
        assert anyio.current_time() - started < 5  # of the 10 that a running call has
        assert (await active.wait()).status == "pending"
        assert (await gateway.approvals.get(approval.id)).state == "waiting"


async def test_killed_while_a_call_waits_it_is_pending_and_its_key_is_free(tmp_path: Path, state_dir: Path) -> None:
    """R83: SIGKILL between ask and decision; what waited did not run, and is not `interrupted`."""
    (tmp_path / "sandgate.toml").write_text('[profiles.default]\npermission = "ask"\n')
    body = {"tool": "bash", "arguments": {"command": "echo x >> ran; cat ran"}}
    with serve(state_dir, cwd=tmp_path) as gateway:
        async with client(gateway.url, gateway.token("operator")) as operator:
            base = f"/v1/sessions/{(await operator.post('/v1/sessions', json={})).json()['id']}"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_broken, operator, f"{base}/calls", body)
                found = await operator.get("/v1/approvals", params={"wait_seconds": 30})
                gateway.process.send_signal(signal.SIGKILL)
    [approval] = found.json()["approvals"]
    with serve(state_dir, cwd=tmp_path) as gateway:
        async with client(gateway.url, gateway.token("operator")) as operator:
            record = (await operator.get(f"{base}/calls/c-0001")).json()
            assert (record["status"], approval["id"] in record["error"]["message"]) == ("pending", True)
            await operator.post(f"/v1/approvals/{approval['id']}", json={"decision": "allow"})
            answers = [
                (await operator.post(f"{base}/calls", json=body, headers={"idempotency-key": "k"})).json()
                for _ in range(2)
            ]
            assert [one["content"][0]["text"] for one in answers] == ["x\n", "x\n"]
            assert answers[0] == answers[1]


async def _broken(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(httpx2.HTTPError):
        await http.post(path, json=body, headers={"idempotency-key": "k"})


def client(url: str, token: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60)


# over HTTP


@asynccontextmanager
async def asking_server(state_dir: Path) -> AsyncIterator[Served]:
    async with served(state_dir, **ASKS) as server:
        yield server


async def test_only_the_operator_sees_and_decides(state_dir: Path) -> None:
    """Design 7: neither the agent's token nor a session's, whosever the session is."""
    async with asking_server(state_dir) as server:
        session = await server.session()
        async with anyio.create_task_group() as tasks, server.client(session["token"]) as own:
            tasks.start_soon(server.call, session, "bash")
            active = next(iter(server.gateway.sessions))
            waiting = await start(server.gateway, active, "touch ran")
            [approval] = await asked(server.gateway)
            for http in (server.agent, own):
                answers = [
                    await http.get("/v1/approvals"),
                    await http.get(f"/v1/approvals/{approval.id}"),
                    await http.get("/v1/approvals/a-9999"),
                    await http.post(f"/v1/approvals/{approval.id}", json={"decision": "allow"}),
                ]
                assert [(one.status_code, one.json()["code"]) for one in answers] == [(403, "forbidden")] * 4
            answer = await server.operator.post(f"/v1/approvals/{approval.id}", json={"decision": "allow"})
            assert (answer.status_code, answer.json()["state"]) == (200, "allowed")
            assert (await waiting.wait()).status == "ok"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"decision": "allow", "scope": "forever"}, 422),
        ({"decision": "allow", "arguments": {"cmd": 1}}, 422),
        ({"decision": "allow", "arguments": []}, 422),
        ({"decision": "allow", "more": 1}, 422),
        ({"decision": "yes"}, 200),
    ],
)
async def test_bad_answers_never_let_it_run(state_dir: Path, body: dict[str, Any], status: int) -> None:
    async with asking_server(state_dir) as server:
        await server.session()
        session = next(iter(server.gateway.sessions))
        active = await start(server.gateway, session, "touch ran")
        [approval] = await asked(server.gateway)
        answer = await server.operator.post(f"/v1/approvals/{approval.id}", json=body)
        assert answer.status_code == status
        if status == 422:
            assert answer.json()["code"]
            assert (await server.gateway.approvals.get(approval.id)).state == "waiting"
            await decide(server.gateway, approval, "deny")
        assert (await active.wait()).status == "denied"
        assert not await ran(session, "ran")


async def test_long_poll_answers_when_something_is_asked(state_dir: Path) -> None:
    async with asking_server(state_dir) as server:
        await server.session()
        session = next(iter(server.gateway.sessions))
        assert (await server.operator.get("/v1/approvals", params={"wait_seconds": 0.01})).json() == {"approvals": []}

        async def ask_later() -> None:
            await anyio.sleep(0.05)
            await start(server.gateway, session, "true")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_later)
            [found] = (await server.operator.get("/v1/approvals", params={"wait_seconds": 50})).json()["approvals"]
        after = found["revision"]
        await server.operator.post(f"/v1/approvals/{found['id']}", json={"decision": "deny"})
        changed = await server.operator.get(
            "/v1/approvals", params={"state": "all", "after": after, "wait_seconds": 50}
        )
        assert [one["state"] for one in changed.json()["approvals"]] == ["denied"]
        for wrong in ({"wait_seconds": 56}, {"after": -1}, {"limit": 0}, {"state": "open"}):
            assert (await server.operator.get("/v1/approvals", params=wrong)).status_code == 422


async def test_stream_tells_what_is_asked_and_decided_and_is_taken_up_again(state_dir: Path) -> None:
    async with asking_server(state_dir) as server:
        await server.session()
        session = next(iter(server.gateway.sessions))
        await start(server.gateway, session, "true")
        [approval] = await asked(server.gateway)
        headers = {"accept": "text/event-stream"}
        async with server.operator.stream("GET", "/v1/approvals?state=all", headers=headers) as stream:
            events = httpx2.EventSource(stream).__aiter__()
            first = await anext(events)
            await decide(server.gateway, approval)
            states = [json.loads((await anext(events)).data)["state"]]
        assert (first.event, json.loads(first.data)["id"], states) == ("approval", approval.id, ["allowed"])
        headers["last-event-id"] = first.id or ""
        async with server.operator.stream("GET", "/v1/approvals?state=all", headers=headers) as stream:
            again = await anext(httpx2.EventSource(stream).__aiter__())
        assert json.loads(again.data)["state"] == "allowed"
        assert int(again.id or 0) > int(first.id or 0)


async def test_call_is_held_as_a_stream_too(state_dir: Path) -> None:
    async with asking_server(state_dir) as server:
        session = await server.session()
        body = {"tool": "bash", "arguments": {"command": "echo hi"}}
        path, headers = f"/v1/sessions/{session['id']}/calls", {"accept": "text/event-stream"}
        async with server.agent.stream("POST", path, json=body, headers=headers) as stream:
            events = httpx2.EventSource(stream).__aiter__()
            assert (await anext(events)).event == "accepted"
            [approval] = await asked(server.gateway)
            await decide(server.gateway, approval)
            assert [(await anext(events)).event for _ in range(2)] == ["output", "result"]


@pytest.mark.parametrize("mode", ERAS)
async def test_mcp_client_is_told_that_its_call_waits(state_dir: Path, mode: str) -> None:
    async with asking_server(state_dir) as server:
        told: list[str | None] = []

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            told.append(message)
            if message is not None and message.startswith("waits for a person's decision: "):
                await decide(server.gateway, message.rpartition(" ")[2])

        session = await server.session()
        async with speaking(server, session["token"], mode) as client:
            with anyio.fail_after(60):
                result = await client.call_tool("bash", {"command": "echo hi"}, progress_callback=hear)
        assert (texts(result), "waits for a person's decision: a-0001" in told) == ("hi", True)


async def test_vanished_client_ends_its_approval(state_dir: Path) -> None:
    """R82: nobody is left who could run it, so nobody is asked any more."""
    async with asking_server(state_dir) as server:
        session = await server.session()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.call, session, "ls")
            [approval] = await asked(server.gateway)
            tasks.cancel_scope.cancel()
        [changed] = await server.gateway.approvals.list("expired", wait_seconds=20)
        assert changed.id == approval.id
        record = (await server.agent.get(f"/v1/sessions/{session['id']}/calls/{approval.call_id}")).json()
        assert record["status"] in (None, "cancelled")


# what many cost


async def test_a_thousand_waiting_calls_cost_little(state_dir: Path) -> None:
    """The bench has the figures (10 MB, 50 ms over 10 idle seconds); here with room for a busy machine."""
    async with running(state_dir, **{**ASKS, "server": {"approval_wait_seconds": 600}}) as gateway:
        session = await opened(gateway)
        process = psutil.Process()
        before = process.memory_info().rss
        calls = [await start(gateway, session, f"echo {number}") for number in range(1000)]
        with anyio.fail_after(120):
            while len(await gateway.approvals.list(limit=1000)) < 1000:
                await anyio.sleep(0.1)
        grown = process.memory_info().rss - before
        used = process.cpu_times()
        await anyio.sleep(5)
        idle = process.cpu_times()
        assert grown < 60e6
        assert idle.user + idle.system - used.user - used.system < 1
        gateway.approvals.release()
        for one in calls:
            await one.wait()
