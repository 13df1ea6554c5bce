"""Bytes on their way out: whole or by range, with what tells a cache whether it has them already."""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

from starlette.responses import Response, StreamingResponse

from gateway.errors import Problem
from gateway.journal import ResultRow
from gateway.results import SessionResults

SAFE: Final[Mapping[str, str]] = {
    "accept-ranges": "bytes",
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "referrer-policy": "no-referrer",
}
"""What a program wrote must not act in a browser as if we had."""
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class NotSatisfiable(Problem):
    """A byte range outside of what there is."""

    status, title, code = 416, "Range not satisfiable", "range_not_satisfiable"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes `start..end` of `size`; `partial` where that is what was asked for."""

    start: int
    end: int
    size: int
    partial: bool

    @property
    def headers(self) -> dict[str, str]:
        length = {"content-length": str(self.end - self.start)}
        if not self.partial:
            return length
        return {**length, "content-range": f"bytes {self.start}-{self.end - 1}/{self.size}"}

    @property
    def status(self) -> int:
        return 206 if self.partial else 200


def byte_range(wanted: str | None, size: int) -> ByteRange:
    """What a `Range` header asks for; one that is not understood asks for all (RFC 9110, 14.2). Raises
    NotSatisfiable."""
    found = _RANGE.fullmatch(wanted) if wanted is not None else None
    if found is None or not any(found.groups()):
        return ByteRange(0, size, size, partial=False)
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise NotSatisfiable(f"there are {size:,} bytes", headers={"content-range": f"bytes */{size}"})
    return ByteRange(start, end, size, partial=True)


async def stored_bytes(results: SessionResults, row: ResultRow, asked: Mapping[str, str]) -> Response:
    """The answer with a stored result; 304 to `If-None-Match` with its digest."""
    etag = f'"{row.sha256}"'
    headers = {
        **SAFE,
        "etag": etag,
        "cache-control": "private, no-cache",
        "last-modified": formatdate(row.created, usegmt=True),
        "content-disposition": f'attachment; filename="{row.key.rpartition("/")[2]}"',
    }
    if etag in [one.strip() for one in asked.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    unchanged = asked.get("if-range", etag) == etag
    wanted = byte_range(asked.get("range") if unchanged else None, row.bytes)
    chunks = results.read(row.key, wanted.start, wanted.end)
    return await streamed(chunks, wanted, headers, row.media_type)


async def streamed(
    chunks: AsyncIterator[bytes], wanted: ByteRange, headers: Mapping[str, str], media_type: str
) -> Response:
    """The answer as its bytes come; a source that fails at once is told before anything else is."""
    first = await anext(chunks, b"")
    return StreamingResponse(_after(first, chunks), wanted.status, {**headers, **wanted.headers}, media_type)


async def _after(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk
