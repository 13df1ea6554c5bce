"""`sandgate sessions`: what is open, and what was."""

import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import age_text, cell, plain_table, print_json, print_table
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
    now = time.time()
    labelled = any(one.labels for one in records)
    table = plain_table(
        "session",
        "profile",
        "kind",
        "state",
        "calls",
        "running",
        "age",
        "idle",
        *(["labels"] if labelled else []),
        right=("calls", "running", "age", "idle"),
        wrap=("labels",),
    )
    for one in records:
        idle = age_text(now - one.last_used) if one.state == "open" else "-"
        labels = ", ".join(f"{name}={value}" for name, value in one.labels.items())
        table.add_row(
            *map(
                cell,
                (one.id, one.profile, one.kind, one.state, one.calls, one.running, age_text(now - one.created), idle),
            ),
            *([cell(labels)] if labelled else []),
        )
    print_table(table)
