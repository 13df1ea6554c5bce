"""MCP over HTTP: `/mcp`, whose session follows from the token, and `/v1/sessions/{session_id}/mcp`.

Behind the same guard as every route. `Mcp-Session-Id` names a connection of the older era, never a session of ours.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from gateway.errors import Forbidden, NotFound
from gateway.gateway import Gateway
from gateway.models import SessionRequest
from gateway.principals import Principal
from gateway.sessions import Session
from gateway.transports.mcp.server import Asker, Context, build_server

IDLE_SECONDS: Final = 900.0
"""A connection of the older era that was neither used nor ended is forgotten after this."""
ASKER: Final = "sandgate.asker"
AUTO_LABEL: Final = {"opened": "by MCP"}


class McpOverHttp:
    """The ASGI application; use it inside `run()`, which owns its connections."""

    def __init__(self, gateway: Gateway, json_body: int, *, auto_session: bool) -> None:
        self._gateway = gateway
        self._auto_session = auto_session
        self._opening = anyio.Lock()
        self._manager = StreamableHTTPSessionManager(
            build_server(gateway, _asker_of), max_request_body_size=json_body, session_idle_timeout=IDLE_SECONDS
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with self._manager.run():
            yield

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        principal: Principal = scope["principal"]
        session = await self._session(principal, scope["path_params"].get("session_id"), scope["method"])
        owner = AccessToken(token="", client_id=f"{principal.name}/{session.id}", scopes=[])
        scope["user"], scope[ASKER] = AuthenticatedUser(owner), Asker(principal, session)
        await self._manager.handle_request(scope, receive, send)

    async def _session(self, principal: Principal, session_id: str | None, method: str) -> Session:
        if session_id is not None or principal.role == "session":
            return self._gateway.sessions.find(principal, session_id or principal.session_id or "")
        if principal.role != "agent" or not self._auto_session:
            raise Forbidden(
                "this token opens no session over MCP",
                "Open one by POST /v1/sessions and use its token here, or /v1/sessions/{id}/mcp.",
            )
        async with self._opening:
            for session in self._gateway.sessions.open:
                if session.row.opened_by == "agent" and session.request.labels == AUTO_LABEL:
                    return session
            if method != "POST":
                raise NotFound("no session has been opened yet", "Send initialize, or any request of 2026-07-28.")
            profile = self._gateway.profiles.first_granted(principal)
            opened = await self._gateway.open_session(principal, SessionRequest(profile=profile, labels=AUTO_LABEL))
            return self._gateway.sessions.find(principal, opened.id)


def _asker_of(ctx: Context) -> Asker:
    assert ctx.request is not None  # over HTTP there is one
    asker: Asker = ctx.request.scope[ASKER]
    return asker
