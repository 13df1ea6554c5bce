"""Stored results over HTTP: whole, by byte range, by lines, by pattern."""

import re
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from gateway.errors import Problem, Unprocessable
from gateway.journal import ResultRow
from gateway.results import SessionResults
from gateway.transports.http.app import TheGateway, ThePrincipal, TheSession
from gateway.wire import Page, StoredResultEntry, StoredResultList

router = APIRouter(prefix="/v1/sessions/{session_id}/results", tags=["results"])

PAGE_BYTES: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_LINES: Final = re.compile(r"(\d{1,12})-(\d{1,12})")


class NotSatisfiable(Problem):
    """A byte range outside the result."""

    status, title, code = 416, "Range not satisfiable", "range_not_satisfiable"


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
        first, last = _line_range(lines)
        text, cut = await results.lines(key, first, last, PAGE_BYTES)
        return Page(text=text, truncated=cut)
    if grep is not None:
        text, cut = await results.grep(key, grep, PAGE_BYTES)
        return Page(text=text, truncated=cut)
    return await _bytes(results, row, request.headers.get("range"))


def _line_range(lines: str) -> tuple[int, int]:
    found = _LINES.fullmatch(lines)
    if found is None or int(found[1]) < 1:
        raise Unprocessable("lines: not a range of lines", 'Write it as "1-200", from 1.')
    return int(found[1]), int(found[2])


async def _bytes(results: SessionResults, row: ResultRow, wanted: str | None) -> Response:
    start, end, status = 0, row.bytes, 200
    if wanted is not None and (found := _RANGE.fullmatch(wanted)) is not None and any(found.groups()):
        start, end = _byte_range(found[1], found[2], row.bytes)
        status = 206
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(end - start),
        "etag": f'"{row.sha256}"',
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-cache",
        "last-modified": formatdate(row.created, usegmt=True),
        "content-disposition": f'attachment; filename="{row.key.rpartition("/")[2]}"',
    }
    if status == 206:
        headers["content-range"] = f"bytes {start}-{end - 1}/{row.bytes}"
    chunks = results.read(row.key, start, end)
    first = await anext(chunks, b"")  # a store that does not answer is told before anything else is
    return StreamingResponse(_after(first, chunks), status, headers, row.media_type)


def _byte_range(first: str, last: str, size: int) -> tuple[int, int]:
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise NotSatisfiable(f"the result has {size:,} bytes", headers={"content-range": f"bytes */{size}"})
    return start, end


async def _after(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk
