"""An agent's turns over HTTP: what hooks say at the four points that only the agent's own loop reaches."""

from fastapi import APIRouter

from gateway.models import LlmAnswer, LlmCall, TurnAnswer, TurnDecision, TurnRecord, TurnRequest
from gateway.transports.http.app import TheGateway, TheSession

router = APIRouter(prefix="/v1/sessions/{session_id}/turns", tags=["turns"])


@router.post("", status_code=201)
async def begin_turn(request: TurnRequest, session: TheSession, gateway: TheGateway) -> TurnDecision:
    """`pre_agent_turn`: `continue` with the content in force, or `skip`, or `hook` (one broke)."""
    return await gateway.agent_points.begin(session, request)


@router.get("/{turn_id}")
async def get_turn(turn_id: str, session: TheSession, gateway: TheGateway) -> TurnRecord:
    """What was counted and decided so far."""
    return await gateway.turn_record(session, turn_id)


@router.post("/{turn_id}/pre_llm_call")
async def pre_llm_call(turn_id: str, call: LlmCall, session: TheSession, gateway: TheGateway) -> TurnDecision:
    """Before the model is asked: `continue`, `skip` (its reason stands for the answer), `stop`, `hook`."""
    return await gateway.agent_points.before_llm(session, turn_id, call)


@router.post("/{turn_id}/post_llm_call")
async def post_llm_call(turn_id: str, answer: LlmAnswer, session: TheSession, gateway: TheGateway) -> TurnDecision:
    """When the model has answered: `accept` with the content in force, `retry`, `reject`, `hook`."""
    return await gateway.agent_points.after_llm(session, turn_id, answer)


@router.post("/{turn_id}/post_agent_turn")
async def post_agent_turn(turn_id: str, answer: TurnAnswer, session: TheSession, gateway: TheGateway) -> TurnDecision:
    """When the agent would end: `accept`, `retry` (it must go on), `hook`."""
    return await gateway.agent_points.end(session, turn_id, answer)
