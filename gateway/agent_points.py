"""AgentPoints: what hooks say at the four points of an agent's turn. The agent runs its loop; it asks here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from gateway.hooks.hook import Accept, Continue, Reject, Retry, Skip, Stop, TurnContext
from gateway.hooks.registered import HookBroken
from gateway.journal import Journal
from gateway.models import (
    Content,
    LlmAnswer,
    LlmCall,
    TurnAnswer,
    TurnDecision,
    TurnOutcome,
    TurnRequest,
    TurnWord,
)
from gateway.pipeline import MOST_REASON, Check, Pipeline, Trail
from gateway.sandbox_view import SandboxView
from gateway.sessions import Session
from gateway.turns import Turn

MOST_RETRIES: Final = 5
"""Retries in a row at one point of a turn. After that a model's answer is rejected, and a turn's last one stands."""
_CONTENT: Final[TypeAdapter[Content]] = TypeAdapter(Content)

Value = TypeVar("Value", TurnRequest, LlmCall, LlmAnswer, TurnAnswer)
Answer = Continue | Skip | Stop | Accept | Retry | Reject


@dataclass(frozen=True, slots=True)
class AgentPoints:
    """At each point every hook that has it is asked, in list order, each with what the one before left; the first that
    does not let it pass ends the chain. All of them raise NotFound or Unprocessable for a turn that is not open.
    """

    pipeline: Pipeline
    journal: Journal

    async def begin(self, session: Session, request: TurnRequest) -> TurnDecision:
        """Open a turn, and ask at `pre_agent_turn`: `continue` with the user's content in force, or `skip`."""
        session.check_open()
        turn = session.turns.begin()
        self.journal.add_turn(turn.record())
        return await self._at("pre_agent_turn", session, turn, request)

    async def before_llm(self, session: Session, turn_id: str, call: LlmCall) -> TurnDecision:
        """`continue`; `skip`, whose reason takes the place of the model's answer; or `stop`."""
        return await self._at("pre_llm_call", session, _open(session, turn_id), call)

    async def after_llm(self, session: Session, turn_id: str, answer: LlmAnswer) -> TurnDecision:
        """`accept` with the content in force, `retry` or `reject`. Its tokens are counted in any case."""
        turn = _open(session, turn_id)
        turn.token_usage += answer.usage
        return await self._at("post_llm_call", session, turn, answer)

    async def end(self, session: Session, turn_id: str, answer: TurnAnswer) -> TurnDecision:
        """`accept`, which ends the turn, or `retry`."""
        return await self._at("post_agent_turn", session, _open(session, turn_id), answer)

    async def _at(self, point: str, session: Session, turn: Turn, value: Value) -> TurnDecision:
        trail: Trail = []
        async with turn.lock:
            session.turns.find(turn.id)  # it may have ended while this waited
            try:
                value, decision = await self._chain(point, session, turn, value, trail)
            except HookBroken as broken:
                answer = _decision(turn, "hook", str(broken), "hook")
            else:
                answer = _applied(turn, point, value, decision)
            if answer.outcome is not None:
                turn.end(answer.outcome, answer.reason)
                session.turns.forget(turn)
            session.used()
            self.journal.update_turn(turn.record(), trail)
        return answer

    async def _chain(
        self, point: str, session: Session, turn: Turn, value: Value, trail: Trail
    ) -> tuple[Value, Answer]:
        """What is in force at the end of the chain, and the decision that ended it."""
        check = _CHECKS[point]
        for one in self.pipeline.having(point):
            ctx = TurnContext(
                session=session.info(turn.id),
                turn=turn.info(),
                tools=session.tools,
                sandbox=SandboxView(session.sandbox, is_executable=session.kind.opens),
            )
            decision = await self.pipeline.ask(one, point, ctx, value.model_copy(deep=True), check, trail)
            match decision:
                case Continue(user_content=content) if content is not None:
                    value = value.model_copy(update={"user_content": content})
                case Accept(replacement=content) if content is not None:
                    value = value.model_copy(update={"content": content})
                case Skip() | Stop() | Retry() | Reject():
                    return value, decision
        return value, check.passes


