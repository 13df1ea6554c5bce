"""MCP servers behind the gateway, for the operator alone: what they offer, and what was changed and waits."""

from fastapi import APIRouter, Depends

from gateway.gateway import Gateway
from gateway.transports.http.app import TheGateway, the_operator
from gateway.wire import UpstreamEntry, UpstreamList

router = APIRouter(prefix="/v1/upstreams", tags=["upstreams"], dependencies=[Depends(the_operator)])


@router.get("")
async def list_upstreams(gateway: TheGateway) -> UpstreamList:
    """Each server, its accepted tools, and the new or changed ones that no session may call yet."""
    return _listed(gateway)


@router.post("/{name}/accept")
async def accept_upstream(name: str, gateway: TheGateway) -> UpstreamList:
    """Let what the server lists now stand for what was accepted before; open sessions see it at once."""
    gateway.accept_upstream(name)
    return _listed(gateway)


def _listed(gateway: Gateway) -> UpstreamList:
    return UpstreamList(
        upstreams=tuple(
            UpstreamEntry(
                name=upstream.name,
                where=upstream.url or " ".join(upstream.command),
                tools=tuple(one.definition for one in accepted),
                waiting=tuple(one.definition for one in waiting),
            )
            for upstream, accepted, waiting in gateway.upstreams.state()
        )
    )
