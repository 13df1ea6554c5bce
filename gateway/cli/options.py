"""Options that several commands share, and where the state folder is (also without the server's packages)."""

import os
from pathlib import Path
from typing import Annotated

import platformdirs
from cyclopts import Parameter, validators

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name=["--config", "-c"], help="The configuration; default: SANDGATE_CONFIG, then sandgate.toml here, then none."
    ),
]
StateDir = Annotated[
    Path | None,
    Parameter(
        name="--state-dir",
        help="Where the gateway keeps everything; default: SANDGATE_STATE_DIR, then ~/.local/state/sandgate.",
    ),
]
Port = Annotated[
    int | None,
    Parameter(
        name="--port",
        validator=validators.Number(gte=0, lte=65535),
        help="In place of server.port; 0 takes a free one.",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print data instead of text.")]


def state_folder(option: Path | None = None) -> Path:
    """The state folder: the option, SANDGATE_STATE_DIR, or the platform's."""
    named = option or os.environ.get("SANDGATE_STATE_DIR")
    return Path(named).absolute() if named else Path(platformdirs.user_state_dir("sandgate", appauthor=False))


def state_option(option: Path | None) -> str:
    """What to add to another command so that it finds the same state folder."""
    return f" --state-dir {option}" if option else ""
