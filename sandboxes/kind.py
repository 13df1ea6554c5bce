"""A kind of sandbox: whether it works here, and how its sandboxes are opened and their workspaces removed."""

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Literal

import anyio
from typing_extensions import TypeVar

from sandboxes.errors import SandboxUnavailable
from sandboxes.sandbox import Limits, Sandbox

Network = Literal["none", "open"]
"""What a sandbox reaches: nothing, or the internet and whatever listens on this machine, unfiltered."""
_PROBE_SECONDS: Final = 30.0
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9-]{1,128}|_probe")  # the second is ours, no session can have it


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a kind works here. `not_enforced` names each promised limit or defence that this machine cannot give."""

    kind: str
    works: bool
    reason: str = ""
    remedy: str = ""
    not_enforced: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to open. `session_id` is `[A-Za-z0-9-]`, unique while the workspace lives; `read_only` are host paths
    that the operator shows inside at the same place."""

    session_id: str
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[Path, ...] = ()
    network: Network = "none"


def check_session_id(session_id: str) -> None:
    """Raise ValueError for what must not become a name on this machine."""
    if not _SESSION_ID.fullmatch(session_id):
        raise ValueError(f"not a session id: {session_id!r}")


SandboxT = TypeVar("SandboxT", bound=Sandbox, default=Sandbox, covariant=True)


class SandboxKind(ABC, Generic[SandboxT]):
    """Opens sandboxes of one kind on this machine. A kind of yours says how: `_probe`, `_build`, `_remove`, `_close`.

    `lacks` names what its sandboxes do not have: programs that tools need, `JOBS`, `TERMINALS`; such tools are not
    offered. A kind whose `opens` is False has no sandbox at all. One whose `has_network` is False refuses `open`.
    Sandboxes of one that is `poolable` may be opened before there is a session for them.
    """

    name: str
    lacks: frozenset[str] = frozenset()
    opens: bool = True
    has_network: bool = False
    poolable: bool = False

    def __init__(self) -> None:
        self._open: dict[str, SandboxT] = {}
        self._opening: set[str] = set()
        self._probing = anyio.Lock()
        self._probed: tuple[float, Probe] | None = None

    async def probe(self) -> Probe:
        """Whether the kind works here: what `doctor`, `/readyz` and sessions show. The answer is kept for half a
        minute."""
        async with self._probing:
            if self._probed is None or time.monotonic() > self._probed[0]:
                self._probed = (time.monotonic() + _PROBE_SECONDS, await self._probe())
            return self._probed[1]

    async def open(self, spec: SandboxSpec) -> SandboxT:
        """Open a sandbox over the session's workspace, made where missing, or take up the session's own, left by an
        earlier life of the gateway; nothing is left of one that fails.

        Raises SandboxUnavailable, also where the session has an open one, and once SandboxLost, where the one that was
        left has died since and its files with it.
        """
        session_id = spec.session_id
        check_session_id(session_id)
        if spec.network != "none" and not self.has_network:
            raise SandboxUnavailable(f"a sandbox of kind {self.name} has no network", "Use network = 'none'.")
        before = self._open.get(session_id)
        if session_id in self._opening or (before is not None and before.alive):
            raise SandboxUnavailable(f"session {session_id} has an open sandbox")
        self._opening.add(session_id)
        try:
            if before is not None:
                await before.aclose()
            sandbox = self._open[session_id] = await self._built(spec)
        finally:
            self._opening.discard(session_id)
        return sandbox

    async def _built(self, spec: SandboxSpec) -> SandboxT:
        undo = contextlib.AsyncExitStack()
        try:
            return await self._build(spec, undo)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await undo.aclose()
            if isinstance(error, OSError):
                raise SandboxUnavailable(f"a sandbox could not be prepared: {error}") from error
            raise

    async def destroy(self, session_id: str) -> None:
        """Remove the session's workspace, whatever its owner made of it; verified; nothing there is fine. An open
        sandbox over it is ended first."""
        check_session_id(session_id)
        sandbox = self._open.get(session_id)
        if sandbox is not None:
            await sandbox.aclose()
            self._open.pop(session_id, None)
        with anyio.CancelScope(shield=True):
            await self._remove(session_id)

    async def aclose(self) -> None:
        """End all sandboxes of this kind that are still open."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox in self._open.values():
                    tasks.start_soon(sandbox.aclose)
            self._open.clear()
            await self._close()

    def keep(self, session_ids: Collection[str]) -> None:
        """Say which sessions go on, before anything else is asked: what an earlier life of this gateway left of any
        other is removed, at the first use of the kind."""

    async def survivors(self) -> Collection[str]:
        """The sessions of `keep` whose sandbox still runs. Raises SandboxUnavailable."""
        return ()

    def has_workspace(self, session_id: str) -> bool:
        """Whether a session has one, so that a sandbox of another would not do. For kinds that are `poolable`."""
        raise NotImplementedError

    async def hand_over(self, sandbox: Sandbox, spec: SandboxSpec) -> None:
        """Make a sandbox that was opened for nobody this session's own, as if `open(spec)` had opened it. For kinds
        that are `poolable`. Raises SandboxUnavailable; the sandbox is then good for nothing."""
        session_id, bare = spec.session_id, sandbox.session_id
        check_session_id(session_id)
        before = self._open.get(session_id)
        if session_id in self._opening or (before is not None and before.alive):
            raise SandboxUnavailable(f"session {session_id} has an open sandbox")
        self._opening.add(session_id)
        try:
            if before is not None:
                await before.aclose()
            await self._assign(self._open[bare], spec)
        except OSError as error:
            raise SandboxUnavailable(f"a sandbox could not be handed over: {error}") from error
        finally:
            self._opening.discard(session_id)
        sandbox.session_id = session_id
        self._open[session_id] = self._open.pop(bare)

    async def settle(self, sandbox: Sandbox) -> None:
        """Do what `hand_over` left for later, so that no session waits for it. Raises SandboxUnavailable."""

    @abstractmethod
    async def _probe(self) -> Probe:
        """Try the kind for real, cheaply."""

    @abstractmethod
    async def _build(self, spec: SandboxSpec, undo: contextlib.AsyncExitStack) -> SandboxT:
        """Make a sandbox; what is pushed on `undo` happens only if this raises."""

    @abstractmethod
    async def _remove(self, session_id: str) -> None:
        """Remove the workspace of a session without a sandbox."""

    async def _assign(self, sandbox: SandboxT, spec: SandboxSpec) -> None:  # type: ignore[misc]  # it is one of ours
        """Let all that bears the sandbox's name bear the session's, which has nothing yet."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Free what the kind itself holds."""
