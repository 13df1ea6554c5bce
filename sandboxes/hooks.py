"""SandboxHook: what happens when a sandbox has been created and before it is destroyed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandboxes.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class SandboxContext:
    """`restored` says that the workspace was there before: seeds skip, set-ups run again. In `on_destroy` False means
    that it was lost, or that the session never opened."""

    sandbox: Sandbox
    session_id: str
    restored: bool
    labels: Mapping[str, str] = field(default_factory=dict)


class SandboxHook:
    """Override what you need. `on_create` runs in list order, `on_destroy` in reverse; when an `on_create` raises,
    the session does not open and the hooks that had created are undone (`on_destroy`) in reverse."""

    async def on_create(self, ctx: SandboxContext) -> None:
        """Prepare the workspace; may raise to refuse the session."""

    async def on_destroy(self, ctx: SandboxContext) -> None:
        """Take from the workspace what should stay; an error is told to the one who closes, and stops no other hook."""
