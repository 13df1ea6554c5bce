"""SetupCommand: what is run in a sandbox before it is used."""

from typing import Final

from sandboxes import SandboxContext, SandboxHook

SETUP_SECONDS: Final = 300.0
SHOWN_CHARACTERS: Final = 2000


class SetupFailed(Exception):
    """The command did not end with exit code 0; the message has the end of its output."""


class SetupCommand(SandboxHook):
    """Runs a shell command in the workspace, in a restored one too; anything but exit code 0 refuses the session."""

    def __init__(self, command: str, *, timeout_seconds: float = SETUP_SECONDS) -> None:
        self._command = command
        self._timeout_seconds = timeout_seconds

    async def on_create(self, ctx: SandboxContext) -> None:
        ran = await ctx.sandbox.execute(self._command, timeout_seconds=self._timeout_seconds)
        if ran.timed_out:
            raise SetupFailed(f"setup took over {self._timeout_seconds:g} s{_end(ran.stdout + ran.stderr)}")
        if ran.exit_code != 0:
            how = "was killed" if ran.exit_code is None else f"ended with exit code {ran.exit_code}"
            raise SetupFailed(f"setup {how}{_end(ran.stdout + ran.stderr)}")


def _end(output: str) -> str:
    return f": {output.strip()[-SHOWN_CHARACTERS:]}" if output.strip() else ""
