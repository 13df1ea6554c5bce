"""Gateways for tests: real ones, over a real local sandbox, in this process; with and without HTTP."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.build import built_gateway, open_state, tokens_of
from gateway.gateway import Gateway
from gateway.models import CallRequest, SessionRequest, ToolResult
from gateway.principals import Principal
from gateway.sessions import Session
from gateway.settings import Settings
from gateway.transports.http.serving import listen, serving
from tests.engines import left_in_engine, missing

OPERATOR, AGENT = Principal("operator"), Principal("agent")


@dataclass(frozen=True)
class Served:
    """A gateway behind HTTP: its URL, its tokens, and one client for each."""

    gateway: Gateway
    url: str
    operator: httpx2.AsyncClient
    agent: httpx2.AsyncClient
    anonymous: httpx2.AsyncClient
    state_dir: Path

    def client(self, token: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {token}"}, timeout=60)

    async def session(self, **request: Any) -> dict[str, Any]:
        """Open a session as the agent."""
        answer = await self.agent.post("/v1/sessions", json=request)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def call(self, session: dict[str, Any], tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self.agent.post(
            f"/v1/sessions/{session['id']}/calls", json={"tool": tool, "arguments": arguments}
        )
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result


def settings_of(**sections: Any) -> Settings:
    """Settings from plain values, as a file would give them; the port is a free one."""
    sections.setdefault("server", {}).setdefault("port", 0)
    return Settings.model_validate(sections)


@asynccontextmanager
async def running(state_dir: Path, folder: Path = Path(), **sections: Any) -> AsyncIterator[Gateway]:
    """A gateway without HTTP."""
    state = open_state(state_dir)
    try:
        async with built_gateway(settings_of(**sections), folder, state) as gateway:
            yield gateway
    finally:
        state.release()


@asynccontextmanager
async def served(state_dir: Path, folder: Path = Path(), **sections: Any) -> AsyncIterator[Served]:
    """A gateway behind HTTP on a free loopback port."""
    settings = settings_of(**sections)
    state = open_state(state_dir)
    try:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(built_gateway(settings, folder, state))
            tokens = tokens_of(state)
            url = await stack.enter_async_context(serving(gateway, tokens, settings, listen(settings.server)))
            clients = [
                await stack.enter_async_context(_client(url, token))
                for token in (tokens.stored("operator"), tokens.stored("agent"), None)
            ]
            operator, agent, anonymous = clients
            yield Served(gateway, url, operator, agent, anonymous, state_dir)
    finally:
        state.release()


def _client(url: str, token: str | None) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=60)


@pytest.fixture
def nothing_left(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gateways of the test leave no container and no volume; if one does, it is removed here, and told."""
    yield
    monkeypatch.undo()
    if (state_dir / "instance").exists() and missing("docker") is None:
        assert anyio.run(left_in_engine, state_dir, True) == []


Call = Callable[..., Awaitable[ToolResult]]


async def opened(gateway: Gateway, **request: Any) -> Session:
    """A session, opened as the agent."""
    answer = await gateway.open_session(AGENT, SessionRequest.model_validate(request))
    return gateway.sessions.find(AGENT, answer.id)


async def called(gateway: Gateway, session: Session, tool: str, **arguments: Any) -> ToolResult:
    """One call, to its end."""
    active = await gateway.start_call(session, CallRequest(tool=tool, arguments=arguments))
    return await active.wait()


@pytest.fixture
async def gateway(state_dir: Path) -> AsyncIterator[Gateway]:
    """A gateway with the default settings."""
    async with running(state_dir) as one:
        yield one


@pytest.fixture
async def server(state_dir: Path) -> AsyncIterator[Served]:
    """The same, behind HTTP."""
    async with served(state_dir) as one:
        yield one
