"""Calls over HTTP: as one JSON answer, or as a stream of events that can be taken up again."""

import base64
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Final

import anyio
from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.sse import format_sse_event
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from gateway.answer import bounded
from gateway.calls import ActiveCall, OutputEvent, ProgressEvent, output_events
from gateway.errors import NotFound, Unprocessable
from gateway.models import STREAMS, CallRecord, CallRequest, Stream, ToolResult, Wire
from gateway.transports.http.app import TheGateway, TheSession, the_gateway, the_session
from gateway.transports.http.guard import Receive, Scope, Send
from gateway.transports.http.problems import answer_to, invalid_body, unreadable_body
from gateway.wire import Accepted, CallList, Cancelled, Output, Progress

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/sessions/{session_id}/calls", tags=["calls"])

KEEPALIVE_SECONDS: Final = 15.0
QUICK_SECONDS: Final = 0.02
"""A call that ends this soon is not worth a watch over its connection."""
MAX_KEY_CHARACTERS: Final = 255
MAX_SEQUENCE: Final = 2**63 - 1
EVENT_STREAM: Final = "text/event-stream"
LINE_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 64 * 1024
"""Of a result that is over the line; JSON makes six characters of one that is a control character."""
CALLS_PATH: Final = re.compile(r"/v1/sessions/(?P<session_id>[^/]+)/calls")
_EVENT_ID: Final = re.compile(r"stdout:(\d{1,18}),stderr:(\d{1,18})")

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID")]


def _header(name: str, description: str) -> dict[str, object]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": {"type": "string"}}


CALL_DOCUMENTATION: Final[dict[str, object]] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": CallRequest.model_json_schema()}}},
    "parameters": [
        {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}},
        _header(
            "Idempotency-Key", f"Runs once, whatever the connection does; at most {MAX_KEY_CHARACTERS} characters."
        ),
        _header("Last-Event-ID", "Of a stream that is taken up again, with the same Idempotency-Key."),
    ],
}


@router.post(
    "", response_model=ToolResult, responses={200: {"content": {EVENT_STREAM: {}}}}, openapi_extra=CALL_DOCUMENTATION
)
async def call(request: Request) -> Response:
    """Run a tool. 200 with a ToolResult whatever its status; with `Accept: text/event-stream` as events.

    Without an Idempotency-Key the call ends when its client is gone; with one it runs on, and a retry gets its answer.
    """
    gateway = await the_gateway(request)
    session = await the_session(request.path_params["session_id"], request)
    body = _call_request(await request.body())
    idempotency_key = _key(request.headers.get("idempotency-key"))
    start = _offsets(request.headers.get("last-event-id"))
    active = await gateway.start_call(session, body, idempotency_key, streamed=_wants_events(request))
    if _wants_events(request):
        return _stream(active, start)
    if not active.keyed:
        return _json(await _while_connected(request, active))
    return _json(await active.wait())


@dataclass(frozen=True, slots=True)
class Direct:
    """Answers a call in front of the framework, and passes on everything else.

    The framework's routing and middleware cost 0.2 to 0.3 ms of the 2.7 that a call of `echo hi` takes.
    """

    app: FastAPI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = CALLS_PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        scope["app"], scope["path_params"] = self.app, found.groupdict()
        try:
            response = await call(Request(scope, receive, send))
        except Exception as error:
            response = answer_to(error)
            if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("%s", scope["path"])
        await response(scope, receive, send)


