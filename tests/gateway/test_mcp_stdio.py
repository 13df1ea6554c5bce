"""`sandgate mcp` as a client starts it: a gateway of its own, or a bridge, and nothing left behind at any end."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from gateway.cli.mcp_config import configuration
from tests.gateway.conftest import Served
from tests.gateway.test_mcp import agent_token, texts

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

SANDGATE = str(Path(sys.executable).with_name("sandgate"))
HOOK = """
from gateway.hooks.hook import Continue, Hook


class Loud(Hook):
    async def pre_tool_call(self, ctx, call):
        print("stray")
        return Continue()
"""


def parameters(*options: str, **environment: str) -> StdioServerParameters:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SANDGATE_")}
    return StdioServerParameters(command=SANDGATE, args=["mcp", *options], env={**kept, **environment})


@asynccontextmanager
async def started(mode: Any, *options: str, **environment: str) -> AsyncIterator[Client]:
    async with Client(stdio_client(parameters(*options, **environment)), mode=mode) as client:
        yield client


def running(state_dir: Path) -> list[int]:
    """Processes that know this folder: the gateway's own, and its sandboxes'."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(state_dir) in " ".join(process.cmdline()):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.parametrize("mode", [pytest.param("legacy", marks=pytest.mark.slow), "auto"])
async def test_a_gateway_of_its_own_ends_with_its_client(state_dir: Path, tmp_path: Path, mode: str) -> None:
    """Gotcha 13: what a hook prints stays off the protocol. R33: at the end of input nothing is left."""
    (tmp_path / "loud_hooks.py").write_text(HOOK)
    (tmp_path / "sandgate.toml").write_text('[[hooks]]\nuse = "loud_hooks:Loud"\n')
    options = ("--config", str(tmp_path / "sandgate.toml"), "--state-dir", str(state_dir))
    async with started(mode, *options) as client:
        for _ in range(3):
            result = await client.call_tool("bash", {"command": "echo one >> kept; cat kept | wc -l"})
        assert texts(result).strip() == "3"
        assert running(state_dir)
    assert running(state_dir) == []
    async with started(mode, *options) as client:
        assert "No such file" in texts(await client.call_tool("bash", {"command": "cat kept"}))


@pytest.mark.parametrize("ending", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_a_signal_leaves_nothing(state_dir: Path, ending: signal.Signals) -> None:
    """R33: TERM, and KILL of the command itself; its folder is taken up, and cleaned, by the next one."""
    process = await anyio.open_process(
        [SANDGATE, "mcp", "--state-dir", str(state_dir)], env=parameters().env, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    initialize = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }
    call = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "bash", "arguments": {"command": "sleep 300.23"}},
    }
    await process.stdin.send(json.dumps(initialize).encode() + b"\n")
    with anyio.fail_after(30):
        await process.stdout.receive()
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    await process.stdin.send(json.dumps(initialized).encode() + b"\n" + json.dumps(call).encode() + b"\n")
    with anyio.fail_after(30):
        while not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "300.23"]]:
            await anyio.sleep(0.05)
        process.send_signal(ending)
        await process.wait()
        while running(state_dir):
            await anyio.sleep(0.05)
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "300.23"]]
    await process.aclose()
    async with started("auto", "--state-dir", str(state_dir)) as client:
        assert texts(await client.call_tool("bash", {"command": "echo hi"})) == "hi"
    assert [path.name for path in (state_dir / "mcp").iterdir()] == ["0"]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_bridge_speaks_for_a_running_gateway(server: Served, state_dir: Path, mode: str) -> None:
    told: list[str | None] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async with started(mode, "--url", server.url, SANDGATE_TOKEN=agent_token(server)) as client:
        assert client.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
        result = await client.call_tool(
            "bash", {"command": "echo first; sleep 1; seq 1 100000"}, progress_callback=hear
        )
        assert told[0] == "first\n"
        [stored] = (await client.list_resources()).resources
        assert (await client.read_resource(f"{stored.uri}?lines=9-9")).contents[0].model_dump()["text"] == "8"
        assert not result.is_error
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "bash", {"command": "sleep 300.31"})
            session = next(iter(server.gateway.sessions))
            with anyio.fail_after(20):
                while not session.running:
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20):
            while session.running:
                await anyio.sleep(0.02)
    with anyio.fail_after(20):
        while server.gateway.sessions.open:
            await anyio.sleep(0.02)


def test_configurations_name_no_token() -> None:
    for client in ("claude", "cursor", "vscode"):
        shown = configuration(client, "http://127.0.0.1:8710", stdio=False)
        [server] = (shown.get("mcpServers") or shown["servers"]).values()
        assert server["url"] == "http://127.0.0.1:8710/mcp"
        assert server["headers"]["Authorization"].startswith("Bearer ${")
        [command] = (configuration(client, "", stdio=True).popitem()[1]).values()
        assert (Path(command["command"]).name, command["args"]) == ("sandgate", ["mcp"])
