"""The kind for sessions that need no sandbox: functions of the operator's, and hooks."""

from pathlib import Path

from sandboxes.errors import SandboxUnavailable
from sandboxes.sandbox import Probe, Sandbox, SandboxKind, SandboxSpec


class NoSandboxKind(SandboxKind):
    """Works everywhere, and opens nothing."""

    name = "none"
    opens = False

    def __init__(self, state_dir: Path, *, instance: str) -> None:
        """Take what every kind is made with."""

    async def probe(self) -> Probe:
        return Probe(self.name, works=True)

    async def open(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxUnavailable("this profile has no sandbox", "Use a profile of another kind.")

    async def destroy(self, session_id: str) -> None:
        """There is no workspace."""

    async def aclose(self) -> None:
        """There is nothing to end."""
