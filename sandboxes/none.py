"""The kind for sessions that need no sandbox: functions of the operator's, and hooks."""

from contextlib import AsyncExitStack
from pathlib import Path

from sandboxes.errors import SandboxUnavailable
from sandboxes.kind import Probe, SandboxKind, SandboxSpec
from sandboxes.sandbox import Sandbox


class NoSandboxKind(SandboxKind):
    """Works everywhere, and opens nothing."""

    name = "none"
    opens = False

    def __init__(self, state_dir: Path, *, instance: str) -> None:
        """Take what every kind is made with."""
        super().__init__()

    async def _probe(self) -> Probe:
        return Probe(self.name, works=True)

    async def _build(self, spec: SandboxSpec, undo: AsyncExitStack) -> Sandbox:
        raise SandboxUnavailable("this profile has no sandbox", "Use a profile of another kind.")

    async def _remove(self, session_id: str) -> None:
        """There is no workspace."""
