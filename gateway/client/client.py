"""Client: one gateway as one token sees it, and where that gateway is."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from gateway.client.connection import LONG, Connection, segment
from gateway.client.errors import ClientError
from gateway.client.session import Session
from gateway.models import Approval, ApprovalScope, ApprovalState, OpenedSession, SessionRecord
from gateway.wire import ApprovalList, SessionList, UpstreamEntry, UpstreamList

DEFAULT_URL: Final = "http://127.0.0.1:8710"
WAIT_SECONDS: Final = 55.0
"""The longest that one request for approvals is held."""


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

    # approvals: for the operator's token, Forbidden with any other

    async def approvals(
        self,
        state: ApprovalState | Literal["all"] = "waiting",
        *,
        after: int = 0,
        limit: int = 100,
        wait_seconds: float = 0,
    ) -> tuple[Approval, ...]:
        """Approvals in the order of their last change, those with a `revision` over `after`.

        Where there are none, one that comes within `wait_seconds` (at most 55). Arguments over 64 KiB are shortened
        here, and whole in `approval`.
        """
        params = {"state": state, "after": after, "limit": limit, "wait_seconds": wait_seconds}
        return (await self._ask(ApprovalList, "GET", "/v1/approvals", params=params, timeout=LONG)).approvals

    async def watch_approvals(
        self, state: ApprovalState | Literal["all"] = "waiting"
    ) -> AsyncGenerator[Approval, None]:
        """Every approval that is in that state or comes into it, without an end. With `all` each change of each."""
        after = 0
        while True:
            for one in await self.approvals(state, after=after, wait_seconds=WAIT_SECONDS):
                after = one.revision
                yield one

    async def approval(self, approval_id: str) -> Approval:
        """One approval."""
        return await self._ask(Approval, "GET", f"/v1/approvals/{segment(approval_id)}")

    async def approve(
        self,
        approval_id: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        scope: ApprovalScope = "once",
        reason: str = "",
    ) -> Approval:
        """Let the call run, with `arguments` in the place of its own where given. With `scope` = `session` the same
        call of that session asks no more.

        Refused (422) for arguments that break the tool's schema or a rule, and for what was decided or has expired.
        """
        body = {"decision": "allow", "arguments": arguments, "scope": scope, "reason": reason}
        return await self._decide(approval_id, body)

    async def deny(self, approval_id: str, reason: str = "") -> Approval:
        """Reject the call; the agent is told the reason. Refused (422) for what was decided or has expired."""
        return await self._decide(approval_id, {"decision": "deny", "reason": reason})

    async def _decide(self, approval_id: str, body: Mapping[str, Any]) -> Approval:
        return await self._ask(Approval, "POST", f"/v1/approvals/{segment(approval_id)}", body=body)
