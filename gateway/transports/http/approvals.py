"""Approvals over HTTP, for the operator alone: see them, wait for them, decide them."""

from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.sse import format_sse_event
from starlette.responses import Response, StreamingResponse

from gateway.approvals import Approvals
from gateway.errors import Unprocessable
from gateway.models import Approval, ApprovalDecision, ApprovalState
from gateway.transports.http.app import TheGateway, the_operator
from gateway.wire import ApprovalList

router = APIRouter(prefix="/v1/approvals", tags=["approvals"], dependencies=[Depends(the_operator)])

MAX_WAIT_SECONDS: Final = 55.0
KEEPALIVE_SECONDS: Final = 15.0
EVENT_STREAM: Final = "text/event-stream"
PAGE: Final = 100
MAX_REVISION: Final = 2**63 - 1

State = Literal["waiting", "allowed", "denied", "expired", "all"]


@router.get("", response_model=ApprovalList, responses={200: {"content": {EVENT_STREAM: {}}}})
async def list_approvals(
    request: Request,
    gateway: TheGateway,
    state: State = "waiting",
    after: Annotated[int, Query(ge=0, le=MAX_REVISION)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = PAGE,
    wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0,
) -> Response:
    """Approvals in the order of their last change, those with a `revision` over `after`. Where there are none, one that
    comes within `wait_seconds`. With `Accept: text/event-stream` one event each, as they change, until the client
    leaves; the `Last-Event-ID` of a stream that broke goes before `after`.
    """
    wanted = None if state == "all" else state
    if EVENT_STREAM not in request.headers.get("accept", ""):
        found = await gateway.approvals.list(wanted, after=after, limit=limit, wait_seconds=wait_seconds)
        return Response(ApprovalList(approvals=tuple(found)).model_dump_json(), media_type="application/json")
    return StreamingResponse(
        _events(gateway.approvals, wanted, _last_seen(request, after)),
        media_type=EVENT_STREAM,
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@router.get("/{approval_id}")
async def get_approval(approval_id: str, gateway: TheGateway) -> Approval:
    """One approval; its arguments are whole as long as it waits."""
    return await gateway.approvals.get(approval_id)


@router.post("/{approval_id}")
async def decide_approval(approval_id: str, decision: ApprovalDecision, gateway: TheGateway) -> Approval:
    """Let the call run, or not. Only `"allow"` lets it; edited `arguments` are checked first, and refused with 422."""
    return await gateway.decide_approval(approval_id, decision)


def _last_seen(request: Request, after: int) -> int:
    last = request.headers.get("last-event-id")
    if last is None:
        return after
    if not (last.isascii() and last.isdigit() and len(last) < 19):
        raise Unprocessable("Last-Event-ID: not one of ours", "Send back the id of the last event, as it came.")
    return int(last)


async def _events(approvals: Approvals, state: ApprovalState | None, after: int) -> AsyncIterator[bytes]:
    while not approvals.stopping:
        found = await approvals.list(state, after=after, limit=PAGE, wait_seconds=KEEPALIVE_SECONDS)
        for one in found:
            after = one.revision
            yield format_sse_event(event="approval", data_str=one.model_dump_json(), id=str(one.revision))
        if not found:
            yield b": keepalive\n\n"
