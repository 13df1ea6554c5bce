"""`sandgate approve`: let calls run."""

import json as jsonlib
from typing import Annotated, Any

from cyclopts import Parameter

from gateway.cli.approvals import approval_id, show
from gateway.cli.options import AsJson, StateDir
from gateway.cli.remote import RemoteError, ask
from gateway.client import Client
from gateway.models import Approval, ApprovalScope


def approve_command(
    approvals: Annotated[list[str], Parameter(help="Ids: a-0003, or 3.")],
    /,
    *,
    session: Annotated[
        bool, Parameter(name="--session", negative="", help="The same call of that session asks no more.")
    ] = False,
    arguments: Annotated[
        str | None, Parameter(name="--arguments", help="JSON that runs in the place of the arguments asked about.")
    ] = None,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """Let calls run that wait for a decision. Only the operator's token can."""
    edited = None if arguments is None else _object(arguments)

    async def approve(client: Client) -> list[Approval]:
        scope: ApprovalScope = "session" if session else "once"
        return [await client.approve(approval_id(one), arguments=edited, scope=scope) for one in approvals]

    for one in ask("operator", state_dir, approve):
        show(one, json=json)


def _object(text: str) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text)
    except ValueError as error:
        raise RemoteError(f"--arguments: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RemoteError("--arguments: not a JSON object", 'Write it as {"command": "ls"}.')
    return value
