"""The local kind: bubblewrap on this machine, without Docker, with or without root."""

import contextlib
import hashlib
import os
import signal
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from sandboxes import bwrap, runner
from sandboxes.cgroups import RUNNER_PROCESSES, Counters, Group, Groups, find_groups
from sandboxes.channel import Channel
from sandboxes.direct import DirectSandbox
from sandboxes.errors import SandboxError, SandboxUnavailable
from sandboxes.kind import Probe, SandboxKind, SandboxSpec
from sandboxes.launching import Bubblewrap, Launching, Start
from sandboxes.machine import nproc_is_per_namespace, remedy_for
from sandboxes.sandbox import Limits, Usage
from sandboxes.seccomp import seccomp_filter
from sandboxes.staging import Stage, memfd, stage_folder
from sandboxes.workspaces import Folders, Workspaces

_OPEN_SECONDS: Final = 10.0
_END_SECONDS: Final = 5.0
_PROBE_SESSION: Final = "_probe"
_SCRATCH_BYTES: Final = 64 << 20
_CREDENTIALS: Final = struct.Struct("3i")
_ERRORS_BYTES: Final = 4096


class LocalSandbox(DirectSandbox):
    """A bubblewrap and what it holds on the host: its control groups, its pid."""

    kind = "local"

    def __init__(self, spec: SandboxSpec, link: Channel, parts: "_Parts", *, restored: bool) -> None:
        super().__init__(spec.session_id, link, {**bwrap.BASE_ENV, **spec.env}, parts.end, restored=restored)
        self._parts = parts

    def assign(self, spec: SandboxSpec) -> None:
        """Be the session's: its programs get its environment, and its id is the one to free at the end."""
        self.add_env(spec.env)
        self._parts.session_id = spec.session_id

    async def usage(self) -> Usage:
        return self._parts.group.usage() if self._parts.group is not None else Usage()

    def counters(self) -> Counters:
        return self._parts.group.counters() if self._parts.group is not None else Counters()


