"""`sandgate doctor`: a table of what works here."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import anyio
from rich.text import Text

from gateway.build import with_port
from gateway.cli.options import AsJson, ConfigFile, Port, StateDir, state_folder
from gateway.cli.output import cell, plain_table, print_json, print_table
from gateway.doctor import Check, examine
from gateway.settings import load_settings

_STYLES: Final = {"ok": "green", "weak": "yellow", "broken": "red"}


def doctor_command(
    *, config: ConfigFile = None, port: Port = None, state_dir: StateDir = None, json: AsJson = False
) -> int:
    """Check this machine for a gateway with this configuration; nothing is left behind.

    A part that is weak works, and holds less than it could; one that is broken does not work. Exit code 1 if the
    configuration needs something that is broken.
    """
    settings, folder = load_settings(config)
    checks = anyio.run(examine, with_port(settings, port), folder, state_folder(state_dir))
    works = not any(check.fails for check in checks)
    if json:
        print_json({"works": works, "checks": [asdict(check) for check in checks]})
    else:
        _show(checks)
    return 0 if works else 1


def _show(checks: Sequence[Check]) -> None:
    table = plain_table("part", "", "what was found", wrap=("what was found",))
    for check in checks:
        found = cell(check.detail)
        if check.remedy:
            found = Text("\n").join([found, Text("-> ", "bold") + cell(check.remedy)])
        table.add_row(cell(check.name), cell(check.verdict, _STYLES[check.verdict]), found)
    print_table(table)
    weak = sum(check.verdict == "weak" for check in checks)
    broken = [check for check in checks if check.fails]
    if broken:
        print(f"\ndoes not work here: {', '.join(check.name for check in broken)}")
    else:
        print(f"\nworks here{f', with {weak} weakness' + 'es' * (weak > 1) if weak else ''}")
