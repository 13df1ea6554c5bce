"""Stored results over HTTP: whole, by byte range, by lines, by pattern."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from gateway.results import line_range
from gateway.transports.http.app import TheGateway, ThePrincipal, TheSession
from gateway.transports.http.downloads import stored_bytes
from gateway.wire import Page, StoredResultEntry, StoredResultList

router = APIRouter(prefix="/v1/sessions/{session_id}/results", tags=["results"])

PAGE_BYTES: Final = 1 << 20


@router.get("")
async def list_results(session: TheSession, gateway: TheGateway, principal: ThePrincipal) -> StoredResultList:
    """What is stored for this session; what a broken hook withheld only for the operator."""
    rows = await gateway.journal.results(session.id)
    uri = gateway.results.store_uri if session.show_store_uri else None
    return StoredResultList(
        results=tuple(
            StoredResultEntry.model_validate(
                {
                    "reference": f"sandgate://{session.id}/results/{row.key}",
                    "stream": row.stream,
                    "bytes": row.bytes,
                    "media_type": row.media_type,
                    "sha256": row.sha256,
                    "created": row.created,
                    "expires": row.expires,
                    "store_uri": uri(session.id, row.key) if uri else None,
                }
            )
            for row in rows
            if principal.role == "operator" or not row.withheld
        )
    )


@router.get("/{key:path}", response_model=None)
async def get_result(
    key: str,
    request: Request,
    session: TheSession,
    gateway: TheGateway,
    principal: ThePrincipal,
    lines: Annotated[str | None, Query(max_length=30)] = None,
    grep: Annotated[str | None, Query(max_length=1000, min_length=1)] = None,
) -> Response | Page:
    """A result's bytes (with `Range`), or a page of its text by `lines` ("1-200") or `grep` (RE2)."""
    results = gateway.session_results(principal, session)
    row = await results.row(key)
    if lines is not None:
        first, last = line_range(lines)
        text, cut = await results.lines(key, first, last, PAGE_BYTES)
        return Page(text=text, truncated=cut)
    if grep is not None:
        text, cut = await results.grep(key, grep, PAGE_BYTES)
        return Page(text=text, truncated=cut)
    return await stored_bytes(results, row, request.headers)


@router.delete("/{key:path}", status_code=204)
async def delete_result(key: str, session: TheSession, gateway: TheGateway, principal: ThePrincipal) -> None:
    """Delete a result before its time; whoever asks for it again is told so, by 410."""
    await gateway.session_results(principal, session).delete(key)
