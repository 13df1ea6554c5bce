"""`sandgate mcp`: what an MCP client starts as a command."""

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final

import anyio
from cyclopts import Parameter

from gateway.cli.options import ConfigFile, StateDir, state_folder
from gateway.cli.remote import refusals, token_of
from gateway.client import Client
from gateway.errors import StateError

MOST_AT_ONCE: Final = 100


def mcp_command(
    *,
    profile: Annotated[str | None, Parameter(name=["--profile", "-p"], help="Default: the agent's first.")] = None,
    url: Annotated[str | None, Parameter(name="--url", help="Speak for the gateway that runs there.")] = None,
    config: ConfigFile = None,
    state_dir: StateDir = None,
) -> int:
    """Speak MCP on standard input and output, in a session that ends with them.

    Runs a gateway of its own; with --url it is a bridge to one that runs, as SANDGATE_TOKEN, else as the agent whose
    token is in the state folder. `sandgate mcp-config` writes what your client needs.
    """
    with refusals():
        if url is not None:
            anyio.run(_until_signal, lambda: _bridge(url, profile, state_dir))
        else:
            anyio.run(_until_signal, lambda: _serve(config, state_dir, profile), backend_options={"use_uvloop": True})
    return 0


async def _until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """SIGTERM and Ctrl-C end the work as the end of the input does: the session is closed first."""
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        await work()
        tasks.cancel_scope.cancel()


async def _serve(config: Path | None, state_dir: Path | None, profile: str | None) -> None:
    from gateway.build import State, built_gateway, open_state
    from gateway.cli.serve import log_to_stderr
    from gateway.settings import load_settings
    from gateway.transports.mcp.stdio import serve_stdio

    def free_state() -> State:
        """Each process has a state folder; one that a killed process left is taken up, and so cleaned."""
        for number in range(MOST_AT_ONCE):
            try:
                return open_state(state_folder(state_dir) / "mcp" / str(number))
            except StateError as error:
                refused = error
        raise refused

    settings, folder = load_settings(config)
    log_to_stderr()
    state = free_state()
    try:
        async with built_gateway(settings, folder, state) as gateway:
            await serve_stdio(gateway, profile)
    finally:
        state.release()


async def _bridge(url: str, profile: str | None, state_dir: Path | None) -> None:
    from gateway.transports.mcp.stdio import LABELS, bridge

    async with (
        Client(url, token_of("agent", state_dir)) as client,
        client.session(profile or "default", labels=LABELS) as session,
    ):
        assert session.token is not None  # known to who opened it
        await bridge(f"{url.rstrip('/')}/v1/sessions/{session.id}/mcp", session.token)
