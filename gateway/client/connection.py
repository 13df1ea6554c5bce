"""The connection to one gateway: requests, their answers or errors, and names as a URL takes them."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import quote

import anyio
import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from gateway.client.errors import GatewayUnreachable, mapped, refusal

LONG: Final = httpx2.Timeout(60, connect=10, pool=None, read=None)  # the gateway bounds how long a call may take
JSON: Final = "application/json"
_QUICK: Final = httpx2.Timeout(60, connect=10, pool=None)
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})

Model = TypeVar("Model", bound=BaseModel)


class Connection:
    """One gateway, as one token sees it; what `Client` adds is the sessions. GatewayUnreachable for a URL that is none.

    The number of connections is not limited: a call holds one, and a limit would let `cancel` wait behind calls.
    A gateway on loopback is never asked through a proxy.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {token}"} if token else {}
        base = _http_url(self.url)
        # loading the machine's certificates takes 150 ms, and plain HTTP has no use for them
        verify = True if base.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._http = httpx2.AsyncClient(
            base_url=base,
            headers=self.headers,
            timeout=_QUICK,
            trust_env=base.host not in LOOPBACK,
            verify=verify,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def aclose(self) -> None:
        """Close the connections; what was called without an idempotency key and still runs is cancelled."""
        with anyio.CancelScope(shield=True):
            await self._http.aclose()

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None, **request: Any
    ) -> AsyncIterator[httpx2.Response]:
        """An answer whose body is not yet read; anything but success is raised."""
        headers = dict(headers or {})
        if body is not None:  # escaped to ASCII: what a model gives may hold lone surrogates
            headers["content-type"] = JSON
            request["content"] = json.dumps(body, default=to_jsonable_python, allow_nan=False).encode()
        with mapped(self.url):
            async with self._http.stream(method, path, headers=headers, **request) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(response)
                yield response

    async def _ask(self, model: type[Model], method: str, path: str, **request: Any) -> Model:
        async with self._open(method, path, **request) as response:
            return self._parsed(model, await response.aread())

    def _parsed(self, model: type[Model], data: bytes | str) -> Model:
        """Fields that this version does not know are passed over: the gateway may be newer."""
        try:
            return model.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            raise GatewayUnreachable(self.url, f"its answer is no {model.__name__}") from error


def _http_url(url: str) -> httpx2.URL:
    with mapped(url):
        parsed = httpx2.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise GatewayUnreachable(url, "that is no http:// or https:// URL")
    return parsed


def media_type(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip()


def segment(name: str) -> str:
    """One part of a path as it is sent: `.` and `..` too arrive as they are, for the gateway to refuse. Plain ones
    would lead the HTTP client to another route."""
    if name in (".", ".."):
        return name.replace(".", "%2E")
    return quote(name.encode("utf-8", "surrogateescape"), safe="")


def quoted(path: str) -> str:
    return "/".join(map(segment, path.split("/")))
