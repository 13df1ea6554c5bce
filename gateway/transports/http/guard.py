"""Guard: what every request meets before any route, whatever the route: Host, Origin, token, content type, body size.

Pure ASGI, so that no route and no scheme can be forgotten.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

import anyio

from gateway.errors import Forbidden, Problem, TooLarge, Unauthorized
from gateway.principals import Principal
from gateway.transports.http.problems import problem_response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
SIGNED_PATH: Final = "/v1/signed/"
"""Below it a URL is its own token."""
LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
BODY_SECONDS: Final = 30.0
"""How long a JSON body may take, or one piece of an upload."""
BEARER_REMEDY: Final = (
    "Send Authorization: Bearer <token>, clients by SANDGATE_TOKEN; `sandgate token agent` prints one."
)

ONLY_ONCE: Final = (b"host", b"origin", b"authorization", b"content-type", b"content-length")
"""Headers that decide something here; sent twice, another reader might believe the other one."""


class BadRequest(Problem):
    """Not a request that can be understood in one way only."""

    status, title, code = 400, "Bad request", "bad_request"


class Misdirected(Problem):
    """The Host header names somebody else."""

    status, title, code = 421, "Misdirected request", "unknown_host"


class WrongType(Problem):
    """A body in a type that this route does not take."""

    status, title, code = 415, "Unsupported media type", "unsupported_media_type"


class SlowBody(Problem):
    """The body did not come in time."""

    status, title, code = 408, "Request timeout", "slow_body"


@dataclass(frozen=True, slots=True)
class Guard:
    """Wraps the application. `authenticate` answers who a token is, `redeem` who a ticket for a WebSocket at a path was
    given to; or None."""

    app: App
    authenticate: Callable[[str], Principal | None]
    redeem: Callable[[str, str], Principal | None]
    hosts: frozenset[str]
    origins: frozenset[str]
    json_body: int
    upload: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        scope["headers"] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]  # RFC 9110, section 5.5
        try:
            headers = _headers(scope)
            self._check_host(headers)
            if scope["type"] == "websocket":
                scope["principal"] = self._visitor(scope, headers)
            else:
                if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(SIGNED_PATH):
                    scope["principal"] = self._principal(headers)
                receive = self._bounded(scope, headers, receive)
        except Problem as problem:
            await _refuse(problem, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_host(self, headers: dict[bytes, str]) -> None:
        name, _, port = headers.get(b"host", "").lower().rpartition(":")
        host = name if name and port.isascii() and port.isdigit() else headers.get(b"host", "").lower()
        if host not in self.hosts:
            raise Misdirected("this Host is not one of ours", "Name it in server.allowed_hosts.")
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in self.origins:
            raise Forbidden("this Origin may not call", "Name it in server.allowed_origins.", code="foreign_origin")

    def _principal(self, headers: dict[bytes, str]) -> Principal:
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("a token is needed", BEARER_REMEDY)
        principal = self.authenticate(token.strip())
        if principal is None:
            raise Unauthorized("this token is not known", BEARER_REMEDY)
        return principal

    def _visitor(self, scope: Scope, headers: dict[bytes, str]) -> Principal:
        """Who opens a WebSocket: by its token, or, as a page cannot send headers, by a ticket in its query."""
        tickets = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("ticket", [])
        if b"authorization" in headers or not tickets:
            return self._principal(headers)
        principal = self.redeem(scope["path"], tickets[0]) if len(tickets) == 1 else None
        if principal is None:
            raise Unauthorized("this ticket is not valid: it works once, and not for long", "Ask for another by POST.")
        return principal

    def _bounded(self, scope: Scope, headers: dict[bytes, str], receive: Receive) -> Receive:
        upload = scope["method"] == "PUT" and "/files" in scope["path"]
        length = headers.get(b"content-length", "")
        if scope["method"] in ("POST", "PUT", "PATCH", "DELETE") and not upload:
            kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
            empty = length in ("", "0") and b"transfer-encoding" not in headers
            if kind != "application/json" and not (empty and not kind):
                raise WrongType("only application/json is taken here", "Set Content-Type: application/json.")
        limit = self.upload if upload else self.json_body
        if length.isdigit() and int(length) > limit:
            raise TooLarge(f"the body is over {limit:,} bytes", "Send less, or upload files in parts.")
        return _counted(receive, limit, None if upload else BODY_SECONDS)


def _headers(scope: Scope) -> dict[bytes, str]:
    names = [name for name, _ in scope["headers"]]
    for name in ONLY_ONCE:
        if names.count(name) > 1:
            raise BadRequest(f"the header {name.decode()} came more than once", "Send it once.")
    return {name: value.decode("latin-1") for name, value in scope["headers"]}


def _counted(receive: Receive, limit: int, seconds: float | None) -> Receive:
    """`receive` with the body's size and time bounded: exceeding raises TooLarge or SlowBody into the route."""
    total, whole = 0, False
    deadline = None if seconds is None else anyio.current_time() + seconds

    async def counted() -> Message:
        nonlocal total, whole
        if whole:
            return await receive()
        try:
            left = BODY_SECONDS if deadline is None else max(0.0, deadline - anyio.current_time())
            with anyio.fail_after(left):
                message = await receive()
        except TimeoutError:
            raise SlowBody(f"the body did not come within {BODY_SECONDS:g} s") from None
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if total > limit:
                raise TooLarge(f"the body is over {limit:,} bytes", "Send less, or upload files in parts.")
        return message

    return counted


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    await problem_response(problem)(scope, receive, send)


def allowed_hosts(host: str, more: Iterable[str]) -> frozenset[str]:
    """The Host names that are ours, without port, in lower case."""
    own = f"[{host}]" if ":" in host else host
    return frozenset({*LOOPBACK_NAMES, own.lower(), *(one.lower() for one in more)})
