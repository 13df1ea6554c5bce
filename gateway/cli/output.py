"""What commands print: tables for people, JSON for programs; strangers' texts escaped in both."""

import datetime
import json
import sys
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.text import printable

OUTPUT_KEEPS: Final = "\n\t"
"""What a program's output may do to a terminal: new lines and tabs."""
FILE_WIDTH: Final = 1000
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """The terminal; what is none has no width, and lines are not broken there."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def plain_table(
    *columns: str, right: tuple[str, ...] = (), wrap: tuple[str, ...] = (), shrink: tuple[str, ...] = ()
) -> Table:
    """A table with a head line and no frame. Where it is too wide, cells of `wrap` are broken into lines, and those of
    `shrink` are cut; all others stay whole."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=name not in (*wrap, *shrink), overflow="fold"
        )
    return table


def print_table(table: Table) -> None:
    """Print it without the blanks that would fill its last column."""
    out = console()
    with out.capture() as capture:
        out.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def cell(text: object, style: str = "") -> Text:
    """Text with nothing in it that a terminal would obey, not even a new line."""
    return Text(printable(str(text)), style=style)


def cut_cell(text: object) -> Text:
    """The same for a column of `shrink`: what has no room is left out, and three dots say so."""
    return Text(printable(str(text)), no_wrap=True, overflow="ellipsis")


def print_json(value: Any) -> None:
    """Print data; only ASCII, so that no terminal obeys any of it."""
    print(json.dumps(value, indent=2, default=str))


def size_text(size: int) -> str:
    """`14 B`, `5.0 MiB`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def duration_text(milliseconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.0 s`."""
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def time_text(at: float) -> str:
    """A moment in this machine's time."""
    return datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age_text(seconds: float) -> str:
    """`now`, `5 s`, `3 min`, `2 h`, `4 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"
