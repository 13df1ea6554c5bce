"""Sessions and their tools over HTTP."""

from fastapi import APIRouter

from gateway.models import CloseReport, OpenedSession, SessionRecord, SessionRequest
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
    return SessionList(sessions=tuple(one.record() for one in gateway.sessions.visible(principal)))


@router.get("/{session_id}")
async def get_session(session: TheSession) -> SessionRecord:
    """One session, open or ended."""
    return session.record()


@router.delete("/{session_id}")
async def close_session(session: TheSession, gateway: TheGateway) -> CloseReport:
    """Collect, then remove; again: the same report."""
    return await gateway.close_session(session)


@router.get("/{session_id}/tools")
async def list_tools(session: TheSession, format: ToolFormat = "mcp") -> ToolList:
    """What this session may call, as MCP, OpenAI or Anthropic want it."""
    return ToolList(tools=tuple(FORMATS[format](one) for one in session.tools))
