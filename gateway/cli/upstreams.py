"""`sandgate upstreams`: the MCP servers behind the gateway, and letting a changed tool through."""

from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import Parameter

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import cell, plain_table, print_json, print_table
from gateway.cli.remote import RemoteError, ask
from gateway.client import Client
from gateway.text import printable
from gateway.wire import UpstreamEntry


def upstreams_command(
    action: Annotated[Literal["list", "accept"], Parameter(help="What to do.")] = "list",
    name: Annotated[str | None, Parameter(help="Whose changed tools to accept.")] = None,
    /,
    *,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """List the MCP servers behind the gateway, or accept what one of them has changed.

    A tool whose description or schema is not what was accepted is held back: look at it here before you let it through.
    """
    if (action == "accept") != (name is not None):
        raise RemoteError("name the server whose tools to accept", "Write: sandgate upstreams accept NAME")
    shown = ask("operator", state_dir, lambda client: _asked(client, name))
    if json:
        print_json([one.model_dump(mode="json") for one in shown])
    elif shown:
        _show(shown)
    else:
        print("no upstreams; what `sandgate init` writes says how to have some")


async def _asked(client: Client, name: str | None) -> Sequence[UpstreamEntry]:
    return await client.upstreams() if name is None else await client.accept_upstream(name)


def _show(entries: Sequence[UpstreamEntry]) -> None:
    table = plain_table("upstream", "where", "tools", "waiting", right=("tools", "waiting"), shrink=("where",))
    for one in entries:
        table.add_row(*map(cell, (one.name, one.where, len(one.tools) or "not asked yet", len(one.waiting))))
    print_table(table)
    for one in entries:
        for tool in one.waiting:
            print(printable(f"\nwaiting: {tool.name}: {tool.description}", keep="\n"))
