"""`sandgate deny`: reject calls."""

from typing import Annotated

from cyclopts import Parameter

from gateway.cli.approvals import approval_id, show
from gateway.cli.options import AsJson, StateDir
from gateway.cli.remote import ask
from gateway.client import Client
from gateway.models import Approval


def deny_command(
    approvals: Annotated[list[str], Parameter(help="Ids: a-0003, or 3.")],
    /,
    *,
    reason: Annotated[str, Parameter(name="--reason", help="The agent is told.")] = "",
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """Reject calls that wait for a decision. Only the operator's token can."""

    async def deny(client: Client) -> list[Approval]:
        return [await client.deny(approval_id(one), reason) for one in approvals]

    for one in ask("operator", state_dir, deny):
        show(one, json=json)
