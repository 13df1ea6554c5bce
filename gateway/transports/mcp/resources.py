"""A session's results and workspace files as MCP resources, by the same URIs that fsspec opens."""

import base64
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

import mcp_types as mcp

from gateway.errors import NotFound, Unprocessable
from gateway.results import SessionResults, line_range
from gateway.sessions import Session
from gateway.text import is_text, whole_characters
from sandboxes import SandboxError

PAGE_BYTES: Final = 128 * 1024
"""How much one read gives; base64 and JSON keep it below the 1 MiB of an event."""
LISTED: Final = 200
_PARAMETERS: Final = frozenset({"offset", "limit", "lines", "grep"})


def templates(session: Session) -> list[mcp.ResourceTemplate]:
    """How a part of a result, and a file, are addressed."""
    root = f"sandgate://{session.id}"
    found = [
        mcp.ResourceTemplate(
            name="result",
            uri_template=f"{root}/results/{{+key}}{{?offset,limit,lines,grep}}",
            description=f"A stored result: bytes from offset (at most {PAGE_BYTES:,}), lines such as 1-200, or the "
            "lines that match an RE2 expression.",
        )
    ]
    if session.kind.opens:
        found.append(
            mcp.ResourceTemplate(
                name="file",
                uri_template=f"{root}/workspace/{{+path}}{{?offset,limit}}",
                description="A file of the session's workspace.",
            )
        )
    return found


def listed(session: Session, results: list[tuple[str, str, int]]) -> list[mcp.Resource]:
    """Stored results as (key, media type, bytes)."""
    return [
        mcp.Resource(name=key, uri=f"sandgate://{session.id}/results/{key}", mime_type=media_type, size=size)
        for key, media_type, size in results
    ]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a resource URI asks for."""

    place: str
    path: str
    offset: int = 0
    limit: int = PAGE_BYTES
    lines: tuple[int, int] | None = None
    grep: str | None = None


def wanted(session: Session, uri: str) -> Wanted:
    """Read a URI. Another session's, and what is no URI of ours, is NotFound; a bad parameter Unprocessable."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise NotFound("no such resource") from None
    place, _, path = parts.path.removeprefix("/").partition("/")
    if parts.scheme != "sandgate" or parts.netloc != session.id or place not in ("results", "workspace") or not path:
        raise NotFound("no such resource", "resources/list and resources/templates/list show what there is.")
    given = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := sorted(given.keys() - _PARAMETERS):
        raise Unprocessable(f"no such parameter: {unknown[0][:50]}", "Use offset, limit, lines or grep.")
    return Wanted(
        place,
        unquote(path),
        _number(given, "offset", 0),
        min(_number(given, "limit", PAGE_BYTES), PAGE_BYTES),
        line_range(given["lines"]) if "lines" in given else None,
        given.get("grep"),
    )


async def contents(
    session: Session, results: SessionResults, uri: str
) -> mcp.TextResourceContents | mcp.BlobResourceContents:
    """Read a resource, or a part of it."""
    what = wanted(session, uri)
    if what.place == "workspace":
        return _content(uri, await _file(session, what), "application/octet-stream")
    row = await results.row(what.path)
    if what.lines is not None:
        text, _ = await results.lines(what.path, *what.lines, PAGE_BYTES)
        return mcp.TextResourceContents(uri=uri, mime_type="text/plain", text=text)
    if what.grep is not None:
        text, _ = await results.grep(what.path, what.grep, PAGE_BYTES)
        return mcp.TextResourceContents(uri=uri, mime_type="text/plain", text=text)
    end = min(row.bytes, what.offset + what.limit)
    return _content(uri, await _joined(results.read(what.path, min(what.offset, end), end)), row.media_type)


async def _file(session: Session, what: Wanted) -> bytes:
    session.check_open()
    try:
        sandbox = await session.sandbox()
        return await _joined(sandbox.read(what.path, what.offset, what.offset + what.limit))
    except SandboxError as error:
        raise NotFound(f"cannot be read: {error.message}", error.remedy) from error


async def _joined(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


def _content(uri: str, data: bytes, media_type: str) -> mcp.TextResourceContents | mcp.BlobResourceContents:
    if is_text(data):
        kind = media_type if media_type.startswith("text/") else "text/plain"
        return mcp.TextResourceContents(uri=uri, mime_type=kind, text=whole_characters(data).decode(errors="replace"))
    return mcp.BlobResourceContents(uri=uri, mime_type=media_type, blob=base64.b64encode(data).decode())


def _number(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise Unprocessable(f"{name}: not a number of bytes")
    return int(text)
