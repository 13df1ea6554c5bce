"""The FastAPI application over a Gateway, and who is asking."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from starlette.routing import Route

from gateway.errors import Forbidden
from gateway.gateway import Gateway
from gateway.principals import Principal, Tokens, digest
from gateway.sessions import Session
from gateway.settings import Settings
from gateway.transports.http.guard import App, Guard, allowed_hosts
from gateway.transports.http.mcp import MCP_PATHS, McpRoute
from gateway.transports.http.problems import install_problem_handlers


def create_app(gateway: Gateway, tokens: Tokens, settings: Settings, port: int, mcp: McpRoute) -> App:
    """The whole transport, guarded; `port` is the one it is served on (for the Origin check)."""
    from gateway.transports.http import (
        approvals,
        calls,
        files,
        health,
        results,
        sessions,
        signed,
        terminal,
        turns,
        upstreams,
    )

    app = FastAPI(title="sandgate", version=version("sandgate"), docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    server = settings.server
    app.state.upload_bytes = int(server.upload)
    app.state.tickets = tickets = terminal.Tickets()
    busiest_first = (calls, turns, files, results, sessions, approvals, terminal, signed, upstreams, health)
    for module in busiest_first:
        app.include_router(module.router)
    for path in MCP_PATHS:
        app.router.routes.append(Route(path, endpoint=mcp))
    install_problem_handlers(app)
    hosts = allowed_hosts(server.host, server.allowed_hosts)
    origins = frozenset({f"http://{host}:{port}" for host in hosts} | {one.lower() for one in server.allowed_origins})
    return Guard(
        calls.Direct(app),
        authenticator(gateway, tokens),
        tickets.redeem,
        hosts,
        origins,
        int(server.json_body),
        int(server.upload),
    )


def authenticator(gateway: Gateway, tokens: Tokens) -> Callable[[str], Principal | None]:
    """Who a bearer token is."""

    def authenticate(token: str) -> Principal | None:
        role = tokens.role(token)
        if role is not None:
            return Principal(role)
        session_id = gateway.sessions.by_token(digest(token))
        return Principal("session", session_id) if session_id else None

    return authenticate


async def the_gateway(request: Request) -> Gateway:  # async: FastAPI runs sync dependencies in threads
    gateway: Gateway = request.app.state.gateway
    return gateway


async def the_principal(request: Request) -> Principal:
    """Put there by the guard; a route that the guard let through without one has none to give."""
    principal: Principal = request.scope["principal"]
    return principal


async def the_operator(request: Request) -> Principal:
    """Who asks, where that is the operator."""
    principal = await the_principal(request)
    if principal.role != "operator":
        raise Forbidden("this is for the operator alone", "Use the operator's token.")
    return principal


async def the_session(session_id: str, request: Request) -> Session:
    """The session of the path, if it exists for whoever asks."""
    return (await the_gateway(request)).sessions.find(await the_principal(request), session_id)


TheGateway = Annotated[Gateway, Depends(the_gateway)]
ThePrincipal = Annotated[Principal, Depends(the_principal)]
TheSession = Annotated[Session, Depends(the_session)]
