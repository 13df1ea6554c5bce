"""HttpHook: a service of yours that decides about calls and results over HTTP."""

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import httpx2
from pydantic import Field, TypeAdapter

from gateway.errors import SettingsError
from gateway.hooks.hook import After, Ask, Before, Continue, Hook, HookContext, Skip
from gateway.models import Arguments, TextBlock, ToolCall, ToolResult, Wire

Point = Literal["pre_tool_call", "post_tool_call"]
TOOL_POINTS: Final = ("pre_tool_call", "post_tool_call")
ANSWER_BYTES: Final = 4 << 20


class ContinueAnswer(Wire):
    """Go on; before a tool perhaps with other `arguments`, after it with another `content`."""

    decision: Literal["continue"]
    arguments: Arguments | None = None
    content: tuple[TextBlock, ...] | None = None


class SkipAnswer(Wire):
    """Only before a tool: do not run it."""

    decision: Literal["skip"]
    reason: str = ""


class AskAnswer(Wire):
    """Only before a tool: let a person decide, perhaps about other `arguments`."""

    decision: Literal["ask"]
    question: str = ""
    arguments: Arguments | None = None


_ANSWER: Final[TypeAdapter[ContinueAnswer | SkipAnswer | AskAnswer]] = TypeAdapter(
    Annotated[ContinueAnswer | SkipAnswer | AskAnswer, Field(discriminator="decision")]
)


class ServiceFailed(Exception):
    """The service did not answer 200 with a decision of the point."""


class HttpHook(Hook):
    """POSTs `{point, session: {id, turn_id, labels}, call, result?}` as JSON to `url`, and takes the decision from the
    answer: `{"decision": "continue", "arguments"? | "content"?}`, `{"decision": "skip", "reason"?}` or `{"decision":
    "ask", "question"?, "arguments"?}`. Anything else, a redirect and an answer over 4 MiB too, is a broken hook; the
    hook's time limit holds for all of it. Proxies of the environment are not used.

    `token_env` names a variable of the gateway whose value is sent as bearer token.
    """

    def __init__(self, url: str, *, points: Sequence[Point] = ("pre_tool_call",), token_env: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"HttpHook: {url!r} is no http address", "Write https://host/path.")
        if not points or any(point not in TOOL_POINTS for point in points):
            raise SettingsError(f"HttpHook: points: {list(points)}", f"There are {', '.join(TOOL_POINTS)}.")
        if token_env is not None and not os.environ.get(token_env):
            raise SettingsError(f"HttpHook: token_env: {token_env} is not set", "Set it, or take it out.")
        self.url = url
        self.points = tuple(points)
        self.token_env = token_env
        self._client: httpx2.AsyncClient | None = None

    def to_state(self) -> dict[str, Any]:
        """What makes it again; the token is not in it."""
        return {"url": self.url, "points": list(self.points), "token_env": self.token_env}

    def overrides(self, method: str) -> bool:
        return method in self.points if method in TOOL_POINTS else super().overrides(method)

    async def warm_up(self) -> None:
        headers = {"authorization": f"Bearer {os.environ[self.token_env]}"} if self.token_env else {}
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, trust_env=False)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        match await self._asked("pre_tool_call", ctx, {}):
            case SkipAnswer(reason=reason):
                return Skip(reason)
            case AskAnswer(question=question, arguments=arguments):
                return Ask(question, arguments)
            case ContinueAnswer(arguments=arguments, content=None):
                return Continue(arguments=arguments)
        raise ServiceFailed("content is nothing to decide before a tool")

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> After:
        match await self._asked("post_tool_call", ctx, {"result": result.model_dump(mode="json")}):
            case ContinueAnswer(arguments=None, content=None):
                return Continue()
            case ContinueAnswer(arguments=None, content=content):
                return Continue(result=result.model_copy(update={"content": content}))
        raise ServiceFailed("after a tool it can only continue, with other content at most")

    async def _asked(
        self, point: Point, ctx: HookContext, more: dict[str, Any]
    ) -> ContinueAnswer | SkipAnswer | AskAnswer:
        session = {"id": ctx.session.id, "turn_id": ctx.session.turn_id, "labels": dict(ctx.session.labels)}
        message = {"point": point, "session": session, "call": ctx.call.model_dump(mode="json"), **more}
        assert self._client is not None  # made by warm_up
        body = bytearray()
        async with self._client.stream("POST", self.url, json=message) as answer:
            if answer.status_code != 200:
                raise ServiceFailed(f"{self.url} answered {answer.status_code}")
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_BYTES:
                    raise ServiceFailed(f"{self.url} answered over {ANSWER_BYTES:,} bytes")
        return _ANSWER.validate_python(json.loads(body))
