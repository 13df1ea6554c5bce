"""Stored results and files as a client sees them: where a reference leads, and what the headers of an answer say."""

import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import httpx2

from gateway.client.connection import JSON, media_type, quoted, segment
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


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a workspace without its bytes; `modified` is in seconds since 1970. A folder has neither."""

    is_folder: bool
    bytes: int = 0
    modified: float | None = None


def result_path(reference: str, session_path: str) -> str:
    """The route of a whole reference, or of a key of the session at `session_path`; NotFound for what is neither."""
    whole = _REFERENCE.fullmatch(reference)
    if whole is None and ("://" in reference or not reference):
        raise NotFound(404, "not_found", "no such result", "Give a reference as it stands in a result: sandgate://...")
    session = f"/v1/sessions/{segment(whole[1])}" if whole else session_path
    return f"{session}/results/{quoted(whole[2] if whole else reference)}"


def result_info(path: str, response: httpx2.Response) -> ResultInfo:
    return ResultInfo(
        key=path.partition("/results/")[2],
        bytes=_size(response),
        media_type=response.headers.get("content-type", ""),
        sha256=response.headers.get("etag", "").strip('"'),
        created=_modified(response),
    )


def file_info(response: httpx2.Response) -> FileInfo:
    if media_type(response) == JSON:
        return FileInfo(is_folder=True)
    return FileInfo(False, _size(response), _modified(response))


def _size(response: httpx2.Response) -> int:
    """Of the whole, also where the answer is a part of it."""
    headers = response.headers
    return int(headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "0"))


def _modified(response: httpx2.Response) -> float | None:
    modified = response.headers.get("last-modified")
    return parsedate_to_datetime(modified).timestamp() if modified else None
