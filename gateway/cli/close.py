"""`sandgate close`: end sessions before their time."""

from typing import Annotated

from cyclopts import Parameter

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import print_json, size_text
from gateway.cli.remote import ask, find_session
from gateway.client import Client
from gateway.models import CloseReport
from gateway.text import printable


def close_command(
    sessions: Annotated[list[str], Parameter(help="Ids, or how they begin.")],
    /,
    *,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Close sessions: collect what their profile says, then remove sandbox and workspace.

    Exit code 1 if something could not be collected or removed.
    """

    async def close(client: Client) -> list[CloseReport]:
        return [await (await find_session(client, name)).close() for name in sessions]

    reports = ask("operator", state_dir, close)
    if json:
        print_json([one.model_dump(mode="json") for one in reports])
    else:
        for report in reports:
            _show(report)
    return 1 if any(report.failed or not all(one.complete for one in report.collected) for report in reports) else 0


def _show(report: CloseReport) -> None:
    print(printable(f"{report.id} {report.state}: {report.reason}"))
    for one in report.collected:
        left_out = "" if one.complete else f"; left out: {'; '.join(one.skipped) or one.error or 'some'}"
        print(printable(f"  collected {one.files} files, {size_text(one.bytes)}, into {one.to}{left_out}"))
    for failure in report.failed:
        print(printable(f"  failed: {failure}"))
