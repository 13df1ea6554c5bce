"""`sandgate token`: the only command that prints a token."""

import os
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from gateway.cli.options import StateDir, state_folder
from gateway.errors import StateError
from gateway.principals import Tokens
from gateway.text import printable


def token_command(
    role: Annotated[Literal["operator", "agent"], Parameter(help="Whose token.")],
    /,
    *,
    rotate: Annotated[
        bool, Parameter(name="--rotate", negative="", help="Make a new one; the gateway must be restarted.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Print a token from the state folder, made there if it is missing.

    The operator's may do everything; the agent's opens sessions and sees those that it opened.
    """
    folder = state_folder(state_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if rotate:
            (folder / "tokens" / role).unlink(missing_ok=True)
        token = Tokens(folder / "tokens", {}).stored(role)
    except OSError as error:
        raise StateError(
            f"{error.filename}: {error.strerror}",
            "Run this as the gateway's user, or name its folder with --state-dir.",
        ) from error
    print(token)
    if rotate:
        _note("the old one works until the gateway is restarted")
    if f"SANDGATE_{role.upper()}_TOKEN" in os.environ:
        _note(f"SANDGATE_{role.upper()}_TOKEN is set: a gateway started with it takes that one instead")


def _note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr)
