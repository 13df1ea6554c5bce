"""`sandgate calls`: what was asked, what was decided, what happened."""

import json as jsonlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.text import Text

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import (
    cell,
    console,
    cut_cell,
    duration_text,
    plain_table,
    print_json,
    print_table,
    size_text,
    time_text,
)
from gateway.cli.remote import ask, find_session
from gateway.client import Client, Session
from gateway.models import DID_NOT_RUN, NOT_AN_ERROR, CallRecord, DecisionRecord
from gateway.text import printable

PAGE: Final = 1000
ARGUMENTS_SHOWN: Final = 200


def calls_command(
    session: Annotated[str, Parameter(help="Its id, or how that begins.")],
    call: Annotated[str | None, Parameter(help="Its id: c-0003, or 3.")] = None,
    /,
    *,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """List a session's calls; with a call, show its record as a timeline.

    SANDGATE_TOKEN says whose sessions, else the operator's token of the state folder.
    """
    if call is None:
        records = ask("operator", state_dir, lambda client: _all(client, session))
        if json:
            print_json([one.model_dump(mode="json") for one in records])
        elif records:
            _show_all(records)
        else:
            print("no calls yet")
        return
    record = ask("operator", state_dir, lambda client: _one(client, session, call))
    if json:
        print_json(record.model_dump(mode="json"))
        return
    for line in timeline(record):
        console().print(line, soft_wrap=True)


async def _all(client: Client, name: str) -> list[CallRecord]:
    return await every_call(await find_session(client, name))


async def every_call(session: Session) -> list[CallRecord]:
    records: list[CallRecord] = []
    while page := await session.calls(after=records[-1].sequence if records else 0, limit=PAGE):
        records += page
    return records


async def _one(client: Client, name: str, call: str) -> CallRecord:
    return await (await find_session(client, name)).call_record(f"c-{int(call):04d}" if call.isdecimal() else call)


def _show_all(records: Sequence[CallRecord]) -> None:
    table = plain_table("call", "tool", "status", "time", "hooks", "arguments", right=("time",), shrink=("arguments",))
    for one in records:
        hooks = ", ".join(dict.fromkeys(decision.hook for decision in one.decisions))
        table.add_row(
            cell(one.id),
            cell(one.tool),
            _status(one),
            cell(_took(one)),
            cell(hooks or "-"),
            cut_cell(_short(one.arguments)),
        )
    print_table(table)


def _status(record: CallRecord) -> Text:
    if record.status is None:
        return cell("running", "yellow")
    code = f" {record.exit_code}" if record.status == "exit" else ""
    return cell(f"{record.status}{code}", "green" if record.status in NOT_AN_ERROR else "red")


def _took(record: CallRecord) -> str:
    return "-" if record.finished is None else duration_text((record.finished - record.accepted) * 1000)


def _short(value: Any) -> str:
    text = jsonlib.dumps(value, ensure_ascii=False)
    return text if len(text) <= ARGUMENTS_SHOWN else f"{text[:ARGUMENTS_SHOWN]}…"


def timeline(record: CallRecord) -> Iterator[Text]:
    """One call from its arrival to its answer, a line an event, with the time since it was accepted."""
    asked = "" if record.requested_tool == record.tool else f", asked for as {printable(record.requested_tool)}"
    yield Text.assemble((printable(f"{record.id} {record.tool}"), "bold"), f"{asked}, session {record.session_id}")
    for name, value in (("call_id", record.call_id), ("turn_id", record.turn_id)):
        if value is not None:
            yield _event("", name, value)
    yield _event("", "accepted", time_text(record.accepted))
    yield _event("", "asked", jsonlib.dumps(record.original_arguments, ensure_ascii=False))
    before = [one for one in record.decisions if one.point == "pre_tool_call"]
    yield from _decided(record, before)
    if record.arguments not in (None, record.original_arguments):
        yield _event("", "in force", jsonlib.dumps(record.arguments, ensure_ascii=False))
    if record.status is None:
        yield _event("", "running", "not finished yet")
        return
    if record.status not in DID_NOT_RUN and not any(one.decision == "broken (closed)" for one in before):
        yield _event("", "ran", record.tool)
    yield from _decided(record, [one for one in record.decisions if one not in before])
    yield (
        _event(_since(record, record.finished), "ended", "")
        .append_text(_status(record))
        .append(f" after {_took(record)}")
    )
    if record.error is not None:
        remedy = f" {record.error.remedy}" if record.error.remedy else ""
        yield _event("", "why", f"{record.error.code}: {record.error.message}.{remedy}")
    for reference in record.references:
        yield _event(
            "", reference.stream, f"{size_text(reference.bytes)} {reference.media_type}, {reference.reference}"
        )


def _decided(record: CallRecord, decisions: Sequence[DecisionRecord]) -> Iterator[Text]:
    for one in decisions:
        reason = f": {one.reason}" if one.reason else ""
        took = f" ({duration_text(one.duration_ms)})" if one.duration_ms else ""
        yield _event(_since(record, one.at), one.hook, f"{one.decision} at {one.point}{reason}{took}")


def _since(record: CallRecord, at: float | None) -> str:
    return "" if at is None else f"+{duration_text(max(0.0, at - record.accepted) * 1000)}"


def _event(since: str, name: str, text: str) -> Text:
    return Text(f"  {since:>8}  {printable(name):<12} {printable(text)}")
