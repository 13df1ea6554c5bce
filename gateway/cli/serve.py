"""`sandgate serve`: the gateway as a process."""

import logging
from pathlib import Path
from typing import Annotated, Any

import anyio
from cyclopts import Parameter

from gateway.build import built_gateway, kind_key, open_state, tokens_of, with_port
from gateway.cli.options import ConfigFile, Port, StateDir, state_folder, state_option
from gateway.gateway import Gateway
from gateway.principals import ROLES_ON_DISK, Tokens
from gateway.settings import Settings, load_settings
from gateway.text import printable
from gateway.transports.http.serving import listen, serving, stop_signals
from sandboxes import Probe


def serve_command(
    *,
    config: ConfigFile = None,
    host: Annotated[str | None, Parameter(name="--host", help="In place of server.host.")] = None,
    port: Port = None,
    state_dir: StateDir = None,
) -> int:
    """Run the gateway until SIGTERM or Ctrl-C.

    Calls that are running then may go on for server.stop_seconds. Open sessions keep their files and go on at the
    next start. Where a sandbox kind does not work the gateway starts all the same, and /readyz says why.
    """
    settings, folder = load_settings(config)
    settings = with_port(settings, port, host)
    log_to_stderr()
    anyio.run(_serve, settings, folder, state_dir, backend_options={"use_uvloop": True})
    return 0


async def _serve(settings: Settings, folder: Path, state_dir: Path | None) -> None:
    with listen(settings.server) as listener:
        state = open_state(state_folder(state_dir))
        try:
            tokens = tokens_of(state)
            async with (
                stop_signals() as stop,
                built_gateway(settings, folder, state) as gateway,
                serving(gateway, tokens, settings, listener) as url,
            ):
                print("\n".join(await _greeting(gateway, settings, tokens, url, state_dir)), flush=True)
                await stop.first.wait()
                print(_farewell(gateway), flush=True)
                await gateway.drain(stop.again)
        finally:
            state.release()


def _farewell(gateway: Gateway) -> str:
    if not gateway.running:
        return "stopping"
    seconds = gateway.options.stop_seconds
    return f"stopping: {gateway.running} calls have {seconds:g} s to end; once more (Ctrl-C) cancels them now"


async def _greeting(
    gateway: Gateway, settings: Settings, tokens: Tokens, url: str, state_dir: Path | None
) -> list[str]:
    """What whoever starts a gateway wants to know; where the tokens are, never what they are."""
    option = state_option(state_dir)
    probes = {name: await kind.probe() for name, kind in gateway.profiles.kinds().items()}
    files = " and ".join(str(tokens.folder / role) for role in ROLES_ON_DISK)
    return [
        f"sandgate listens on {url}",
        f"  tokens   {printable(files)}",
        *(
            line
            for name, profile in settings.profiles.items()
            for line in _about_profile(name, profile.kind, profile.network, probes[kind_key(profile)])
        ),
        f"  clients  export SANDGATE_URL={_reachable(url)} SANDGATE_TOKEN=$(sandgate token agent{printable(option)})",
    ]


def _reachable(url: str) -> str:
    """Where a client on this machine finds what listens everywhere."""
    return url.replace("//0.0.0.0:", "//localhost:").replace("//[::]:", "//localhost:")


def _about_profile(name: str, kind: str, network: str, probe: Probe) -> list[str]:
    if not probe.works:
        remedy = f" {probe.remedy}" if probe.remedy else ""
        return [
            f"  profile  {printable(name)}: {kind} DOES NOT WORK HERE: {printable(probe.reason)}",
            f"          {printable(remedy)} `sandgate doctor` says more; until then its sessions are refused.",
        ]
    gaps = f"; not enforced here: {', '.join(probe.not_enforced)}" if probe.not_enforced else ""
    return [f"  profile  {printable(name)}: {kind}, network {network}{gaps}"]


class Plain(logging.Formatter):
    """A record is one line, whatever its arguments hold: control characters are shown as escapes. A traceback follows
    in lines that begin with a bar, so that nothing in it passes for a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  | {printable(line)}" for line in super().formatException(ei).splitlines())


def log_to_stderr() -> None:
    """Our own records from INFO, libraries' from WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(Plain("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("gateway", "sandboxes", "stores"):
        logging.getLogger(package).setLevel(logging.INFO)
