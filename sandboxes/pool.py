"""Warm sandboxes: opened before anybody asks, bare, and each handed to one session."""

import logging
import math
import secrets
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import anyio

from sandboxes.capture import Capture
from sandboxes.errors import SandboxError, SandboxUnavailable
from sandboxes.kind import SandboxKind, SandboxSpec
from sandboxes.sandbox import Sandbox

_LOOK_SECONDS: Final = 1.0
_FIRST_COMMAND_SECONDS: Final = 10.0
_AFTER_FAILURE_SECONDS: Final = 10.0
_WAIT_SECONDS: Final = 30.0
_AGE_SECONDS: Final = 900.0
logger = logging.getLogger(__name__)

WhenEmpty = Literal["create", "wait", "fail"]


class Places(Protocol):
    """The sandboxes that may live on this machine; those at the ready make room for sessions."""

    def take_spare(self) -> bool:
        """Take a place, if one is free."""

    def give_back(self) -> None: ...

    def lend_from(self, pool: "Pool") -> None:
        """Ask this pool to `give_up` one of its own where a session finds no place."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`ready` are kept at the ready, as long as with those in use they are no more than `most`. `when_empty` says what
    a session gets where none is ready: one made for it (beyond `most` too), the next that is ready, or a refusal."""

    ready: int
    most: int | None = None
    when_empty: WhenEmpty = "create"


@dataclass(frozen=True, slots=True)
class _Ready:
    sandbox: Sandbox
    until: float


class Pool:
    """Sandboxes of one profile at the ready: opened and tried with a first command, renewed by age, and never used
    again. A session whose options are not the profile's own gets one of its own, and so does one that has a workspace.

    `spec` is what the profile's sandboxes are, of no session; env comes with each program, so it may differ.
    """

    def __init__(
        self, kind: SandboxKind, spec: SandboxSpec, size: PoolSize, places: Places, *, age_seconds: float = _AGE_SECONDS
    ) -> None:
        self._kind = kind
        self._spec = _bare(spec)
        self._size = size
        self._places = places
        self._age_seconds = age_seconds
        self._ready: deque[_Ready] = deque()
        self._leaving: list[Sandbox] = []
        self._in_use: list[Sandbox] = []
        self._unsettled: list[Sandbox] = []
        self._changed = anyio.Event()
        self._filled = anyio.Event()
        places.lend_from(self)

    @property
    def ready(self) -> int:
        return sum(one.sandbox.alive for one in self._ready)

    @property
    def refuses(self) -> bool:
        """Whether a session would be refused now for want of a sandbox at the ready."""
        return self._size.when_empty == "fail" and not self.ready

    async def run(self) -> None:
        """Keep it filled until cancelled, then end what is at the ready."""
        try:
            while True:
                self._changed = anyio.Event()
                pause = _LOOK_SECONDS
                try:
                    await self._settle()
                    await self._renew()
                    await self._fill()
                except SandboxError as error:
                    logger.warning("no sandbox at the ready: %s", error.message)
                    pause = _AFTER_FAILURE_SECONDS
                with anyio.move_on_after(pause):
                    await self._changed.wait()
        finally:
            with anyio.CancelScope(shield=True):
                while self.give_up():
                    self._places.give_back()
                await self._end_leaving()

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox for a session, bare. Raises SandboxUnavailable, as `SandboxKind.open` does, and where none is ready
        and none may be made."""
        sandbox = await self._taken(spec) if _bare(spec) == self._spec else None
        if sandbox is None:
            sandbox = await self._kind.open(spec)
        self._in_use = [*(one for one in self._in_use if one.alive), sandbox]
        self._changed.set()
        return sandbox

    async def _taken(self, spec: SandboxSpec) -> Sandbox | None:
        """One at the ready, made the session's own; None where it is to get one of its own."""
        if self._kind.has_workspace(spec.session_id):
            return None
        if self._size.when_empty == "wait":
            with anyio.move_on_after(_WAIT_SECONDS):
                while not self.ready:
                    await self._filled.wait()
        while self._ready:
            one = self._ready.popleft()
            self._places.give_back()
            try:
                if one.sandbox.alive:
                    await self._kind.hand_over(one.sandbox, spec)
                    self._unsettled.append(one.sandbox)
                    return one.sandbox
            except SandboxError as error:
                logger.warning("a sandbox at the ready is not used: %s", error.message)
            self._leaving.append(one.sandbox)
        if self._size.when_empty == "create":
            return None
        raise SandboxUnavailable("no sandbox of this profile is ready", "try again soon, or let the pool be larger")

    async def _fill(self) -> None:
        while self.ready < self._size.ready and self._live < (self._size.most or math.inf):
            if not self._places.take_spare():
                return
            try:
                sandbox = await self._opened()
            except BaseException:
                self._places.give_back()
                raise
            self._ready.append(_Ready(sandbox, anyio.current_time() + self._age_seconds))
            self._filled.set()
            self._filled = anyio.Event()

    @property
    def _live(self) -> int:
        return self.ready + sum(one.alive for one in self._in_use)

    async def _opened(self) -> Sandbox:
        """A new one, which has run a first command."""
        session_id = f"pool-{secrets.token_hex(8)}"
        nothing = Capture(0)
        try:
            sandbox = await self._kind.open(replace(self._spec, session_id=session_id))
            ran = await sandbox.exec(["true"], stdout=nothing, stderr=nothing, timeout_seconds=_FIRST_COMMAND_SECONDS)
            if (ran.exit.how, ran.exit.code) != ("exit", 0):
                raise SandboxUnavailable("the first command in a new sandbox failed")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._kind.destroy(session_id)
            raise
        return sandbox

    async def _settle(self) -> None:
        while self._unsettled:
            sandbox = self._unsettled.pop()
            try:
                await self._kind.settle(sandbox)
            except SandboxError as error:
                logger.warning("the sandbox of session %s is not settled: %s", sandbox.session_id, error.message)

    async def _renew(self) -> None:
        """End those that are too old, or dead, or in the way of a session."""
        now = anyio.current_time()
        for one in [one for one in self._ready if now > one.until or not one.sandbox.alive]:
            self._ready.remove(one)
            self._leaving.append(one.sandbox)
            self._places.give_back()
        await self._end_leaving()

    def give_up(self) -> bool:
        """End the oldest at the ready; its place is the caller's. False where there is none."""
        if not self._ready:
            return False
        self._leaving.append(self._ready.popleft().sandbox)
        self._changed.set()
        return True

    async def _end_leaving(self) -> None:
        while self._leaving:
            await self._kind.destroy(self._leaving[-1].session_id)
            self._leaving.pop()


def _bare(spec: SandboxSpec) -> SandboxSpec:
    """Of what a sandbox is asked to be, that which it cannot become later."""
    return replace(spec, session_id="", env={})
