"""HaystackHook: a hook that was written for Haystack's Agent (haystack-ai 3.4 or newer), run at our tool points.

Haystack's hooks change a `State` in place. Here each call has a State of its own, with that one call as its pending
tool call, or with its result as the fresh one; what the hook made of the messages is the decision.
"""

import copy
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, Literal, Self

import anyio.to_thread
from haystack.components.agents.state import State
from haystack.core.serialization import import_class_by_name
from haystack.dataclasses import ChatMessage
from haystack.dataclasses import ToolCall as PendingCall
from haystack.hooks import FunctionHook
from haystack.tools.tool import Tool

from gateway.errors import SettingsError
from gateway.hooks.hook import After, Before, Continue, Hook, HookContext, Skip
from gateway.models import MediaBlock, TextBlock, ToolCall, ToolDefinition, ToolResult

logger = logging.getLogger(__name__)

Point = Literal["before_tool", "after_tool"]
POINTS: Final[Mapping[str, str]] = {"before_tool": "pre_tool_call", "after_tool": "post_tool_call"}
STORE_KEY: Final = "tool_result_store"
"""In Haystack's `hook_context` this is an object that stores; what a caller of ours sends is no object."""
SCHEMA: Final[Mapping[str, Any]] = {
    "step_count": {"type": int},
    "token_usage": {"type": dict[str, Any]},
    "tool_call_counts": {"type": dict[str, int]},
    "exit_reason": {"type": str},
    "continue_run": {"type": bool},
    "stop_run": {"type": str},
    "tools": {"type": list},
    "hook_context": {"type": dict[str, Any]},
    "context_tokens": {"type": int},
}
"""The keys that Haystack's Agent gives its State (haystack-ai 3.4)."""


class NotUnderstood(Exception):
    """What the hook left in the messages says nothing that can be done here."""


class HaystackHook(Hook):
    """Runs one at `before_tool` or `after_tool`: where it allows one of them only, at that.

    Before a tool: changed arguments go on, a call that is taken away is skipped, with the tool message in its place as
    the reason. After it: the text of the tool message takes the place of the result's. The State has the session's
    tools, step, counts, usage and `hook_context`, and the result as far as `post_tool_call` sees it; the call's id is
    unique beyond the session, so that a store which all sessions share overwrites nothing. `stop_run` and
    `continue_run` have no effect at these points. A hook with `run` runs in a worker thread, one that is only async on
    the loop.
    """

    def __init__(self, hook: Any, point: Point | None = None) -> None:
        self.hook = _made(hook) if isinstance(hook, dict) else hook
        self.point = _point(self.hook, point)
        self._known: dict[str, Tool] = {}

    def to_state(self) -> dict[str, Any]:
        """Haystack's own form of its hook."""
        return {"hook": self.hook.to_dict(), "point": self.point}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        return cls(**state)

    @property
    def name(self) -> str:
        function = getattr(self.hook, "async_function", None) or getattr(self.hook, "function", None)
        return str(getattr(function, "__name__", type(self.hook).__name__))

    def overrides(self, method: str) -> bool:
        return method == POINTS[self.point] if method in POINTS.values() else super().overrides(method)

    async def warm_up(self) -> None:
        await _lifecycle(self.hook, "warm_up")

    async def close(self) -> None:
        await _lifecycle(self.hook, "close")

    def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before | Awaitable[Before]:
        pending = PendingCall(call.tool, call.arguments, id=f"{ctx.session.id}-{call.id}")
        state = self._state(ctx, [ChatMessage.from_assistant(tool_calls=[pending])])
        if _is_async_only(self.hook):
            return self._decided_later(state, pending)
        self.hook.run(state)
        return _before(state, pending)

    async def _decided_later(self, state: State, pending: PendingCall) -> Before:
        await self.hook.run_async(state)
        return _before(state, pending)

    def post_tool_call(self, ctx: HookContext, result: ToolResult) -> After | Awaitable[After]:
        origin = PendingCall(ctx.call.tool, ctx.call.arguments, id=f"{ctx.session.id}-{ctx.call.id}")
        fresh = ChatMessage.from_tool(_shown(result), origin=origin, error=result.is_error)
        state = self._state(ctx, [ChatMessage.from_assistant(tool_calls=[origin]), fresh])
        if _is_async_only(self.hook):
            return self._changed_later(state, result)
        self.hook.run(state)
        return _after(state, result)

    async def _changed_later(self, state: State, result: ToolResult) -> After:
        await self.hook.run_async(state)
        return _after(state, result)

    def _state(self, ctx: HookContext, messages: list[ChatMessage]) -> State:
        turn = ctx.turn
        data = {
            "messages": messages,
            "step_count": turn.step_count if turn else 0,
            "token_usage": turn.token_usage.model_dump() if turn else {},
            "tool_call_counts": dict(turn.tool_call_counts) if turn else {},
            "tools": [self._tool(one) for one in ctx.tools],
            "hook_context": {name: value for name, value in ctx.session.hook_context.items() if name != STORE_KEY},
        }
        return State(schema=dict(SCHEMA), data=data)

    def _tool(self, definition: ToolDefinition) -> Tool:
        tool = self._known.get(definition.name)
        if tool is None or tool.description != definition.description:
            tool = Tool(definition.name, definition.description, definition.parameters, function=_not_here)
            self._known[definition.name] = tool
        return tool


