"""`sandgate sessions`: what is open, and what was."""

import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import (
    age_text,
    cell,
    console,
    cut_cell,
    duration_text,
    plain_table,
    print_json,
    print_table,
    size_text,
)
from gateway.cli.remote import ask
from gateway.client import Client
from gateway.models import SessionRecord


def sessions_command(
    *,
    every: Annotated[bool, Parameter(name=["--all", "-a"], negative="", help="Also those that have ended.")] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """List the sessions that the token may see (SANDGATE_TOKEN, else the operator's of the state folder)."""
    records = ask("operator", state_dir, Client.sessions)
    shown = [one for one in records if every or one.state == "open"]
    if json:
        print_json([one.model_dump(mode="json") for one in shown])
    elif shown:
        _show(shown)
    else:
        print("no open sessions" + (f"; {len(records)} ended: --all" if records else ""))


def _show(records: Sequence[SessionRecord]) -> None:
    """Everything of a session in 80 columns but its labels: a cut id is enough for other commands."""
    now = time.time()
    ended = any(one.state != "open" for one in records)
    labelled = any(one.labels for one in records)
    jobs = any(one.jobs for one in records)
    table = plain_table(
        "session",
        "profile",
        "kind",
        *(["state"] if ended else []),
        "channel",
        "calls",
        *(["jobs"] if jobs else []),
        "age",
        "idle",
        "memory",
        "cpu",
        *(["labels"] if labelled else []),
        right=("calls", "jobs", "age", "idle", "memory", "cpu"),
        wrap=("labels",),
        shrink=("session", "profile"),
    )
    for one in records:
        table.add_row(
            cut_cell(one.id),
            cut_cell(one.profile),
            cell(one.kind),
            *([cell(one.state)] if ended else []),
            cell(one.channel or "-"),
            cell(f"{one.running} of {one.calls}" if one.running else one.calls),
            *([cell(one.jobs or "-")] if jobs else []),
            cell(age_text(now - one.created)),
            cell(age_text(now - one.last_used) if one.state == "open" and not one.running else "-"),
            cell("-" if one.memory is None else size_text(one.memory)),
            cell("-" if one.cpu_seconds is None else duration_text(one.cpu_seconds * 1000)),
            *([cell(", ".join(f"{name}={value}" for name, value in one.labels.items()))] if labelled else []),
        )
    print_table(table)
    for line in dict.fromkeys(_not_enforced(one) for one in records if one.not_enforced):
        console().print(cell(line))


def _not_enforced(record: SessionRecord) -> str:
    return f"{record.kind}: not enforced: {'; '.join(record.not_enforced)}"
