"""A session's terminal over a WebSocket: bytes both ways, a size as text; and tickets for pages."""

import json
import secrets
import time
from typing import Annotated, Final

import anyio
from anyio.abc import TaskGroup
from fastapi import APIRouter, Query, Request, WebSocket, WebSocketDisconnect

from gateway.errors import Problem, TooMany
from gateway.gateway import Gateway
from gateway.principals import Principal, digest
from gateway.terminals import Reader, SessionTerminal
from gateway.transports.http.app import TheGateway, ThePrincipal, TheSession
from gateway.transports.http.problems import answer_to
from gateway.wire import MOST_CHARACTERS, REPLACED, Resize, TerminalEnd, TerminalTicket
from sandboxes import SandboxError, TerminalSize

router = APIRouter(prefix="/v1/sessions/{session_id}/terminal", tags=["terminal"])

TICKET_SECONDS: Final = 30.0
MOST_TICKETS: Final = 1000
DEAF_SECONDS: Final = 30.0
"""How long a program may leave what was typed where it is, until its reader is sent away."""
ENDED, BAD_MESSAGE, LOST, DEAF = 1000, 1003, 1011, 1013

Characters = Annotated[int, Query(ge=1, le=MOST_CHARACTERS)]


class Tickets:
    """Tickets that are not used yet: each is for one path, for whoever asked, works once and for `TICKET_SECONDS`."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[float, str, Principal]] = {}

    def give(self, path: str, principal: Principal) -> str:
        """A new one. Raises TooMany."""
        now = time.monotonic()
        self._given = {key: one for key, one in self._given.items() if one[0] > now}
        if len(self._given) >= MOST_TICKETS:
            raise TooMany("too many tickets are not used yet", "Use them.", retry_after_seconds=int(TICKET_SECONDS))
        ticket = secrets.token_urlsafe(32)
        self._given[digest(ticket)] = (now + TICKET_SECONDS, path, principal)
        return ticket

    def redeem(self, path: str, ticket: str) -> Principal | None:
        """Who it was given to; whatever it was good for, it is used up."""
        until, place, principal = self._given.pop(digest(ticket), (0.0, "", None))
        return principal if place == path and time.monotonic() < until else None


@router.post("", status_code=201)
async def ticket(request: Request, session: TheSession, gateway: TheGateway, principal: ThePrincipal) -> TerminalTicket:
    """A ticket for a page, which cannot send a token with a WebSocket: `new WebSocket(path + "?ticket=" + ticket)`."""
    gateway.check_terminal(principal, session)
    path = request.url.path
    return TerminalTicket(
        ticket=request.app.state.tickets.give(path, principal), path=path, expires_seconds=TICKET_SECONDS
    )


@router.websocket("")
async def terminal(websocket: WebSocket, session_id: str, columns: Characters = 80, rows: Characters = 24) -> None:
    """The session's terminal. Binary messages are what is typed and shown; text is `{"type": "resize", ...}` to us, and
    `{"type": "end", ...}` from us where the shell has ended. Leaving does not end it: who comes next gets what was
    shown lately, and the place of who is there."""
    gateway: Gateway = websocket.app.state.gateway
    principal: Principal = websocket.scope["principal"]
    try:
        session = gateway.sessions.find(principal, session_id)
        shell = await gateway.terminal(principal, session, TerminalSize(columns, rows))
    except (Problem, SandboxError) as error:
        await websocket.send_denial_response(answer_to(error))
        return
    reader = shell.attach()
    try:
        await websocket.accept()
        code = await _serve(websocket, shell, reader)
        if code == ENDED and shell.exit is not None:
            end = TerminalEnd(how=shell.exit.how, code=shell.exit.code)
            await websocket.send_text(end.model_dump_json())
        if code is not None:
            await websocket.close(code)
    except WebSocketDisconnect:
        return
    finally:
        shell.detach(reader)
        session.last_used = time.time()


class Leave(Exception):
    """The connection is to end, with this code; without one it has ended."""

    def __init__(self, code: int | None) -> None:
        super().__init__()
        self.code = code


async def _serve(websocket: WebSocket, shell: SessionTerminal, reader: Reader) -> int | None:
    """Serve one reader; the code to close with, or None where the connection is gone."""
    code: int | None = None

    async def listen(tasks: TaskGroup) -> None:
        nonlocal code
        try:
            await _listen(websocket, shell)
        except Leave as leave:
            code = leave.code
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen, tasks)
        try:
            async for chunk in reader.chunks():
                await websocket.send_bytes(chunk)
            code = REPLACED if reader.replaced else ENDED if shell.exit is not None else LOST
        except WebSocketDisconnect:
            code = None
        tasks.cancel_scope.cancel()
    return code


async def _listen(websocket: WebSocket, shell: SessionTerminal) -> None:
    """Do what the reader wants, until it is gone or talks nonsense."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Leave(None)
        if (data := message.get("bytes")) is not None:
            with anyio.move_on_after(DEAF_SECONDS) as limit:
                await shell.type(data)
            if limit.cancelled_caught:
                raise Leave(DEAF)
            continue
        try:
            size = Resize.model_validate(json.loads(message["text"]))
        except (ValueError, RecursionError):
            raise Leave(BAD_MESSAGE) from None
        shell.resize(TerminalSize(size.columns, size.rows))
