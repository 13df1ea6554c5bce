"""`sandgate config`: the settings in force, and where each comes from."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gateway.cli.options import AsJson, ConfigFile, StateDir, state_folder
from gateway.cli.output import cell, plain_table, print_json, print_table
from gateway.cli.template import toml_value
from gateway.settings import CONFIG_NAME, Settings, covers, load_settings, set_by_variables

HIDDEN: Final = "(set, not shown)"
_FREE_TABLES: Final = re.compile(r"(^|\.)(options|env)\.[^.]+")
"""Tables whose values are the operator's own words, and may be secrets."""
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@]+@")


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting; `source` is `default`, the file, or the variable."""

    key: str
    value: Any
    source: str


def config_command(*, config: ConfigFile = None, state_dir: StateDir = None, json: AsJson = False) -> None:
    """Show every setting in force and where it comes from: the default, the file or a variable.

    Values that may be secrets (env, options, tokens, passwords in URIs) are not shown.
    """
    settings, _ = load_settings(config)
    file = config_file(config)
    found = [*entries(settings, file), *_outside(state_dir)]
    if json:
        print_json({"file": str(file) if file else None, "settings": [asdict(entry) for entry in found]})
        return
    table = plain_table("setting", "value", "from", wrap=("value",))
    for entry in found:
        value = HIDDEN if entry.value == HIDDEN else toml_value(entry.value)
        table.add_row(cell(entry.key), cell(value), cell(entry.source, "" if entry.source != "default" else "dim"))
    print_table(table)


def config_file(option: Path | None) -> Path | None:
    """The file that `load_settings` reads."""
    named = option or os.environ.get("SANDGATE_CONFIG")
    if named:
        return Path(named)
    return Path(CONFIG_NAME) if Path(CONFIG_NAME).exists() else None


def entries(settings: Settings, file: Path | None) -> Iterator[Entry]:
    """Every setting as one entry; lists are one value each."""
    in_file = {key for key, value in _flat(tomllib.loads(file.read_text())).items() if value != {}} if file else set()
    variables = set_by_variables(os.environ)
    for key, value in _flat(settings.model_dump(by_alias=True)).items():
        variable = next((name for name, prefix in variables.items() if covers(prefix, key.lower())), None)
        source = variable or (str(file) if any(covers(one, key) for one in in_file) else "default")
        yield Entry(key, _shown(key, value), source)


def _outside(state_dir: Path | None) -> Iterator[Entry]:
    folder = state_folder(state_dir)
    from_environment = "SANDGATE_STATE_DIR" if "SANDGATE_STATE_DIR" in os.environ else "default"
    yield Entry("(state folder)", str(folder), "--state-dir" if state_dir else from_environment)
    for role in ("operator", "agent"):
        variable = f"SANDGATE_{role.upper()}_TOKEN"
        yield Entry(f"({role} token)", HIDDEN, variable if os.environ.get(variable) else str(folder / "tokens" / role))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; an empty table, and a list, is a value."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _shown(key: str, value: Any) -> Any:
    if _FREE_TABLES.search(key):
        return HIDDEN
    match value:
        case str():
            return _CREDENTIALS.sub("***@", value)
        case dict():
            return {name: _shown(f"{key}.{name}", one) for name, one in value.items()}
        case list() | tuple():
            return [_shown(key, one) for one in value]
    return value
