"""Turn: one turn of an agent's own loop, with the gateway's hooks at its four points."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
from pydantic_core import to_jsonable_python

from gateway.client.connection import segment
from gateway.client.errors import ClientError
from gateway.client.model_calls import model_call, model_usage
from gateway.models import Content, ToolResult, TurnDecision, TurnOutcome, TurnRecord

if TYPE_CHECKING:
    from gateway.client.session import Session


class Turn:
    """A turn, from the user's words to the agent's. Iterate it for the loop:

        async with session.turn("What is in this repository?") as turn:
            async for step in turn:                  # before each question to the model
                reply = await ask_model(...)         # yours
                more = await step.answered(reply.content, reply.tool_calls, usage=reply.usage)
        print(turn.answer)

    `user_content` and `answer` are what the hooks left of them; `outcome` is None until the turn has ended, and
    `reason` says why it ended otherwise than `completed`.
    """

    def __init__(self, session: "Session", begun: TurnDecision) -> None:
        self.id = begun.turn_id
        self.user_content: Content = begun.content or ""
        self.answer: Content | None = None
        self.outcome: TurnOutcome | None = None
        self.reason = ""
        self._session = session
        self._path = f"{session._path}/turns/{segment(begun.turn_id)}"
        self._ended(begun)

    @classmethod
    async def begin(cls, session: "Session", user_content: Content) -> Self:
        body = {"user_content": user_content}
        return cls(session, await session._connection._ask(TurnDecision, "POST", f"{session._path}/turns", body=body))

    async def __aiter__(self) -> AsyncIterator["Step"]:
        """A step for each question to the model that the hooks let pass, until the turn has ended."""
        while self.outcome is None:
            decision = await self.pre_llm_call()
            if decision.decision == "skip":
                await self.post_agent_turn(decision.reason)
            elif decision.decision == "continue":
                step = Step(self)
                yield step
                if not step.done:
                    raise RuntimeError("a step ends with step.answered(...), before the next one begins")

    async def call(self, tool: str, arguments: Mapping[str, Any] | None = None, **more: Any) -> ToolResult:
        """Call a tool as a part of this turn; as `Session.call`."""
        return await self._session.call(tool, arguments, turn_id=self.id, **more)

    async def record(self) -> TurnRecord:
        """What was counted and decided so far."""
        return await self._session._connection._ask(TurnRecord, "GET", self._path)

    async def pre_llm_call(self, model: str | None = None, messages: Sequence[object] | None = None) -> TurnDecision:
        """`continue`, `skip` (its reason stands for the answer), `stop` or `hook`."""
        return await self._at("pre_llm_call", {"model": model, "messages": messages})

    async def post_llm_call(
        self,
        content: Content | None,
        tool_calls: Iterable[object] = (),
        *,
        finish_reason: str | None = None,
        usage: object = None,
    ) -> TurnDecision:
        """`accept` with the content in force, `retry` with what to tell the model, `reject` or `hook`."""
        calls = to_jsonable_python(list(tool_calls), fallback=vars)
        body = {"content": content, "tool_calls": calls, "finish_reason": finish_reason, "usage": model_usage(usage)}
        return await self._at("post_llm_call", body)

    async def post_agent_turn(self, content: Content | None) -> TurnDecision:
        """`accept`, which ends the turn, `retry` with what to tell the model, or `hook`."""
        decision = await self._at("post_agent_turn", {"content": content})
        if decision.decision == "accept":
            self.answer = decision.content
        return decision

    async def _at(self, point: str, body: Mapping[str, Any]) -> TurnDecision:
        decision = await self._session._connection._ask(TurnDecision, "POST", f"{self._path}/{point}", body=body)
        self._ended(decision)
        return decision

    def _ended(self, decision: TurnDecision) -> None:
        self.outcome = decision.outcome
        if decision.outcome is not None:
            self.reason = decision.reason
        if decision.outcome == "skipped":
            self.answer = decision.reason


class Step:
    """One question to the model. `content` is what the hooks left of its answer."""

    def __init__(self, turn: Turn) -> None:
        self.content: Content | None = None
        self.done = False
        self._turn = turn

    async def answered(
        self,
        content: Content | None,
        tool_calls: Iterable[object] | None = None,
        *,
        finish_reason: str | None = None,
        usage: object = None,
    ) -> list[dict[str, Any]]:
        """Let the hooks judge what the model answered, make its tool calls, and return what it must be told next:
        results in the shape of its API, or a user's message with a hook's feedback. Nothing, when the turn has ended.

        `tool_calls` and `usage` are as the API of OpenAI or Anthropic gives them; the calls are made side by side.
        """
        calls = list(tool_calls or ())
        decision = await self._turn.post_llm_call(content, calls, finish_reason=finish_reason, usage=usage)
        self.content, self.done = content, True
        if decision.decision == "retry":
            return _feedback(decision.reason, calls)
        if decision.decision != "accept":
            return []
        self.content = decision.content
        if calls:
            return await self._made(calls)
        end = await self._turn.post_agent_turn(self.content)
        return _feedback(end.reason, []) if end.decision == "retry" else []

    async def _made(self, calls: list[object]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{} for _ in calls]
        refused: list[ClientError] = []

        async def make(place: int, call: object) -> None:
            try:
                answers[place] = await self._turn._session.dispatch(call, turn_id=self._turn.id)
            except ClientError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            for place, call in enumerate(calls):
                tasks.start_soon(make, place, call)
        for error in refused:
            raise error
        return answers


def _feedback(text: str, calls: list[object]) -> list[dict[str, Any]]:
    """What a hook wants the model to know: as the answer to each call that was not made, else in the user's place."""
    if calls:
        return [model_call(one).answer(f"not run: {text}", is_error=True) for one in calls]
    return [{"role": "user", "content": text}]
