"""`sandgate demo`: ten tool calls in a real sandbox, and what became of them."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

import anyio
from cyclopts import Parameter
from rich.text import Text

from gateway.cli.options import AsJson
from gateway.cli.output import cell, console, cut_cell, duration_text, plain_table, print_json, print_table, size_text
from gateway.cli.remote import refusals
from gateway.demo import KINDS, Report, Row, run_demo

SHORT_SESSION = 6


def demo_command(
    *,
    kind: Annotated[
        Literal["local", "docker", "virtual"] | None, Parameter(help="Run in this kind of sandbox.")
    ] = None,
    json: AsJson = False,
) -> int:
    """See ten tool calls run in a real sandbox, pass hooks and come back.

    A gateway of its own, on a free port of this machine and over a folder that is gone afterwards. Every answer is
    checked; exit code 1 if one is not as it must be, or if anything is left behind.
    """
    with refusals():
        report = anyio.run(run_demo, (kind,) if kind else KINDS, backend_options={"use_uvloop": True})
    if json:
        print_json(_data(report))
    else:
        _show(report)
    return 0 if report.ok else 1


def _data(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "ok": report.ok,
        **asdict(report),
        "session": report.session.model_dump(mode="json"),
        "close_report": report.close_report.model_dump(mode="json"),
    }


def _show(report: Report) -> None:
    out = console()
    for line in _before(report):
        out.print(line, soft_wrap=True)
    table = plain_table(
        "#", "tool", "status", "time", "hooks", "size", "result", right=("#", "time", "size"), shrink=("result",)
    )
    for row in report.calls:
        table.add_row(
            cell(row.number),
            cell(row.tool),
            _status(row),
            cell(duration_text(row.duration_ms)),
            cell(", ".join(row.hooks)),
            cell(size_text(row.bytes) if row.bytes else "-"),
            cut_cell(_short(row.result, report.session.id)),
        )
    print_table(table)
    for line in _after(report):
        out.print(line, soft_wrap=True)


def _before(report: Report) -> list[Text]:
    lines = [cell(f"not {one.kind}: {one.reason}. {one.remedy}") for one in report.refused]
    session = report.session
    about = {
        "local": "local (bubblewrap)",
        "docker": "docker (the engine of this machine)",
        "virtual": "virtual (bashkit)",
    }.get(session.kind, session.kind)
    network = "no network" if session.network == "none" else f"network {session.network}"
    processes = "" if session.kind == "virtual" else f" {session.limits['processes']:.0f} processes,"
    lines.append(cell(f"sandbox {about}, {network},{processes} {size_text(int(session.limits['memory']))} of memory"))
    if session.not_enforced:
        lines.append(cell(f"not enforced here: {', '.join(session.not_enforced)}; see `sandgate doctor`"))
    seed = report.seed
    lines.append(cell(f"workspace seeded with {seed.name}, {size_text(seed.bytes)}: {seed.source}"))
    return lines


def _status(row: Row) -> Text:
    if row.as_expected:
        return cell(row.status, "green")
    wrong = f"not {row.expected}" if row.status != row.expected else "wrong answer"
    return cell(f"{row.status}: {wrong}", "bold red")


def _short(result: str, session_id: str) -> str:
    return result.replace(session_id, f"{session_id[:SHORT_SESSION]}…")


def _after(report: Report) -> list[Text]:
    back, collected = report.read_back, report.collected
    ways = [(back.by_reference, "by its reference"), (back.by_store_uri, "by the store's own URI")]
    good = " and ".join(way for right, way in ways if right)
    bad = " and ".join(way for right, way in ways if not right)
    lines = [cell(f"read back through fsspec {good}: {back.bytes:,} bytes, sha256 matches")] if good else []
    if bad:
        lines.append(cell(f"NOT read back {bad}", "bold red"))
    if collected.verified:
        names = ", ".join(collected.files)
        lines.append(cell(f"collected {len(collected.files)} files, as their manifest says: {names}"))
    else:
        lines.append(cell("collected files are NOT as their manifest says", "bold red"))
    lines += [cell(f"closing failed: {one}", "bold red") for one in report.close_report.failed]
    lines.append(
        cell(f"LEFT BEHIND: {'; '.join(report.left_behind)}", "bold red")
        if report.left_behind
        else cell("session closed; nothing left behind: no process, container, workspace, control group or file")
    )
    lines.append(cell(f"{'all as it should be' if report.ok else 'NOT as it should be'}, in {report.seconds:.1f} s"))
    return lines