class _Parts:
    """What an opening sandbox has so far, and how it is undone."""

    def __init__(self, kind: "LocalKind", session_id: str) -> None:
        self.kind = kind
        self.session_id = session_id
        self.group: Group | None = None
        self.child: Bubblewrap | None = None
        self.pidfd = -1

    def kill(self) -> None:
        """Kill PID 1 inside, and so everything: the kernel ends a PID namespace with its first process."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        elif self.child is not None:
            self.kind.launching.kill(self.child)

    async def end(self) -> None:
        """Kill, wait until bubblewrap is reaped, and free the rest."""
        self.kill()
        if self.child is not None:
            with anyio.move_on_after(_END_SECONDS) as limit:
                await self.child.exited.wait()
            if limit.cancelled_caught:
                self.kind.launching.kill(self.child)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.group is not None:
            await anyio.to_thread.run_sync(self.group.remove)
        self.kind.workspaces.release(self.session_id)


@dataclass(frozen=True, slots=True)
class _Host:
    """What does not change while the gateway runs; found at first use."""

    tools: bwrap.Tools
    groups: Groups
    seccomp: bytes
    runner: bytes
    links: Mapping[str, str | None]
    etc: tuple[Path, ...]


class LocalKind(SandboxKind[LocalSandbox]):
    """Sandboxes by bubblewrap. One launcher process is the parent of all of them; they die with it and with us.

    `state_dir` holds `workspaces/`, and belongs to one gateway at a time; with `instance` it names this gateway's
    control groups, so that what a killed gateway left is found again, and no other's is. As root each session gets a
    host uid of `uids`; `rlimits_only` leaves control groups alone. Bound to the event loop that uses it first.
    """

    name = "local"
    poolable = True

    def __init__(
        self, state_dir: Path, *, instance: str, uids: range = range(60000, 61000), rlimits_only: bool = False
    ) -> None:
        super().__init__()
        self._root = os.geteuid() == 0
        self._instance = f"{instance}-{hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:8]}"
        self._rlimits_only = rlimits_only
        self._host: _Host | None = None
        self.workspaces = Workspaces(state_dir.absolute(), uids if self._root else None)
        self.launching = Launching()
        self._orphans: list[str] = []

    def keep(self, session_ids: Collection[str]) -> None:
        self._orphans = self.workspaces.others(session_ids)

    async def survivors(self) -> Collection[str]:
        """None: they die with the gateway. The folders that it left for nobody are removed."""
        while self._orphans:
            await self.destroy(self._orphans.pop())
        return ()

    def has_workspace(self, session_id: str) -> bool:
        return self.workspaces.has(session_id)

    async def _assign(self, sandbox: LocalSandbox, spec: SandboxSpec) -> None:
        self.workspaces.rename(sandbox.session_id, spec.session_id)
        sandbox.assign(spec)

    async def _probe(self) -> Probe:
        """Open and end a throw-away sandbox."""
        try:
            await self.destroy(_PROBE_SESSION)  # what a killed gateway may have left
            sandbox = await self.open(SandboxSpec(_PROBE_SESSION))
            await sandbox.aclose()
            await self.destroy(_PROBE_SESSION)
        except SandboxError as error:
            with contextlib.suppress(SandboxError, OSError):
                await self.destroy(_PROBE_SESSION)
            return Probe(self.name, works=False, reason=error.message, remedy=error.remedy)
        return Probe(self.name, works=True, not_enforced=sandbox.not_enforced, facts=self._facts(self._find_host()))

    def _facts(self, host: _Host) -> dict[str, str]:
        tools = host.tools
        return {
            "bubblewrap": str(tools.bwrap),
            "python": str(tools.python),
            "ripgrep": str(tools.rg or "not found"),
            "control groups": ", ".join(sorted(host.groups.controllers)) or "none",
            "user": "one uid for each session" if self._root else "the gateway's own",
        }

    async def _build(self, spec: SandboxSpec, undo: contextlib.AsyncExitStack) -> LocalSandbox:
        parts = _Parts(self, spec.session_id)
        undo.push_async_callback(parts.end)
        host = self._find_host()
        bwrap.check_read_only(spec.read_only)
        folders = self.workspaces.open(spec.session_id)
        if host.groups.controllers:
            parts.group = host.groups.create(spec.session_id, spec.limits)
        view = bwrap.View(
            host.tools,
            folders.workspace,
            folders.home,
            host.links,
            host.etc,
            spec.read_only,
            tmp_bytes=min(_SCRATCH_BYTES, spec.limits.memory // 4),
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as opened:
            opened.enter_context(theirs)
            errors, errors_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, errors)
            try:
                opened.callback(os.close, errors_end)
                parts.child = await self._start(view, host, folders, parts.group, theirs, errors_end)
                theirs.close()
                await self._shake_hands(ours, spec.limits, host, parts, errors)
            except BaseException:
                ours.close()
                raise
        link = Channel(ours, parts.kill)
        sandbox = LocalSandbox(spec, link, parts, restored=folders.restored)
        sandbox.not_enforced = self._not_enforced(host)
        return sandbox

    async def _start(
        self, view: bwrap.View, host: _Host, folders: Folders, group: Group | None, channel: socket.socket, errors: int
    ) -> Bubblewrap:
        stage = Stage(stage_folder() if self._root else "")
        fds = bwrap.Descriptors(3, 4, 5, 6, dict(zip(bwrap.MADE_UP_FILES, range(7, 32), strict=False)))
        program = stage.program(view.tools.bwrap)
        arguments = bwrap.bwrap_arguments(view, fds, stage.show)
        command = [program, "--args", str(fds.arguments), "--", *bwrap.runner_command(view, fds)]
        with contextlib.ExitStack() as opened:
            data = [_arguments_data(arguments), host.seccomp, host.runner]
            files = [text.encode() for text in bwrap.MADE_UP_FILES.values()]
            numbers = [opened.enter_context(memfd(item)) for item in (*data, *files)]
            return await self.launching.start(
                Start(command, folders.uid, stage.folder, stage.sources, group.procs if group else ()),
                [errors, *numbers[:3], channel.fileno(), *numbers[3:]],
            )

    async def _shake_hands(self, ours: socket.socket, limits: Limits, host: _Host, parts: _Parts, errors: int) -> None:
        """Send the settings, wait for `ready` and take PID 1's host pid from the kernel's own word on who sent it."""
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the next read says so
            ours.send(b"\0".join([b"go", *_settings(limits, host.groups)]))
        with anyio.move_on_after(_OPEN_SECONDS):
            await anyio.wait_readable(ours)
        try:
            data, control, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            raise SandboxUnavailable("the sandbox did not start in time") from None
        except ConnectionResetError:
            data, control = b"", []
        if data != runner.READY:
            raise await self._explain(parts, errors)
        sent_by = [_CREDENTIALS.unpack(body)[0] for _, kind, body in control if kind == socket.SCM_CREDENTIALS]
        parts.pidfd = os.pidfd_open(sent_by[0])
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)

    async def _explain(self, parts: _Parts, errors: int) -> SandboxUnavailable:
        """Say why bubblewrap ended before the runner was ready, with what it wrote and what can be done."""
        if parts.child is not None:
            with anyio.move_on_after(_END_SECONDS):
                await parts.child.exited.wait()
        with contextlib.suppress(BlockingIOError):
            text = os.read(errors, _ERRORS_BYTES).decode(errors="replace").strip()
            return SandboxUnavailable(f"bubblewrap: {text or 'ended without a word'}", remedy_for(text))
        return SandboxUnavailable("bubblewrap ended without a word")

    def _find_host(self) -> _Host:
        if self._host is None:
            self._host = _Host(
                tools=bwrap.find_tools(),
                seccomp=seccomp_filter(),
                runner=Path(runner.__file__).read_bytes(),
                links=bwrap.system_links(),
                etc=bwrap.shown_etc(),
                groups=Groups({}, 1) if self._rlimits_only else find_groups(self._instance),
            )  # last: it makes folders
            self._host.groups.sweep()
        return self._host

    def _not_enforced(self, host: _Host) -> tuple[str, ...]:
        missing = host.groups.not_enforced
        if "pids" not in host.groups.controllers and not nproc_is_per_namespace():
            missing = ("processes: not limited", *missing)
        return missing

    async def _remove(self, session_id: str) -> None:
        await anyio.to_thread.run_sync(self.workspaces.destroy, session_id)

    async def _close(self) -> None:
        await self.launching.aclose()
        if self._host is not None:
            await anyio.to_thread.run_sync(self._host.groups.close)


def _arguments_data(arguments: list[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in arguments)


def _settings(limits: Limits, groups: Groups) -> Iterator[bytes]:
    yield b"core=0"
    yield b"nofile=%d" % limits.open_files
    yield b"fsize=%d" % limits.workspace_size
    if "pids" not in groups.controllers and nproc_is_per_namespace():
        yield b"nproc=%d" % (limits.processes + RUNNER_PROCESSES)
    if "memory" not in groups.controllers:
        yield b"data=%d" % limits.memory