def _open(session: Session, turn_id: str) -> Turn:
    session.check_open()
    return session.turns.find(turn_id)


def _applied(turn: Turn, point: str, value: Value, decision: Answer) -> TurnDecision:
    """What a decision means for the turn."""
    if not isinstance(decision, Retry):
        turn.retries[point] = 0
    match decision:
        case Skip(reason):
            return _decision(turn, "skip", reason, "skipped" if point == "pre_agent_turn" else None)
        case Stop(reason):
            return _decision(turn, "stop", reason, "stopped")
        case Reject(reason):
            return _decision(turn, "reject", reason, "rejected")
        case Retry(feedback):
            return _retried(turn, point, value, feedback)
    match value:
        case TurnRequest():
            return TurnDecision(turn_id=turn.id, decision="continue", content=value.user_content)
        case LlmCall():
            return TurnDecision(turn_id=turn.id, decision="continue")
        case LlmAnswer():
            turn.step_count += 1
            return TurnDecision(turn_id=turn.id, decision="accept", content=value.content)
    return TurnDecision(turn_id=turn.id, decision="accept", content=value.content, outcome="completed")


def _retried(turn: Turn, point: str, value: Value, feedback: str) -> TurnDecision:
    turn.retries[point] += 1
    if turn.retries[point] <= MOST_RETRIES:
        return _decision(turn, "retry", feedback, None)
    reason = f"retried {MOST_RETRIES} times in a row, the last time for: {feedback}"
    if isinstance(value, TurnAnswer):
        return TurnDecision(
            turn_id=turn.id, decision="accept", content=value.content, reason=reason, outcome="completed"
        )
    return _decision(turn, "reject", reason, "rejected")


def _decision(turn: Turn, word: TurnWord, reason: str, outcome: TurnOutcome | None) -> TurnDecision:
    return TurnDecision(turn_id=turn.id, decision=word, reason=reason, outcome=outcome)


def _before_turn(answer: Any) -> Answer | None:
    match answer:
        case Continue(arguments=None, result=None, user_content=None):
            return answer
        case Continue(arguments=None, result=None, user_content=content) if content and (own := _content(content)):
            return Continue(user_content=own)
    return _skip(answer)


def _before_llm(answer: Any) -> Answer | None:
    match answer:
        case Continue(arguments=None, result=None, user_content=None):
            return answer
        case Stop(reason=str() as reason):
            return Stop(reason[:MOST_REASON]) if reason.strip() else Stop()
    return _skip(answer)


def _after_llm(answer: Any) -> Answer | None:
    match answer:
        case Accept(replacement=replacement) if replacement is not None:
            content = _content(replacement)
            return None if content is None else Accept(content)
        case Reject(reason=str() as reason) if reason.strip():
            return Reject(reason[:MOST_REASON])
    return _after_turn(answer)


def _after_turn(answer: Any) -> Answer | None:
    match answer:
        case Accept(replacement=None):
            return answer
        case Retry(feedback=str() as feedback) if feedback.strip():
            return Retry(feedback[:MOST_REASON])
    return None


def _skip(answer: Any) -> Answer | None:
    match answer:
        case Skip(reason=str() as reason):
            return Skip(reason[:MOST_REASON]) if reason.strip() else Skip()
    return None


def _content(value: Any) -> Content | None:
    """The content, if it is one."""
    try:
        return _CONTENT.validate_python(value)
    except (ValidationError, RecursionError):
        return None


_CHECKS: Final[Mapping[str, Check[Answer]]] = {
    "pre_agent_turn": Check(_before_turn, Continue()),
    "pre_llm_call": Check(_before_llm, Continue()),
    "post_llm_call": Check(_after_llm, Accept()),
    "post_agent_turn": Check(_after_turn, Accept()),
}