def _not_here(**_: Any) -> None:
    """What a hook may look at is not for it to run."""
    raise NotUnderstood("a hook may not run a tool of the gateway's")


def _made(data: dict[str, Any]) -> Any:
    """The hook that Haystack's `to_dict` wrote; its own rules say which modules may be imported."""
    try:
        kind: Any = import_class_by_name(data["type"])
        return kind.from_dict(copy.deepcopy(data))  # what it is given it changes in place
    except Exception as error:  # Haystack's, and strangers' constructors
        raise SettingsError(f"HaystackHook: {type(error).__name__}: {error}", "Give it what to_dict wrote.") from error


def _point(hook: Any, point: str | None) -> Point:
    if not callable(getattr(hook, "run", None)) and not callable(getattr(hook, "run_async", None)):
        raise SettingsError(f"HaystackHook: {type(hook).__name__} has no run", "Put Haystack's @hook above a function.")
    allowed = tuple(getattr(hook, "allowed_hook_points", POINTS))
    possible: list[Point] = [one for one in ("before_tool", "after_tool") if one in allowed and point in (None, one)]
    if len(possible) != 1:
        raise SettingsError(
            f"HaystackHook: {type(hook).__name__}: point {point!r}, and it allows {', '.join(allowed)}",
            'Say point = "before_tool" or "after_tool"; others are for an agent\'s own loop.',
        )
    return possible[0]


def _is_async_only(hook: Any) -> bool:
    return hook.function is None if isinstance(hook, FunctionHook) else not hasattr(hook, "run")


async def _lifecycle(hook: Any, name: str) -> None:
    if (work := getattr(hook, f"{name}_async", None)) is not None:
        await work()
    elif (work := getattr(hook, name, None)) is not None:
        await anyio.to_thread.run_sync(work)


def _messages(state: State) -> Sequence[ChatMessage]:
    for key in ("stop_run", "continue_run"):
        if state.data.get(key):
            logger.warning("a Haystack hook set %s, which has no effect at a tool point", key)
    messages: Sequence[ChatMessage] = state.data.get("messages") or []
    return messages


def _before(state: State, asked: PendingCall) -> Before:
    messages = _messages(state)
    pending = list(messages[-1].tool_calls) if messages else []
    if not pending:
        refusals = [one.tool_call_result for one in messages if one.tool_call_result is not None]
        return Skip(_text(refusals[-1].result)) if refusals else Skip()
    if len(pending) > 1 or (pending[0].tool_name, pending[0].id) != (asked.tool_name, asked.id):
        raise NotUnderstood("other calls were put in the place of the one that was asked about")
    return Continue() if pending[0].arguments == asked.arguments else Continue(arguments=dict(pending[0].arguments))


def _after(state: State, result: ToolResult) -> After:
    messages = _messages(state)
    final = messages[-1].tool_call_result if messages else None
    if final is None:
        raise NotUnderstood("the result is not the last message any more")
    text = _text(final.result)
    if text == _shown(result):
        return Continue()
    media = tuple(block for block in result.content if isinstance(block, MediaBlock))
    return Continue(result=result.model_copy(update={"content": (TextBlock(text=text, stream="stdout"), *media)}))


def _shown(result: ToolResult) -> str:
    """What Haystack calls the result: what was printed, or else why there is nothing."""
    printed = "\n".join(block.text.removesuffix("\n") for block in result.content if isinstance(block, TextBlock))
    return printed or (result.error.message if result.error is not None else "")


def _text(content: Any) -> str:
    """Haystack's tool results are a text, or a list of contents of which the texts count."""
    if isinstance(content, str):
        return content
    return "\n".join(text for one in content if isinstance(text := getattr(one, "text", None), str))
