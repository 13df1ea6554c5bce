"""What can go wrong for a client, and the one place where foreign errors become ours.

    ClientError
    +-- GatewayUnreachable      nobody answers at the URL, or something that is no gateway
    +-- ConnectionLost          the connection broke before the answer: whether a call ran is not known
    |   +-- StreamInterrupted   a stream broke and could not be taken up again: how its call ends is not known
    +-- ArchiveRefused          a folder on its way here held something that is no plain file below it
    +-- Refused                 the gateway said no: status, code, message, remedy, retry_after
        +-- Unauthorized 401    Forbidden 403    NotFound 404    Gone 410    TooMany 429

What a program did is never an error: a call's end is a `ToolResult`, whatever its status.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

import httpx2
from pydantic import BaseModel, ValidationError


class ClientError(Exception):
    """Base of all; `remedy` says what to do next, or is empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class GatewayUnreachable(ClientError):
    """Nothing was done: nobody answers at the URL, or what answers does not speak as a gateway does."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(
            f"no gateway at {url}: {why}", "Start one with `sandgate serve`, or say where it is in SANDGATE_URL."
        )


class ConnectionLost(ClientError):
    """The connection broke, or was silent too long. A call without an idempotency key is cancelled by the gateway; one
    with a key runs on, and asking again with the same key gives its answer."""


class StreamInterrupted(ConnectionLost):
    """A stream could not be taken up again; `call_id` is the call's id in its session (`call_record` may know its end),
    empty where not even that arrived."""

    def __init__(self, call_id: str, why: str) -> None:
        super().__init__(
            f"the stream of call {call_id or '(not known)'} was interrupted: {why}",
            "Its record may say how it ended; nothing else is known.",
        )
        self.call_id = call_id


class ArchiveRefused(ClientError):
    """Nothing of the archive was written."""


class Refused(ClientError):
    """The gateway's problem details; `retry_after` is in seconds, or None. `code` is stable and meant for programs."""

    for_status: ClassVar[int | None] = None

    def __init__(
        self, status: int, code: str, message: str, remedy: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Unauthorized(Refused):
    """No token, or one that nobody holds."""

    for_status = 401


class Forbidden(Refused):
    """The token is known and may not do this."""

    for_status = 403


class NotFound(Refused):
    """Absent, or another's."""

    for_status = 404


class Gone(Refused):
    """The caller's own result, ended by retention or deletion."""

    for_status = 410


class TooMany(Refused):
    """A limit of the whole gateway is reached; try again after `retry_after` seconds."""

    for_status = 429


class _Problem(BaseModel):
    """What is understood of problem details; whoever answers in a gateway's place may send something else."""

    detail: str = ""
    code: str = "unknown"
    remedy: str = ""


def refusal(response: httpx2.Response) -> Refused:
    """What a read answer without success means; a proxy's page in the place of problem details is survived."""
    try:
        problem = _Problem.model_validate_json(response.content)
    except ValidationError:
        problem = _Problem()
    after = response.headers.get("retry-after", "")
    kind = next((one for one in Refused.__subclasses__() if one.for_status == response.status_code), Refused)
    return kind(
        response.status_code,
        problem.code,
        problem.detail or f"HTTP status {response.status_code}",
        problem.remedy,
        float(after) if after.isdecimal() else None,
    )


_NOTHING_SENT: Final = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
    httpx2.InvalidURL,
    httpx2.SSEError,
)


_WHY: Final[dict[type[Exception], str]] = {
    httpx2.ConnectError: "nobody answers there",
    httpx2.ConnectTimeout: "no answer came in time",
}


@contextmanager
def mapped(url: str) -> Iterator[None]:
    """httpx2's errors become ours. Their texts stay out of the message: they may quote a header."""
    try:
        yield
    except _NOTHING_SENT as error:
        raise GatewayUnreachable(url, _WHY.get(type(error), type(error).__name__)) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise ConnectionLost(f"the connection to {url} broke: {type(error).__name__}") from error