@router.get("")
async def list_calls(
    session: TheSession,
    gateway: TheGateway,
    after: Annotated[int, Query(ge=0, le=MAX_SEQUENCE)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> CallList:
    """The session's calls."""
    return CallList(calls=tuple(await gateway.journal.calls(session.id, after, limit)))


@router.get("/{call_id}", response_model=CallRecord, responses={200: {"content": {EVENT_STREAM: {}}}})
async def get_call(
    call_id: str, request: Request, session: TheSession, gateway: TheGateway, last_event_id: LastEventId = None
) -> Response:
    """A call's record; with `Accept: text/event-stream` its events, from `Last-Event-ID` on, as long as they are
    kept (`replay_seconds` after its end)."""
    if not _wants_events(request):
        return _json(await gateway.call_record(session, call_id))
    active = gateway.active_call(session, call_id)
    if active is None:
        raise NotFound("no such stream", "Its record says how the call ended.")
    return _stream(active, _offsets(last_event_id))


@router.post("/{call_id}/cancel")
async def cancel_call(call_id: str, session: TheSession, gateway: TheGateway) -> Cancelled:
    """Ask a call to end: its process tree is dead within 2 seconds, its status is `cancelled`."""
    running = session.running.get(call_id)
    if running is None:
        await gateway.call_record(session, call_id)
        return Cancelled(id=call_id, cancelled=False)
    running.cancel("cancelled by its client")
    return Cancelled(id=call_id, cancelled=True)


def _call_request(body: bytes) -> CallRequest:
    try:
        return CallRequest.model_validate(json.loads(body))
    except ValidationError as error:
        raise invalid_body(error) from error
    except (ValueError, RecursionError) as error:
        raise unreadable_body() from error


def _key(key: str | None) -> str | None:
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise Unprocessable(
            f"Idempotency-Key: 1 to {MAX_KEY_CHARACTERS} characters", "Make a shorter one, such as a UUID."
        )
    return key


def _wants_events(request: Request) -> bool:
    return EVENT_STREAM in request.headers.get("accept", "")


def _json(value: Wire) -> Response:
    return Response(value.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})


async def _while_connected(request: Request, active: ActiveCall) -> ToolResult:
    """The result, unless the client goes away first: then the call is cancelled."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        active.cancel("its client is gone")

    with anyio.move_on_after(QUICK_SECONDS):
        return await active.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        result = await active.wait()
        tasks.cancel_scope.cancel()
    return result


def _offsets(last_event_id: str | None) -> dict[Stream, int]:
    if last_event_id is None:
        return {}
    found = _EVENT_ID.fullmatch(last_event_id)
    if found is None:
        raise Unprocessable("Last-Event-ID: not one of ours", "Send back the id of the last event, as it came.")
    return {stream: int(found[place]) for place, stream in enumerate(STREAMS, start=1)}


def _stream(active: ActiveCall, start: dict[Stream, int]) -> Response:
    return StreamingResponse(
        _events(active, start),
        media_type=EVENT_STREAM,
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _events(active: ActiveCall, start: dict[Stream, int]) -> AsyncIterator[bytes]:
    async with active:
        yield _event("accepted", Accepted(id=active.call.id, call_id=active.call.call_id, tool=active.call.tool))
        async for event in output_events(active, start, KEEPALIVE_SECONDS):
            match event:
                case OutputEvent():
                    offsets = ",".join(f"{stream}:{event.offsets[stream]}" for stream in STREAMS)
                    yield _event("output", _output(event), offsets)
                case ProgressEvent():
                    yield _event("progress", Progress(bytes=dict(event.bytes)))
                case None:
                    yield b": keepalive\n\n"
        result = await active.wait()
        yield format_sse_event(event="result", data_str=_result_line(result))


def _result_line(result: ToolResult) -> str:
    """The result on one line of bounded size: readers drop a stream whose lines are over 1 MiB, and what is left out
    here has been streamed, or is stored."""
    line = result.model_dump_json()
    if len(line) <= LINE_BYTES // 4 or len(line.encode()) <= LINE_BYTES:
        return line
    note = f"cut to fit one event of {LINE_BYTES:,} bytes"
    result = result.model_copy(update={"notes": (*result.notes, note)})
    return bounded(result, PIECE_BYTES, cut=True).model_dump_json()


def _output(event: OutputEvent) -> Output:
    try:
        return Output(stream=event.stream, offset=event.offset, text=event.data.decode())
    except UnicodeDecodeError:
        return Output(
            stream=event.stream,
            offset=event.offset,
            text=event.data.decode(errors="replace"),
            base64=base64.b64encode(event.data).decode(),
        )


def _event(name: str, data: Wire, id: str | None = None) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data.model_dump(exclude_unset=True)), id=id)
