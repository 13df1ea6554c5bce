"""Client: one gateway as one token sees it, and where that gateway is."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from gateway.client.connection import LONG, Connection, segment
from gateway.client.errors import ClientError
from gateway.client.session import Session
from gateway.models import OpenedSession, SessionRecord
from gateway.wire import SessionList, UpstreamEntry, UpstreamList

DEFAULT_URL: Final = "http://127.0.0.1:8710"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway is and who we are to it."""

    url: str
    token: str | None = field(repr=False)


def endpoint(url: str | None = None, token: str | None = None) -> Endpoint:
    """What is given, else `SANDGATE_URL` and `SANDGATE_TOKEN`, else the gateway of this machine without a token."""
    token = token or os.environ.get("SANDGATE_TOKEN", "").strip()
    return Endpoint((url or os.environ.get("SANDGATE_URL") or DEFAULT_URL).rstrip("/"), token or None)


class Client(Connection):
    """One gateway, as one token sees it. Close it, or use it as an async context manager. GatewayUnreachable for a URL
    that is none.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        where = endpoint(url, token)
        super().__init__(where.url, where.token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def session(self, profile: str = "default", **request: Any) -> AsyncIterator[Session]:
        """Open a session, and close it on leaving, also by an error; `close_report` then says what was collected.

        `request` is what `POST /v1/sessions` takes (`limits`, `tools`, `env`, `seed`, ...); the gateway checks it.
        """
        session = await self.open_session(profile, **request)
        try:
            yield session
        except BaseException:
            with suppress(ClientError):  # the error that is on its way is the one to see
                await session.close()
            raise
        await session.close()

    async def open_session(self, profile: str = "default", **request: Any) -> Session:
        """Open a session that stays open until `close()`, its idle time or its lifetime ends."""
        opened = await self._ask(
            OpenedSession, "POST", "/v1/sessions", body={"profile": profile, **request}, timeout=LONG
        )
        return Session(self, opened.id, opened.token)

    async def attach(self, session_id: str) -> Session:
        """A session that is there already, open or ended; NotFound where this token sees none."""
        session = Session(self, session_id)
        await session.record()
        return session

    async def sessions(self) -> tuple[SessionRecord, ...]:
        """All that this token may see, the oldest first."""
        return (await self._ask(SessionList, "GET", "/v1/sessions")).sessions

    async def upstreams(self) -> tuple[UpstreamEntry, ...]:
        """The MCP servers behind the gateway; for the operator."""
        return (await self._ask(UpstreamList, "GET", "/v1/upstreams")).upstreams

    async def accept_upstream(self, name: str) -> tuple[UpstreamEntry, ...]:
        """Let its changed tools through. Raises Refused where nothing waits."""
        return (await self._ask(UpstreamList, "POST", f"/v1/upstreams/{segment(name)}/accept")).upstreams
