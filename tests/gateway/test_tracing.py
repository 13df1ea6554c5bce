"""Spans: one for each call and each time a hook is asked, and nothing in them that a call carried."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway.agent_points import AgentPoints
from gateway.gateway import Gateway
from gateway.hooks.function import hook
from gateway.hooks.hook import Accept, Continue, Hook, HookContext, Skip, TurnContext
from gateway.hooks.registered import Registered
from gateway.models import LlmAnswer, ToolCall, ToolResult, TurnRequest
from gateway.pipeline import Pipeline
from gateway.tracing import Spans, configured_spans
from tests.gateway.conftest import called, opened, running

pytestmark = pytest.mark.anyio

SECRET = "hunter2"


class Watches(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue | Skip:
        text = call.arguments["text"]
        if text == "raise":
            raise RuntimeError(SECRET)
        return Skip(SECRET) if text == "skip" else Continue(arguments={"text": SECRET})

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        return Continue()

    async def post_llm_call(self, ctx: TurnContext, answer: LlmAnswer) -> Accept:
        return Accept(SECRET)


@hook
def sync(ctx: HookContext, call: ToolCall) -> Continue:
    return Continue()


def echo(text: str) -> str:
    """Say it."""
    return text


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def gateway(state_dir: Path, exporter: InMemorySpanExporter) -> AsyncIterator[Gateway]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tools = [{"use": f"{__name__}:echo"}]
    async with running(state_dir, profiles={"default": {"kind": "none"}}, tools=tools) as one:
        pipeline = Pipeline([Registered(Watches()), Registered(sync)], Spans(provider.get_tracer("test")))
        one.runner = replace(one.runner, pipeline=pipeline)
        one.agent_points = AgentPoints(pipeline, one.journal)
        yield one


def told(span: ReadableSpan) -> tuple[Any, ...]:
    attributes = span.attributes or {}
    names = ("sandgate.hook.name", "sandgate.hook.point", "sandgate.outcome")
    return (span.name, *(attributes.get(name) for name in names), span.status.status_code is StatusCode.ERROR)


async def test_one_span_for_a_call_and_one_for_each_hook_in_it(
    gateway: Gateway, exporter: InMemorySpanExporter
) -> None:
    """seed-facts 12 row 31."""
    session = await opened(gateway)
    await called(gateway, session, "echo", text=SECRET)
    spans = exporter.get_finished_spans()
    assert [told(one) for one in spans] == [
        ("sandgate.hook", "Watches", "pre_tool_call", "rewrite", False),
        ("sandgate.hook", "sync", "pre_tool_call", "continue", False),
        ("sandgate.hook", "Watches", "post_tool_call", "continue", False),
        ("sandgate.call", None, None, "ok", False),
    ]
    call = spans[-1]
    assert {one.parent.span_id for one in spans[:-1] if one.parent} == {call.context.span_id}
    assert dict(call.attributes or {}) == {
        "sandgate.session.id": session.id,
        "sandgate.call.id": "c-0001",
        "sandgate.tool": "echo",
        "sandgate.outcome": "ok",
    }


async def test_no_span_has_contents(gateway: Gateway, exporter: InMemorySpanExporter) -> None:
    """seed-facts 12 row 31, A55: arguments, reasons, results and exceptions stay out."""
    session = await opened(gateway, labels={"user": SECRET}, hook_context={"key": SECRET})
    for text in (SECRET, "skip", "raise"):
        await called(gateway, session, "echo", text=text)
    turn = await gateway.agent_points.begin(session, TurnRequest(user_content=SECRET))
    await gateway.agent_points.after_llm(session, turn.turn_id, LlmAnswer(content=SECRET))
    spans = exporter.get_finished_spans()
    assert [told(one)[3:] for one in spans if told(one)[2] == "pre_tool_call"] == [
        ("rewrite", False),
        ("continue", False),
        ("skip", False),
        ("broken", True),
    ]
    assert told(spans[-1]) == ("sandgate.hook", "Watches", "post_llm_call", "rewrite", False)
    assert (spans[-1].attributes or {})["sandgate.turn.id"] == turn.turn_id
    assert all(SECRET not in one.to_json() for one in spans)


def test_without_an_sdk_nothing_is_traced() -> None:
    assert configured_spans()._tracer is None
