"""Signed URLs over HTTP: made and revoked by who sees the session, opened by whoever has one."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.transports.http.app import TheGateway, TheSession
from gateway.transports.http.downloads import stored_bytes
from gateway.transports.http.guard import SIGNED_PATH
from gateway.wire import SignedUrl, SignedUrlRequest

router = APIRouter(tags=["results"])


@router.post("/v1/sessions/{session_id}/urls", status_code=201)
async def make_url(body: SignedUrlRequest, request: Request, session: TheSession, gateway: TheGateway) -> SignedUrl:
    """A URL that reads one stored result without a token, until it expires, the result goes, or it is revoked."""
    link = await gateway.urls.sign(session.id, body.reference, body.seconds)
    return SignedUrl(url=f"{str(request.base_url).rstrip('/')}{SIGNED_PATH}{link.token}", expires=link.expires)


@router.delete("/v1/sessions/{session_id}/urls", status_code=204)
async def revoke_urls(session: TheSession, gateway: TheGateway) -> None:
    """End all signed URLs of the session."""
    gateway.urls.revoke(session.id)


@router.get(f"{SIGNED_PATH}{{token}}", response_model=None)
async def open_url(token: str, request: Request, gateway: TheGateway) -> Response:
    """The bytes of the result, also by `Range`; 410 for a URL that has ended."""
    results, key = await gateway.urls.open(token)
    return await stored_bytes(results, await results.row(key), request.headers)
