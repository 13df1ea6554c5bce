"""Sessions and their tools over HTTP."""

import anyio
from fastapi import APIRouter

from gateway.models import CloseReport, OpenedSession, SessionRecord, SessionRequest
from gateway.sessions import Session
from gateway.toolbox import FORMATS
from gateway.transports.http.app import TheGateway, ThePrincipal, TheSession
from gateway.wire import SessionList, ToolFormat, ToolList

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.post("", status_code=201)
async def open_session(request: SessionRequest, gateway: TheGateway, principal: ThePrincipal) -> OpenedSession:
    """Open a session; the answer is the only place where its token appears."""
    return await gateway.open_session(principal, request)


@router.get("")
async def list_sessions(gateway: TheGateway, principal: ThePrincipal) -> SessionList:
    """The sessions that this token may see."""
    sessions = gateway.sessions.visible(principal)
    records = {one.id: one.record() for one in sessions}

    async def measure(session: Session) -> None:
        records[session.id] = await session.measured()

    async with anyio.create_task_group() as tasks:
        for one in sessions:
            if one.sandbox_alive:
                tasks.start_soon(measure, one)
    return SessionList(sessions=tuple(records.values()))


@router.get("/{session_id}")
async def get_session(session: TheSession) -> SessionRecord:
    """One session, open or ended."""
    return await session.measured()


@router.delete("/{session_id}")
async def close_session(session: TheSession, gateway: TheGateway) -> CloseReport:
    """Collect, then remove; again: the same report."""
    return await gateway.close_session(session)


@router.get("/{session_id}/tools")
async def list_tools(session: TheSession, format: ToolFormat = "mcp") -> ToolList:
    """What this session may call, as MCP, OpenAI or Anthropic want it."""
    return ToolList(tools=tuple(FORMATS[format](one) for one in session.tools))
