"""`sandgate approvals`: what waits for a person, and what was decided."""

import json as jsonlib
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from cyclopts import Parameter
from rich.text import Text

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import age_text, cell, console, cut_cell, plain_table, print_json, print_table, time_text
from gateway.cli.remote import ask
from gateway.client import Client
from gateway.models import Approval
from gateway.text import printable

PAGE: Final = 1000
ARGUMENTS_SHOWN: Final = 200


def approvals_command(
    approval: Annotated[str | None, Parameter(help="Its id: a-0003, or 3.")] = None,
    /,
    *,
    every: Annotated[
        bool, Parameter(name=["--all", "-a"], negative="", help="Also what is decided, or expired.")
    ] = False,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], negative="", help="Go on: show each as it comes, until Ctrl-C.")
    ] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """List the calls that wait for a decision; with an id, show that one whole.

    Only the operator's token can (SANDGATE_TOKEN, else that of the state folder).
    """
    if approval is not None:
        one = ask("operator", state_dir, lambda client: client.approval(approval_id(approval)))
        show(one, json=json)
    elif watch:
        ask("operator", state_dir, lambda client: _watch(client, every=every, json=json))
    else:
        found = ask("operator", state_dir, lambda client: _all(client, every=every))
        _list(found, json=json)


def approval_id(name: str) -> str:
    """`3` is a-0003."""
    return f"a-{int(name):04d}" if name.isdecimal() else name


async def _watch(client: Client, *, every: bool, json: bool) -> None:
    async for one in client.watch_approvals("all" if every else "waiting"):
        show(one, json=json)


async def _all(client: Client, *, every: bool) -> list[Approval]:
    found: list[Approval] = []
    while page := await client.approvals(
        "all" if every else "waiting", after=found[-1].revision if found else 0, limit=PAGE
    ):
        found += page
    return found


def _list(found: Sequence[Approval], *, json: bool) -> None:
    if json:
        print_json([one.model_dump(mode="json") for one in found])
    elif found:
        _table(sorted(found, key=lambda one: one.created))
    else:
        print("nothing waits for a decision")


def _table(found: Sequence[Approval]) -> None:
    now = time.time()
    table = plain_table(
        "approval", "session", "tool", "state", "age", "arguments", right=("age",), shrink=("arguments",)
    )
    for one in found:
        table.add_row(
            *map(cell, (one.id, one.session_id, one.tool, one.state, age_text(now - one.created))),
            cut_cell(_short(one)),
        )
    print_table(table)


def _short(one: Approval) -> str:
    text = jsonlib.dumps(one.arguments, ensure_ascii=False)
    return text if len(text) <= ARGUMENTS_SHOWN else f"{text[:ARGUMENTS_SHOWN]}…"


def show(one: Approval, *, json: bool) -> None:
    """All that there is to know about one, before or after its decision."""
    if json:
        print_json(one.model_dump(mode="json"))
        return
    for line in _lines(one):
        console().print(line, soft_wrap=True)


def _lines(one: Approval) -> Iterator[Text]:
    yield Text.assemble((printable(f"{one.id} {one.tool}"), "bold"), f" {one.state}, session {one.session_id}")
    yield _line("call", one.call_id)
    yield _line("arguments", jsonlib.dumps(one.arguments, ensure_ascii=False))
    if one.original_arguments is not None:
        yield _line("asked", jsonlib.dumps(one.original_arguments, ensure_ascii=False))
    for question in one.questions:
        yield _line(question.asked_by, question.question)
    if one.state == "waiting":
        yield _line("until", time_text(one.expires))
        return
    if one.edited_arguments is not None:
        yield _line("edited", jsonlib.dumps(one.edited_arguments, ensure_ascii=False))
    if one.decided is not None:
        scope = ", for the session" if one.scope == "session" else ""
        yield _line("decided", f"{time_text(one.decided)}{scope}{f': {one.reason}' if one.reason else ''}")
    yield _line("used", "not yet" if one.used is None else time_text(one.used))


def _line(name: str, text: str) -> Text:
    return Text(f"  {printable(name):<12} {printable(text)}")
