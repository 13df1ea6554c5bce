"""Sessions: one workspace, one sandbox at a time, one private part of the store. Open, find, expire, close."""

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import anyio
from pydantic import JsonValue

from gateway.calls import ActiveCall
from gateway.errors import NotFound, SandgateError, TooMany, Unprocessable
from gateway.hooks.hook import SessionInfo
from gateway.hooks.permission import Permissions
from gateway.inputs import SessionInput
from gateway.journal import SessionRow
from gateway.models import (
    CloseReport,
    CollectReport,
    SessionRecord,
    SessionRequest,
    SessionState,
    ToolDefinition,
)
from gateway.principals import Principal
from gateway.terminals import SessionTerminal
from gateway.turns import Turns
from gateway.workspace_hooks.collect import CollectWorkspace
from sandboxes import (
    JOBS,
    Pool,
    Sandbox,
    SandboxContext,
    SandboxError,
    SandboxHook,
    SandboxHookFailed,
    SandboxKind,
    SandboxLost,
    SandboxSpec,
)
from stores import StoreError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""How long one SandboxHook may take when a session ends; what is not collected by then is told, and removed."""
CREATE_SECONDS = 600.0
"""How long one SandboxHook may prepare a sandbox."""
RETRY_SECONDS = 5
JOBS_SECONDS = 1.0
"""How long a sandbox may take to tell its jobs, where they are only shown."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """A session's limits in force: its profile's, or narrower."""

    call_seconds: float
    max_call_seconds: float
    output: int
    parallel_calls: int
    results_size: int


class SandboxPlaces:
    """How many sandboxes may live on this machine at once."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._pools: list[Pool] = []
        self.taken = 0

    def lend_from(self, pool: Pool) -> None:
        self._pools.append(pool)

    def take(self, *, even_if_full: bool = False) -> None:
        """Take a place; where none is free, that of a sandbox at the ready. Raises TooMany."""
        if self.take_spare() or any(pool.give_up() for pool in self._pools):
            return
        if not even_if_full:
            raise TooMany(
                f"all {self._places} sandboxes of this machine are in use",
                "Close a session, or raise server.live_sandboxes.",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.taken += 1

    def take_spare(self) -> bool:
        if self.taken >= self._places:
            return False
        self.taken += 1
        return True

    def give_back(self) -> None:
        self.taken -= 1


@dataclass
class Session:
    """A session while this process lives; what must survive is in its row."""

    row: SessionRow
    request: SessionRequest
    kind: SandboxKind
    spec: SandboxSpec
    limits: SessionLimits
    idle_seconds: float
    tools: tuple[ToolDefinition, ...]
    permissions: Permissions
    sandbox_hooks: tuple[SandboxHook, ...]
    places: SandboxPlaces
    pool: Pool | None
    show_store_uri: bool
    raw_stream: bool
    upstreams: tuple[str, ...] = ()
    sequence: int = 0
    state: SessionState = "open"
    last_used: float = 0.0
    running: dict[str, ActiveCall] = field(default_factory=dict)
    job_offsets: dict[str, int] = field(default_factory=dict)
    terminal: SessionTerminal | None = None
    close_report: CloseReport | None = None
    closed: anyio.Event = field(default_factory=anyio.Event)
    not_enforced: tuple[str, ...] = ()
    inputs: Mapping[str, SessionInput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_used = self.last_used or self.row.last_used
        self.offer(self.tools)
        self.parallel = anyio.CapacityLimiter(self.limits.parallel_calls)
        self.keys = anyio.Lock()
        self.terminal_lock = anyio.Lock()
        self._lock = anyio.Lock()
        self._sandbox: Sandbox | None = None
        self._untold: SandboxLost | None = None
        self._has_place = False
        self._created: list[SandboxHook] = []
        self.turns = Turns(self.id)
        self._labels = MappingProxyType(self.request.labels)

    def offer(self, tools: tuple[ToolDefinition, ...]) -> None:
        """Have these tools from now on."""
        self.tools = tools
        self.tool_names = frozenset(one.name for one in tools)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def busy(self) -> bool:
        """Whether it is in use now: a call runs, or somebody looks at its terminal."""
        return bool(self.running) or (self.terminal is not None and self.terminal.attached)

    @property
    def sandbox_alive(self) -> bool:
        return self._sandbox is not None and self._sandbox.alive

    def info(self, turn_id: str | None = None, call_context: Mapping[str, JsonValue] | None = None) -> SessionInfo:
        own = self.request.hook_context
        return SessionInfo(
            self.id, turn_id, self._labels, self.inputs, {**own, **call_context} if call_context else own
        )

    def check_context(self, call_context: Mapping[str, JsonValue]) -> None:
        """Raise Unprocessable where a call's `hook_context` would replace a key of the session's."""
        for name in call_context:
            if name in self.request.hook_context:
                raise Unprocessable(
                    f"hook_context: {name[:100]!r} is the session's, and a call cannot replace it",
                    "Give the call's own under another key.",
                )

    def record(self) -> SessionRecord:
        sandbox = self._sandbox
        limits = self.spec.limits
        return SessionRecord(
            id=self.id,
            profile=self.row.profile,
            kind=self.kind.name,
            state=self.state,
            network=self.spec.network,
            created=self.row.created,
            last_used=self.last_used,
            expires=self.row.expires,
            idle_seconds=self.idle_seconds,
            calls=self.sequence,
            running=len(self.running),
            channel=sandbox.channel if sandbox and sandbox.alive else None,
            channel_reason=sandbox.channel_reason or None if sandbox and sandbox.alive else None,
            not_enforced=sandbox.not_enforced if sandbox else self.not_enforced,
            limits={
                "memory": limits.memory,
                "cpus": limits.cpus,
                "processes": limits.processes,
                "open_files": limits.open_files,
                "workspace_size": limits.workspace_size,
                "call_seconds": self.limits.call_seconds,
                "max_call_seconds": self.limits.max_call_seconds,
                "output": self.limits.output,
                "parallel_calls": self.limits.parallel_calls,
                "results_size": self.limits.results_size,
            },
            labels=self.request.labels,
            close_report=self.close_report,
        )

    async def measured(self) -> SessionRecord:
        """Its record, with what its sandbox uses now."""
        sandbox = self._sandbox
        if sandbox is None or not sandbox.alive:
            return self.record()
        usage, jobs = await sandbox.usage(), await _running_jobs(sandbox)
        return self.record().model_copy(update={"memory": usage.memory, "cpu_seconds": usage.cpu_seconds, "jobs": jobs})

    def check_open(self) -> None:
        """Raise NotFound where the session takes no more work; ask again after every wait."""
        if self.state != "open":
            raise NotFound(
                "this session is closed",
                "Its results can be read until retention ends; open another.",
                code="session_closed",
            )

    def take_place(self) -> None:
        """Make sure of a place for the sandbox that is about to be opened. Raises TooMany."""
        if self._has_place or not self.kind.opens:
            return
        if self.pool is not None and self.pool.refuses:
            raise TooMany(
                f"no sandbox of the profile {self.row.profile!r} is ready",
                "Try again soon, or raise the profile's pool.",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.places.take()
        self._has_place = True

    def free_place(self) -> None:
        """Give the place back, if there is no sandbox on it."""
        if self._has_place and self._sandbox is None:
            self._has_place = False
            self.places.give_back()

    def ended(self, active: ActiveCall) -> None:
        """A call is over: idle time starts again when the last one is."""
        del self.running[active.call.id]
        if not self.running:
            self.free_place()
        self.used()

    def used(self) -> None:
        """Idle time starts again."""
        self.last_used = time.time()

    async def sandbox(self) -> Sandbox:
        """The live sandbox; opened at the first use, and again after one was lost.

        Raises SandboxUnavailable, Unprocessable (a kind without any), NotFound (the session has ended meanwhile), or
        what an `on_create` raised; nothing is left half-made then. Raises SandboxLost where files were lost while no
        call ran: one call must be told, before the next finds an empty workspace.
        """
        if not self.kind.opens:
            raise Unprocessable("this profile has no sandbox", "Use a profile of another kind.", code="no_sandbox")
        async with self._lock:
            if self._sandbox is not None and self._sandbox.alive:
                return self._sandbox
            self.check_open()
            await self._drop()
            try:
                self._tell_loss()
                self.take_place()
                self._sandbox = await (self.pool or self.kind).open(self.spec)
            except BaseException:
                self.free_place()
                raise
            if self._sandbox.taken_up:
                self._created = list(self.sandbox_hooks)
            else:
                await self._create(self._sandbox)
            self._sandbox.stay(self.row.expires)
            return self._sandbox

    def _tell_loss(self) -> None:
        lost, self._untold = self._untold, None
        if lost is not None and lost.files_lost:
            raise lost

    async def take_up(self) -> None:
        """Open the sandbox that an earlier process left running, before a call needs it."""
        try:
            await self.sandbox()
        except SandboxLost as lost:
            self._untold = lost
        except Exception as error:  # also what a stranger's on_create raises; the next call meets it again
            logger.warning("the sandbox of session %s is not taken up yet: %s", self.id, error)

    async def _create(self, sandbox: Sandbox) -> None:
        ctx = SandboxContext(sandbox, self.id, sandbox.restored, self.request.labels)
        self._created.clear()
        try:
            for hook in self.sandbox_hooks:
                await _created(hook, ctx)
                self._created.append(hook)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._undo(ctx)
                await self._drop()
                self.free_place()
            raise

    async def _undo(self, ctx: SandboxContext) -> list[str]:
        """`on_destroy` of every hook that had created, in reverse; returns what failed."""
        failed = []
        while self._created:
            hook = self._created.pop()
            name = type(hook).__name__
            try:
                with anyio.move_on_after(CLOSE_SECONDS) as limit:
                    await hook.on_destroy(ctx)
            except Exception as error:  # strangers' code: it is told, and does not stop the others
                logger.warning("on_destroy of %s failed in session %s", name, self.id)
                failed.append(f"{name}: {type(error).__name__}: {error}")
            if limit.cancelled_caught:
                failed.append(f"{name}: took over {CLOSE_SECONDS:g} s and was given up")
        return failed

    async def _drop(self) -> None:
        """End the sandbox, dead or alive; the workspace stays."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._untold = sandbox.untold_loss()
            with anyio.CancelScope(shield=True):
                await sandbox.aclose()

    async def suspend(self) -> bool:
        """Let go of the sandbox, and keep the workspace: the gateway stops, the session goes on later. Says whether the
        sandbox goes on as well."""
        async with self._lock:
            stays = self._sandbox is not None and self._sandbox.alive and self._sandbox.stays
            if self._sandbox is not None:
                await self._sandbox.leave()
            await self._drop()
            self.free_place()
            return stays

    async def end(self, state: SessionState, reason: str, *, collect: bool = True) -> CloseReport:
        """Collect, end the sandbox, remove the workspace; whatever fails is told in the report."""
        failed: list[str] = []
        async with self._lock:
            with anyio.CancelScope(shield=True):
                failed += await self._collect() if collect else []
                failed += await self._remove()
        return CloseReport(id=self.id, state=state, reason=reason, collected=self._collected(), failed=tuple(failed))

    async def _collect(self) -> list[str]:
        if not self.sandbox_hooks:
            return []
        try:
            with anyio.fail_after(CLOSE_SECONDS):
                ctx = await self._for_collecting()
        except TimeoutError:
            return [f"collecting: no sandbox within {CLOSE_SECONDS:g} s"]
        except SandboxError as error:
            return [f"collecting: {error.message}"]
        return await self._undo(ctx)

    async def _for_collecting(self) -> SandboxContext:
        """The live sandbox, or a fresh one over the same workspace when that is dead: `restored` if it was there."""
        sandbox, there = self._sandbox, True
        if sandbox is None or not sandbox.alive:
            await self._drop()
            if not self._has_place:
                self.places.take(even_if_full=True)
                self._has_place = True
            self._sandbox = sandbox = await self._reopened()
            there = sandbox.restored
            self._created = list(self.sandbox_hooks)
        return SandboxContext(sandbox, self.id, there, self.request.labels)

    async def _reopened(self) -> Sandbox:
        try:
            return await self.kind.open(self.spec)
        except SandboxLost:  # told by what is collected
            return await self.kind.open(self.spec)

    async def _remove(self) -> list[str]:
        failed = []
        for step in (self._drop, self._destroy):
            try:
                await step()
            except SandboxError as error:
                failed.append(error.message)
        self.free_place()
        return failed

    async def _destroy(self) -> None:
        await self.kind.destroy(self.id)

    def _collected(self) -> tuple[CollectReport, ...]:
        return tuple(
            hook.report for hook in self.sandbox_hooks if isinstance(hook, CollectWorkspace) and hook.report is not None
        )


async def _created(hook: SandboxHook, ctx: SandboxContext) -> None:
    """Let one hook prepare the sandbox. What a stranger's raises is SandboxHookFailed; our own errors stay."""
    name = type(hook).__name__
    try:
        with anyio.move_on_after(CREATE_SECONDS) as limit:
            await hook.on_create(ctx)
    except (SandboxError, StoreError, SandgateError):
        raise
    except Exception as error:  # strangers' code: whatever it raises refuses the session
        raise SandboxHookFailed(f"{name}: {type(error).__name__}: {error}", "Nothing is left of it.") from error
    if limit.cancelled_caught:
        raise SandboxHookFailed(f"{name}: not done after {CREATE_SECONDS:g} s", "Nothing is left of it.")


async def _running_jobs(sandbox: Sandbox) -> int | None:
    """How many run in the background; None where the sandbox has none or does not say so in time."""
    if JOBS in sandbox.lacks:
        return None
    with anyio.move_on_after(JOBS_SECONDS), contextlib.suppress(SandboxError):
        return sum(job.exit is None for job in await sandbox.jobs.list())
    return None


class Sessions:
    """All sessions this process knows. A lookup names who asks; foreign and absent are the same NotFound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._by_token: dict[str, str] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def open(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.state == "open"]

    def check_room(self) -> None:
        """Raise TooMany where no more sessions may be open."""
        if len(self.open) >= self._most:
            raise TooMany(
                f"{self._most} sessions are open",
                "Close one, or raise server.sessions.",
                retry_after_seconds=RETRY_SECONDS,
            )

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._by_token[session.row.token_sha256] = session.id

    def forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            session = self._sessions.pop(id, None)
            if session is not None:
                self._by_token.pop(session.row.token_sha256, None)

    def find(self, principal: Principal, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None or not principal.may_see(session.id, session.row.opened_by):
            raise NotFound("no such session", "Open one with POST /v1/sessions.")
        return session

    def visible(self, principal: Principal) -> list[Session]:
        return [one for one in self._sessions.values() if principal.may_see(one.id, one.row.opened_by)]

    def by_token(self, token_sha256: str) -> str | None:
        return self._by_token.get(token_sha256)


def new_session_id() -> str:
    """128 random bits: a reference cannot be guessed."""
    return f"s-{secrets.token_hex(16)}"
