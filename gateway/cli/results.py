"""`sandgate results`: what is stored of a session; one result shown, saved or searched."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import anyio.to_thread
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from gateway.cli.options import AsJson, StateDir
from gateway.cli.output import OUTPUT_KEEPS, age_text, cell, plain_table, print_json, print_table, size_text
from gateway.cli.remote import RemoteError, ask, find_session
from gateway.client import Client, Session, StoredResultEntry
from gateway.client.archive import Progress
from gateway.text import is_text, printable

LONG_TRANSFER: Final = 8 << 20
"""From so many bytes on a terminal is shown how far it is."""
PAGE: Final = 1 << 20

Save = Annotated[Path | None, Parameter(help="Write it to this file, which appears whole or not at all.")]
Grep = Annotated[str | None, Parameter(help="Only the lines that this expression (RE2) matches; exit code 1 if none.")]


def results_command(
    session: Annotated[str, Parameter(help="Its id, or how that begins.")],
    result: Annotated[str | None, Parameter(help="Its reference or key, or how the key begins: 0009.")] = None,
    /,
    *,
    save: Save = None,
    grep: Grep = None,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """List what is stored of a session; with a result, write its bytes to standard output.

    SANDGATE_TOKEN says whose sessions, else the operator's token of the state folder. On a terminal control characters
    are shown as escapes, and what is no text is not shown; elsewhere its bytes come as they are.
    """
    if result is None:
        if save or grep:
            raise RemoteError("save and grep are for one result", "Name it after the session.")
        entries = ask("operator", state_dir, lambda client: _all(client, session))
        _list(entries, as_json=json)
        return 0
    if json and grep is None:
        print_json(ask("operator", state_dir, lambda client: _one(client, session, result))[1].model_dump(mode="json"))
        return 0
    if save is not None:
        ask("operator", state_dir, lambda client: _save(client, session, result, save))
        return 0
    if grep is not None:
        return ask("operator", state_dir, lambda client: _grep(client, session, result, grep, as_json=json))
    ask("operator", state_dir, lambda client: _show(client, session, result))
    return 0


async def _all(client: Client, name: str) -> tuple[StoredResultEntry, ...]:
    return await (await find_session(client, name)).results()


async def _one(client: Client, name: str, wanted: str) -> tuple[Session, StoredResultEntry]:
    session = await find_session(client, name)
    found = [one for one in await session.results() if wanted in (one.reference, _key(one))]
    found = found or [one for one in await session.results() if _key(one).startswith(wanted)]
    if len(found) != 1:
        what = "no result" if not found else f"{len(found)} results"
        raise RemoteError(f"{what} with a key that begins with {wanted!r}", f"sandgate results {name} lists them.")
    return session, found[0]


def _key(entry: StoredResultEntry) -> str:
    return entry.reference.partition("/results/")[2]


def _list(entries: Sequence[StoredResultEntry], *, as_json: bool) -> None:
    if as_json:
        print_json([one.model_dump(mode="json") for one in entries])
        return
    if not entries:
        print("nothing stored, or not any more")
        return
    now = time.time()
    table = plain_table("result", "stream", "size", "type", "age", "expires in", right=("size", "age", "expires in"))
    for one in entries:
        ages = age_text(now - one.created), age_text(max(0.0, one.expires - now))
        table.add_row(*map(cell, (_key(one), one.stream, size_text(one.bytes), one.media_type, *ages)))
    print_table(table)


async def _show(client: Client, name: str, wanted: str) -> None:
    session, entry = await _one(client, name, wanted)
    plain = not sys.stdout.isatty()
    if not plain and not is_text(await session.read_result(entry.reference, 0, 64 * 1024)):
        raise RemoteError(f"{_key(entry)} is no text: {entry.media_type}", "Write it to a file with --save.")
    for start in range(0, entry.bytes, PAGE):
        content = await session.read_result(entry.reference, start, start + PAGE)
        sys.stdout.buffer.write(content if plain else _escaped(content))
        sys.stdout.buffer.flush()


def _escaped(content: bytes) -> bytes:
    return printable(content.decode(errors="replace"), keep=OUTPUT_KEEPS).encode()


async def _save(client: Client, name: str, wanted: str, target: Path) -> None:
    session, entry = await _one(client, name, wanted)
    if await anyio.to_thread.run_sync(target.is_dir):
        target = target / _key(entry).rpartition("/")[2]
    try:
        with _progress(entry.bytes) as progress:
            await session.save_result(entry.reference, target, progress=progress)
    except OSError as error:
        raise RemoteError(f"{target}: {error.strerror}", "Name a file that can be written.") from error
    print(f"{size_text(entry.bytes)} to {printable(str(target))}, sha256 {entry.sha256}")


@contextmanager
def _progress(size: int) -> Iterator[Progress | None]:
    """A bar on the terminal for what takes a while; it is gone when it is over."""
    if size < LONG_TRANSFER or not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda done: bar.update(task, completed=done)


async def _grep(client: Client, name: str, wanted: str, pattern: str, *, as_json: bool) -> int:
    session, entry = await _one(client, name, wanted)
    page = await session.grep_result(entry.reference, pattern)
    if as_json:
        print_json(page.model_dump(mode="json"))
    else:
        print(printable(page.text, keep=OUTPUT_KEEPS) if sys.stdout.isatty() else page.text, end="")
    if page.truncated:
        print("more lines match; narrow the expression", file=sys.stderr)
    return 0 if page.text else 1
