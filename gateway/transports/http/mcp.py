"""Where MCP is served, before anybody speaks it: the SDK costs 0.8 s to import, so the first request brings it in."""

import importlib
from typing import Final

import anyio

from gateway.gateway import Gateway
from gateway.settings import Settings
from gateway.transports.http.guard import App, Receive, Scope, Send

MCP_PATHS: Final = ("/mcp", "/v1/sessions/{session_id}/mcp")


class McpRoute:
    """An ASGI application that starts at its first request; `run` it beside the server, and cancel that at the end."""

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        self._gateway = gateway
        self._settings = settings
        self._wanted, self._started = anyio.Event(), anyio.Event()
        self._app: App | None = None

    async def run(self) -> None:
        await self._wanted.wait()
        module = await anyio.to_thread.run_sync(importlib.import_module, "gateway.transports.mcp.http")
        app = module.McpOverHttp(
            self._gateway, int(self._settings.server.json_body), auto_session=self._settings.mcp.auto_session
        )
        async with app.run():
            self._app = app
            self._started.set()
            await anyio.sleep_forever()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wanted.set()
        await self._started.wait()
        assert self._app is not None  # set before the event
        await self._app(scope, receive, send)
