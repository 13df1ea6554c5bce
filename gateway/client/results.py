"""Stored results as a client sees them: where a reference leads, and what the headers of an answer say."""

import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import httpx2

from gateway.client.connection import quoted, segment
from gateway.client.errors import NotFound

_REFERENCE: Final = re.compile(r"sandgate://([^/]+)/results/(.+)")


@dataclass(frozen=True, slots=True)
class ResultInfo:
    """A stored result without its bytes; `created` is in seconds since 1970, None where the gateway does not say."""

    key: str
    bytes: int
    media_type: str
    sha256: str
    created: float | None


def result_path(reference: str, session_path: str) -> str:
    """The route of a whole reference, or of a key of the session at `session_path`; NotFound for what is neither."""
    whole = _REFERENCE.fullmatch(reference)
    if whole is None and ("://" in reference or not reference):
        raise NotFound(404, "not_found", "no such result", "Give a reference as it stands in a result: sandgate://...")
    session = f"/v1/sessions/{segment(whole[1])}" if whole else session_path
    return f"{session}/results/{quoted(whole[2] if whole else reference)}"


def result_info(path: str, response: httpx2.Response) -> ResultInfo:
    headers = response.headers
    whole = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "0")
    modified = headers.get("last-modified")
    return ResultInfo(
        key=path.partition("/results/")[2],
        bytes=int(whole),
        media_type=headers.get("content-type", ""),
        sha256=headers.get("etag", "").strip('"'),
        created=parsedate_to_datetime(modified).timestamp() if modified else None,
    )
