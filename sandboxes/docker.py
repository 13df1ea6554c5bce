"""The docker kind: hardened containers on this machine's engine, whose PID 1 is the runner.

Whoever reaches the engine's socket is root on its machine; the gateway is one of them, a sandbox never.
"""

import asyncio
import contextlib
import io
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import anyio
import docker
from docker.constants import DEFAULT_UNIX_SOCKET
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env, version_lt
from requests.exceptions import RequestException, Timeout

from sandboxes import runner
from sandboxes.bwrap import check_read_only
from sandboxes.cgroups import Counters, Group, group_of, group_of_container
from sandboxes.channel import Channel
from sandboxes.container import (
    DEFAULT_IMAGE,
    INSTANCE_LABEL,
    OPTIONS_LABEL,
    PREPARES_LABEL,
    SESSION_LABEL,
    USER,
    Container,
    Storage,
    container_name,
    container_options,
    labels,
    options_digest,
    preparing_options,
    volume_names,
    workload_env,
    workspace_bytes,
)
from sandboxes.direct import DirectSandbox
from sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from sandboxes.exec import Execs, ExecSandbox
from sandboxes.hijack import Hijacked
from sandboxes.kind import Probe, SandboxKind, SandboxSpec
from sandboxes.meeting import Meeting, Peer
from sandboxes.sandbox import Limits, Sandbox, Usage

_LEAST_API: Final = "1.41"
_HARDENED_ENGINE: Final = (29, 5, 1)
_ENGINE_SECONDS: Final = 20
_BUILD_SECONDS: Final = 600
_OPEN_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.5
_PREPARE_SECONDS: Final = 15
_USAGE_SECONDS: Final = 2.0
_REMOVE_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 5.0
_LATE_SECONDS: Final = 120.0
"""A gateway that lives has collected and closed by then; this is for sandboxes without one."""
_THREADS: Final = 8
_OF_THIS_MACHINE: Final = ("unix://", "http+unix://")
_NO_PROGRAM: Final = ("executable file not found", "no such file or directory")
_SAME_PLACE: Final = (
    "run the gateway on the engine's machine; in a container, mount the state folder at the path that it has outside"
)
_NO_SHELL: Final = "use an image with sh and sleep, or with Python 3.9 or newer"
_TUNNEL: Final = "reach it by a tunnel to its socket: ssh -L /run/engine.sock:/var/run/docker.sock, and DOCKER_HOST"
_INSTALL: Final = "install and start Docker (apt-get install docker.io), or set DOCKER_HOST"
_JOIN: Final = "run the gateway as root, or as a member of the group docker (which makes it as mighty as root)"
_NO_ADDRESSES: Final = "close sessions with network = 'open', or give the engine more default-address-pools"
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine said about itself and its machine."""

    facts: Mapping[str, str]
    not_enforced: tuple[str, ...]


class Engine:
    """This machine's engine, for one gateway: all its docker kinds share one, since what an earlier life of the
    gateway left behind is removed once, at first use; only the sessions of `keep` keep theirs.

    The engine is found as every client finds it: DOCKER_HOST and its kin, else the usual socket.
    """

    def __init__(self, state_dir: Path, *, instance: str) -> None:
        self.instance = instance
        self._channels = state_dir.absolute() / "channels"
        self._limiter = anyio.CapacityLimiter(_THREADS)
        self._client: docker.APIClient | None = None
        self._connecting = threading.Lock()
        self._first = anyio.Lock()
        self._host: Host | None = None
        self._kept: frozenset[str] | None = None

    def keep(self, session_ids: Collection[str]) -> None:
        self._kept = frozenset(session_ids)

    def meeting(self, session_id: str) -> Meeting:
        return Meeting(self._channels / session_id)

    async def ask(self, question: Callable[[docker.APIClient], _T]) -> _T:
        """Put one request to the engine, in a thread of its own; SandboxUnavailable where it refuses or is silent.

        Cancelling waits for the answer, which has a deadline: what was made is then known, and can be removed.
        """
        return await anyio.to_thread.run_sync(self._ask, question, limiter=self._limiter)

    def _ask(self, question: Callable[[docker.APIClient], _T]) -> _T:
        with engine_errors():
            client = self._connected()
            _knock(_where())
            return question(client)

    def _connected(self) -> docker.APIClient:
        with self._connecting:
            if self._client is None:
                self._client = connect(_ENGINE_SECONDS)
            return self._client

    async def host(self, *, again: bool = False) -> Host:
        """What the engine says of itself, kept until asked `again`; the first time also sweeps."""
        async with self._first:
            if self._host is None:
                found = await self.ask(_look)
                await self._sweep()
                self._host = found
            elif again:
                self._host = await self.ask(_look)
            return self._host

    async def _sweep(self) -> None:
        """Remove what an earlier life of this instance left behind of no session that goes on, never another's. Where
        nobody said which do, volumes stay."""
        kept = self._kept or frozenset()
        for name, marks in await self.ask(self._containers):
            session_id = self._session_of(name)
            if PREPARES_LABEL in marks:
                await self.remove(name)
                await self.remove_volumes(marks.get(SESSION_LABEL, ""))
            elif session_id not in kept:
                await self.remove(name)
        for name in await self.ask(self._networks):
            if self._session_of(name) not in kept:
                await self.remove_network(name)
        if self._kept is not None:
            for session_id in await self.ask(self._with_volumes):
                if session_id not in kept:
                    await self.remove_volumes(session_id)
        await anyio.to_thread.run_sync(self._sweep_channels, kept)

    def _sweep_channels(self, kept: frozenset[str]) -> None:
        for path in self._channels.iterdir() if self._channels.exists() else ():
            if path.name.partition(".")[0] not in kept:
                Meeting(path.with_suffix("")).remove()

    def _session_of(self, name: str) -> str:
        return name.removeprefix(container_name(self.instance, ""))

    def _containers(self, api: docker.APIClient) -> list[tuple[str, Mapping[str, str]]]:
        """The names and labels of all containers of this instance."""
        found = api.containers(all=True, filters=self._mine)
        return [(one["Names"][0].removeprefix("/"), one["Labels"]) for one in found]

    def _networks(self, api: docker.APIClient) -> list[str]:
        return [one["Name"] for one in api.networks(filters=self._mine)]

    def _with_volumes(self, api: docker.APIClient) -> set[str]:
        return {one["Labels"].get(SESSION_LABEL, "") for one in api.volumes(filters=self._mine)["Volumes"] or ()}

    @property
    def _mine(self) -> dict[str, str]:
        return {"label": f"{INSTANCE_LABEL}={self.instance}"}

    async def survivors(self) -> frozenset[str]:
        """The kept sessions whose container runs, and whose runner was told to stay."""

        def question(api: docker.APIClient) -> list[str]:
            return [one["Names"][0].removeprefix("/") for one in api.containers(filters=self._mine)]

        await self.host()
        running = {self._session_of(name) for name in await self.ask(question)} & (self._kept or frozenset())
        return frozenset(one for one in running if self.meeting(one).secret)

    async def find(self, container: str) -> Mapping[str, Any] | None:
        """What the engine knows of a container, if there is one."""

        def question(api: docker.APIClient) -> Mapping[str, Any] | None:
            try:
                return cast(Mapping[str, Any], api.inspect_container(container))
            except NotFound:
                return None

        return await self.ask(question)

    async def left(self) -> list[str]:
        """The names of all containers, volumes and networks of this instance."""

        def question(api: docker.APIClient) -> list[str]:
            containers = [f"container {one['Names'][0]}" for one in api.containers(all=True, filters=self._mine)]
            volumes = [f"volume {one['Name']}" for one in api.volumes(filters=self._mine)["Volumes"] or ()]
            return [*containers, *volumes, *(f"network {name}" for name in self._networks(api))]

        return await self.ask(question)

    async def create(self, options: dict[str, Any], name: str) -> None:
        """Make a container; one of that name that is still there was left by a sandbox that died."""

        def question(api: docker.APIClient) -> None:
            api.create_container_from_config(options, name)  # type: ignore[no-untyped-call]

        try:
            await self.ask(question)
        except SandboxUnavailable as error:
            if not (isinstance(error.__cause__, APIError) and error.__cause__.status_code == 409):
                raise
            await self.remove(name)
            await self.ask(question)

    async def remove(self, container: str) -> None:
        """Kill and remove a container, with the volumes that its image made; nothing there is fine."""

        def question(api: docker.APIClient) -> None:
            deadline = time.monotonic() + _REMOVE_SECONDS
            while True:
                try:
                    return api.remove_container(container, v=True, force=True)
                except NotFound:
                    return None
                except APIError as error:
                    if error.status_code != 409 or time.monotonic() > deadline:  # 409: its removal is on its way
                        raise
                time.sleep(0.05)

        await self.ask(question)

    async def remove_volumes(self, session_id: str) -> None:
        def question(api: docker.APIClient) -> None:
            for name in volume_names(self.instance, session_id):
                with contextlib.suppress(NotFound):
                    api.remove_volume(name)

        await self.ask(question)

    async def usage(self, container: str) -> Usage:
        """What a container uses; nothing where the engine does not tell in time."""

        def question() -> Mapping[str, Any]:
            return cast(Mapping[str, Any], self._ask(lambda api: api.stats(container, stream=False, one_shot=True)))

        with anyio.move_on_after(_USAGE_SECONDS), contextlib.suppress(SandboxUnavailable):
            told = await anyio.to_thread.run_sync(question, limiter=self._limiter, abandon_on_cancel=True)
            memory, cpu = told["memory_stats"].get("usage"), told["cpu_stats"]["cpu_usage"].get("total_usage")
            return Usage(memory, cpu and cpu / 1e9)
        return Usage()

    async def create_network(self, name: str, marks: dict[str, str]) -> None:
        """Make a bridge; one of that name was left by a sandbox that died, and will do."""

        def question(api: docker.APIClient) -> None:
            api.create_network(name, driver="bridge", labels=marks, check_duplicate=True)

        try:
            await self.ask(question)
        except SandboxUnavailable as error:
            if isinstance(error.__cause__, APIError) and error.__cause__.status_code == 409:
                return
            if "address pool" in error.message:
                raise SandboxUnavailable(error.message, _NO_ADDRESSES) from error
            raise

    async def remove_network(self, name: str) -> None:
        """Remove a bridge that no container is on any more; nothing there is fine."""

        def question(api: docker.APIClient) -> None:
            with contextlib.suppress(NotFound):
                api.remove_network(name)

        await self.ask(question)

    @property
    def is_remote(self) -> bool:
        return not _where().startswith(_OF_THIS_MACHINE)

    async def create_exec(
        self, container: str, argv: Sequence[str], env: Mapping[str, str], call_id: str, *, stdin: bool
    ) -> Hijacked:
        """What starts a program in a container, as the sandbox's user, once it is attached."""

        def question(api: docker.APIClient) -> Hijacked:
            made = api.exec_create(container, list(argv), stdin=stdin, user=f"{USER}:{USER}", environment=dict(env))
            return Hijacked(str(made["Id"]), call_id, api.api_version)

        return await self.ask(question)

    async def attach(self, hijacked: Hijacked) -> None:
        """Start the program, connected to its streams."""
        try:
            with anyio.fail_after(_ENGINE_SECONDS):
                await _attach(hijacked)
        except (OSError, TimeoutError) as error:
            hijacked.close()
            raise SandboxUnavailable(f"no Docker engine answers: {error}", _INSTALL) from error

    async def aclose(self) -> None:
        """Close the connections; the next request makes new ones."""
        client, self._client = self._client, None
        if client is not None:
            await anyio.to_thread.run_sync(client.close)


def connect(seconds: int) -> docker.APIClient:
    """A client whose every wait has this limit. SandboxUnavailable where no engine listens, or one too old."""
    _knock(_where())
    client = docker.APIClient(**kwargs_from_env(), version="auto", timeout=seconds)
    if version_lt(client.api_version, _LEAST_API):
        client.close()
        raise SandboxUnavailable(f"the Docker engine speaks API {client.api_version}", "install Docker 20.10 or newer")
    return client


def _where() -> str:
    """The engine's address, as the SDK finds it."""
    return str(kwargs_from_env().get("base_url", DEFAULT_UNIX_SOCKET))


async def _attach(hijacked: Hijacked) -> None:
    """Connect an exec to the engine; the SDK's own connection would block a thread for as long as the program runs."""
    loop = asyncio.get_running_loop()
    scheme, _, place = _where().partition("://")
    if f"{scheme}://" in _OF_THIS_MACHINE:
        await loop.create_unix_connection(lambda: hijacked, place)
        return
    if kwargs_from_env().get("tls"):
        raise SandboxUnavailable("over TLS the input of a program in a remote engine cannot be ended", _TUNNEL)
    host, _, port = place.rpartition(":")
    await loop.create_connection(lambda: hijacked, host, int(port))


def _knock(url: str) -> None:
    """See whether anybody listens on a socket of this machine: the SDK's own failure has no errno, and leaks."""
    if not url.startswith(_OF_THIS_MACHINE):
        return
    path = url.partition("://")[2]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ENGINE_SECONDS)
        try:
            sock.connect(path)
        except PermissionError as error:
            raise SandboxUnavailable(f"the Docker engine is not for this user: {path}", _JOIN) from error
        except OSError as error:
            raise SandboxUnavailable(f"no Docker engine at {path}: {error.strerror or error}", _INSTALL) from error


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """What the SDK and its HTTP client raise, as SandboxUnavailable."""
    try:
        yield
    except APIError as error:
        raise SandboxUnavailable(f"the Docker engine refused: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        if isinstance(error, Timeout) or isinstance(error.__cause__, Timeout):
            raise SandboxUnavailable(
                "the Docker engine does not answer", "see its log; restart it if it hangs"
            ) from error
        raise SandboxUnavailable(f"no Docker engine answers: {error}", _INSTALL) from error


def _look(api: docker.APIClient) -> Host:
    about = api.info()
    if about.get("OSType") != "linux":
        raise SandboxUnavailable(f"the engine's containers are {about.get('OSType')}", "use an engine for Linux")
    marks = [mark.partition(",")[0] for mark in about.get("SecurityOptions") or ()]
    facts = {
        "engine": str(about.get("ServerVersion")),
        "api": api.api_version,
        "cgroup version": str(about.get("CgroupVersion", "1")),
        "runtime": str(about.get("DefaultRuntime")),
        "storage": str(about.get("Driver")),
        "security": ", ".join(mark.removeprefix("name=") for mark in marks) or "none",
    }
    return Host(facts, tuple(_gaps(about, marks)))


def _gaps(about: Mapping[str, Any], marks: list[str]) -> Iterator[str]:
    """What this engine does not give, the name of the limit or defence first."""
    for key, gap in (
        ("MemoryLimit", "memory: not limited"),
        ("SwapLimit", "swap: not limited"),
        ("CpuCfsQuota", "cpus: not limited"),
        ("PidsLimit", "processes: not limited"),
    ):
        if not about.get(key, True):
            yield gap
    if "name=seccomp" not in marks:
        yield "seccomp: the engine has none"
    version = str(about.get("ServerVersion"))
    if engine_version(version) < _HARDENED_ENGINE:
        yield f"engine: {version} has known holes (mended in 29.5.1)"
    if not {"name=userns", "name=rootless"} & set(marks):
        yield "user namespaces: the engine does not remap users"
    if not {"name=apparmor", "name=selinux"} & set(marks):
        yield "mandatory access control: neither AppArmor nor SELinux"


def engine_version(text: str) -> tuple[int, ...]:
    """The first three numbers of `20.10.24+dfsg1`; what is no number counts as 0."""
    numbers = text.partition("+")[0].partition("-")[0].split(".")[:3]
    return tuple(int(number) if number.isdigit() else 0 for number in numbers)


class DockerSandbox(DirectSandbox):
    """A running container; `pid` is its runner's on this machine, 0 where it cannot be seen."""

    kind = "docker"

    def __init__(
        self, spec: SandboxSpec, link: Channel, parts: "_Parts", env: Mapping[str, str], *, restored: bool
    ) -> None:
        super().__init__(spec.session_id, link, {**env, **spec.env}, parts.end, restored=restored)
        self._parts = parts

    def stay(self, until: float) -> None:
        if self.alive:
            self.stays, meeting = True, self._parts.meeting
            seconds = max(until - time.time(), 0) + _LATE_SECONDS
            self._link.say(runner.STAY, meeting.secret or meeting.make_secret(), b"%.0f" % seconds)

    def assign(self, spec: SandboxSpec, channel: Path) -> None:
        """Be the session's, whose channel folder lies there."""
        self._parts.meeting.move(channel)
        self._parts.session_id = spec.session_id
        self.add_env(spec.env)

    async def settle(self) -> None:
        await self._parts.rename()

    @property
    def pid(self) -> int:
        return self._parts.pid

    def counters(self) -> Counters:
        return self._parts.group.counters()

    async def usage(self) -> Usage:
        """By its control groups where they are seen from here, else by the engine, which takes longer."""
        seen = self._parts.group.usage()
        return seen if seen != Usage() else await self._parts.kind.engine.usage(self._parts.name)

    async def leave(self) -> None:
        if self._closing or not self.stays or self._link.told:
            await self.aclose()
            return
        self._closing = True
        self._link.leave()
        with contextlib.suppress(SandboxUnavailable):
            await self._parts.rename()
        self._parts.let_go()
        self._closed.set()


class _Parts:
    """What an opening sandbox has so far, and how it is undone."""

    def __init__(self, kind: "DockerKind", session_id: str, meeting: Meeting) -> None:
        self.kind = kind
        self.session_id = session_id
        self.meeting = meeting
        self.name = container_name(kind.engine.instance, session_id)
        self.naming = anyio.Lock()
        self.owned = False
        self.pid = 0
        self.pidfd = -1
        self.group = Group({}, 1)

    def met(self, pid: int) -> None:
        """Take the first process, by its pid on this machine; 0 is one that cannot be seen."""
        self.pid = pid
        if pid:
            self.pidfd = os.pidfd_open(pid)
            self.group = group_of(pid)

    def kill(self) -> None:
        """Kill PID 1, and so everything. Where that is not ours to do, it ends itself as its channel closes."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kill, remove the container, free the rest. Its removal is tried again when the session ends."""
        self.kill()
        try:
            if self.owned:
                async with self.naming:
                    await self.kind.remove_container(self.name)
        except SandboxUnavailable as error:
            logger.warning("the container of session %s is not removed: %s", self.session_id, error.message)
        finally:
            if self.owned:
                self.meeting.remove()
            self.let_go()

    async def rename(self) -> None:
        """Give the container the name of its session, if it has another."""
        async with self.naming:
            name = container_name(self.kind.engine.instance, self.session_id)
            if self.name != name:
                await self.kind.engine.ask(lambda api: api.rename(self.name, name))
                self.name = name

    def let_go(self) -> None:
        """Free what this process holds of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self.group.close()
        self.meeting.close()


class NoChannel(SandboxUnavailable):
    """A runner cannot be met here; the message says why."""


class DockerExecs(Execs):
    """A running container, as it is reached by the engine's exec: by its name, which tells the socket proxy that it is
    one of ours."""

    def __init__(self, engine: Engine, parts: _Parts) -> None:
        self.parts = parts
        self._engine = engine

    async def start(self, argv: Sequence[str], env: Mapping[str, str], call_id: str, *, stdin: bool) -> Hijacked:
        name = self.parts.name
        try:
            hijacked = await self._engine.create_exec(name, argv, env, call_id, stdin=stdin)
        except SandboxUnavailable:
            if (now := await self._name()) == name:
                raise
            hijacked = await self._engine.create_exec(now, argv, env, call_id, stdin=stdin)
        await self._engine.attach(hijacked)
        return hijacked

    async def _name(self) -> str:
        """Its name, once it has its session's where that is on the way."""
        async with self.parts.naming:
            return self.parts.name

    async def runs(self) -> bool:
        found = await self._engine.find(await self._name())
        return found is not None and bool(found["State"]["Running"])

    def kill(self) -> None:
        self.parts.kill()

    def counters(self) -> Counters:
        return self.parts.group.counters()


class DockerExecSandbox(ExecSandbox):
    """A container without a runner."""

    kind = "docker"

    def __init__(
        self, spec: SandboxSpec, execs: DockerExecs, env: Mapping[str, str], *, restored: bool, files_lost: bool
    ) -> None:
        super().__init__(
            spec.session_id, execs, {**env, **spec.env}, execs.parts.end, restored=restored, files_lost=files_lost
        )
        self._parts = execs.parts

    @property
    def pid(self) -> int:
        return self._parts.pid

    def assign(self, spec: SandboxSpec, channel: Path) -> None:
        """Be the session's, which has no use for a channel folder."""
        self._parts.session_id = spec.session_id
        self._env = {**self._env, **spec.env}

    async def settle(self) -> None:
        await self._parts.rename()

    async def usage(self) -> Usage:
        seen = self._parts.group.usage()
        return seen if seen != Usage() else await self._parts.kind.engine.usage(self._parts.name)


AnySandbox = DockerSandbox | DockerExecSandbox


class DockerKind(SandboxKind[AnySandbox]):
    """Opens sandboxes of one image. `storage` says where the workspace and HOME lie: in `memory` a tmpfs of true
    size that is lost with the container, on `disk` named volumes that stay and whose size is not enforced. A sandbox
    with an open network has a bridge of its own, which is removed with it."""

    name = "docker"
    has_network = True

    def __init__(self, engine: Engine, *, image: str = DEFAULT_IMAGE, storage: Storage = "memory") -> None:
        super().__init__()
        self.engine = engine
        self.poolable = storage == "memory"
        self._image = image
        self._storage: Storage = storage
        self._tried = False
        self._counted = True
        self._without_channel: dict[str, str] = {}

    async def _probe(self) -> Probe:
        """Open and remove a throw-away sandbox until that has worked once; later look only for engine and image."""
        try:
            host = await self.engine.host(again=True)
            await self._find_image()
            if not self._tried:
                await self._try()
        except SandboxError as error:
            return Probe(self.name, works=False, reason=error.message, remedy=error.remedy)
        facts = {**host.facts, "image": self._image, "workspace": self._storage}
        if why := " ".join(self._without_channel.values()):
            facts["channel"] = f"the engine's exec, slower: {why}"
        return Probe(self.name, works=True, not_enforced=self._not_enforced(host), facts=facts)

    async def _try(self) -> None:
        session_id = f"probe-{secrets.token_hex(8)}"  # another kind may try at the same time over the same engine
        try:
            sandbox = await self.open(SandboxSpec(session_id))
            await sandbox.aclose()
        finally:
            await self.destroy(session_id)
        self._tried = True

    def _not_enforced(self, host: Host) -> tuple[str, ...]:
        gaps = [*host.not_enforced]
        if self._storage == "disk":
            gaps.append("workspace_size: per file only")
        if not self._counted:
            gaps.append("oom: a kill for memory is told as a signal; control groups are not seen from here")
        return tuple(gaps)

    async def _build(self, spec: SandboxSpec, undo: contextlib.AsyncExitStack) -> AnySandbox:
        parts = _Parts(self, spec.session_id, self.engine.meeting(spec.session_id))
        undo.push_async_callback(parts.end)
        check_read_only(spec.read_only)
        host = await self.engine.host()
        image = await self._find_image()
        env = workload_env(image["Config"].get("Env") or ())
        sandbox: AnySandbox
        try:
            sandbox = await self._with_runner(spec, image["Id"], parts, env)
        except NoChannel as error:
            self._without_channel = {image["Id"]: error.message}
            await self.remove_container(parts.name)
            parts.meeting.remove()
            sandbox = await self._without_runner(spec, image["Id"], parts, env)
            sandbox.channel_reason = error.message
        self._counted = sandbox.counters().oom >= 0
        sandbox.not_enforced = self._not_enforced(host)
        return sandbox

    async def _without_runner(
        self, spec: SandboxSpec, image: str, parts: _Parts, env: Mapping[str, str]
    ) -> DockerExecSandbox:
        one = self._container(spec, image, None)
        parts.owned = True
        restored = await self._make(one)
        found = await self.engine.find(one.name)
        if found is None:
            raise SandboxUnavailable("the sandbox's container is gone")
        pid = found["State"]["Pid"]
        if not self.engine.is_remote and await anyio.to_thread.run_sync(_is_in, pid, found["Id"]):
            parts.met(pid)
        else:
            parts.group = group_of_container(found["Id"])
        execs = DockerExecs(self.engine, parts)
        sandbox = DockerExecSandbox(spec, execs, env, restored=restored, files_lost=self._storage == "memory")
        try:
            await sandbox.kill_call("none")  # a first request
        except SandboxError as error:
            raise SandboxUnavailable(
                f"the image {self._image} has no python3, and no shell that serves: {error.message}", _NO_SHELL
            ) from error
        return sandbox

    def _container(self, spec: SandboxSpec, image: str, channel: Path | None) -> Container:
        return Container(
            self.engine.instance,
            spec.session_id,
            image,
            channel,
            self._storage,
            spec.limits,
            spec.read_only,
            spec.network,
        )

    async def _with_runner(self, spec: SandboxSpec, image: str, parts: _Parts, env: Mapping[str, str]) -> DockerSandbox:
        if image in self._without_channel:
            raise NoChannel(self._without_channel[image])
        one = self._container(spec, image, parts.meeting.folder)
        peer = await self._left_running(one, parts.meeting)
        parts.owned = True
        taken_up = restored = peer is not None
        if peer is None:
            parts.meeting.open()
            restored = await self._make(one)
            peer = await self._meet(one.name, parts.meeting)
        try:
            parts.met(peer.pid)
            if not peer.pid:
                parts.group = await self._group(one)
            if not taken_up:
                await _shake_hands(peer, spec.limits, workspace_bytes(spec.limits, self._storage))
        except BaseException:
            peer.sock.close()
            raise
        link = Channel(peer.sock, parts.kill, files_lost=self._storage == "memory")
        sandbox = DockerSandbox(spec, link, parts, env, restored=restored)
        sandbox.taken_up = taken_up
        return sandbox

    async def _group(self, one: Container) -> Group:
        found = await self.engine.find(container_name(one.instance, one.session_id))
        return group_of_container(found["Id"]) if found else Group({}, 1)

    async def _left_running(self, one: Container, meeting: Meeting) -> Peer | None:
        """The runner of a container that an earlier life of the gateway left to this session, if it is as it would be
        made today; SandboxLost where it is not, and its files are lost."""
        if not meeting.secret:
            return None
        found = await self.engine.find(one.name)
        if found is not None and found["State"]["Running"] and _label(found, OPTIONS_LABEL) == options_digest(one):
            peer = await meeting.accept_again(found["State"]["Pid"], _AGAIN_SECONDS)
            if peer is not None:
                return peer
        if one.storage == "disk":
            return None
        await self.engine.remove(one.name)
        meeting.remove()
        raise SandboxLost("the sandbox has ended while there was no gateway", files_lost=True)

    async def _make(self, one: Container) -> bool:
        """Start a new container; whether its workspace was there before."""
        restored = self._storage == "disk" and await self._prepare(one)
        if one.network == "open":
            await self.engine.create_network(one.name, labels(one.instance, one.session_id))
        await self._create(one)
        await self._start(one, one.name)
        return restored

    async def _find_image(self) -> Mapping[str, Any]:
        def question(api: docker.APIClient) -> Mapping[str, Any]:
            return cast(Mapping[str, Any], api.inspect_image(self._image))  # type: ignore[no-untyped-call]

        try:
            return await self.engine.ask(question)
        except SandboxUnavailable as error:
            if not isinstance(error.__cause__, ImageNotFound):
                raise
            ours = self._image.partition(":")[0] == DEFAULT_IMAGE
            remedy = "sandgate images build" if ours else f"docker pull {self._image}"
            raise SandboxUnavailable(f"the image {self._image} is missing", f"make it: {remedy}") from error

    async def _prepare(self, one: Container) -> bool:
        """Make the session's volumes where they are missing, and hand them to its user; whether they were there."""
        names = volume_names(one.instance, one.session_id)
        if await self.engine.ask(lambda api: _has_volume(api, names[0])):
            return True
        name = f"{one.name}-prepare"
        await self.engine.create(preparing_options(one), name)
        try:
            await self._start(one, name)
            ended = await self.engine.ask(lambda api: api.wait(name, timeout=_PREPARE_SECONDS))
            if ended["StatusCode"] != 0:
                raise SandboxUnavailable(f"the volumes of session {one.session_id} could not be handed to its user")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.engine.remove(name)
                await self.engine.remove_volumes(one.session_id)
            raise
        await self.engine.remove(name)
        return False

    async def _create(self, one: Container) -> None:
        try:
            await self.engine.create(container_options(one), one.name)
        except SandboxUnavailable as error:
            if one.channel is None or f"bind source path does not exist: {one.channel}" not in error.message:
                raise
            why = f"the engine does not see the state folder at {one.channel.parent.parent}"
            if self.engine.is_remote:
                raise NoChannel(why) from error
            raise SandboxUnavailable(why, _SAME_PLACE) from error

    async def _start(self, one: Container, name: str) -> None:
        try:
            await self.engine.ask(lambda api: api.start(name))
        except SandboxUnavailable as error:
            if not any(words in error.message for words in _NO_PROGRAM):
                raise
            if one.channel is None:
                raise SandboxUnavailable(f"the image {self._image} has no python3 and no sh", _NO_SHELL) from error
            raise NoChannel(f"the image {self._image} has no python3") from error

    async def _meet(self, name: str, meeting: Meeting) -> Peer:
        """Wait for the runner, and see that it is the container's own first process."""
        deadline = time.monotonic() + _OPEN_SECONDS
        while True:
            state = (await self.engine.ask(lambda api: api.inspect_container(name)))["State"]  # while it starts
            peer = await meeting.accept(_LOOK_SECONDS)
            if peer is not None and peer.pid in (0, state["Pid"]):
                return peer
            if peer is not None:
                peer.sock.close()
                raise SandboxUnavailable("another process than the sandbox's own answered")
            if not state["Running"]:
                code = state["ExitCode"]
                raise NoChannel(
                    f"the runner ended with code {code} before it connected; the image {self._image} needs Python 3.9"
                )
            if time.monotonic() > deadline:
                raise NoChannel(f"the runner could not connect to {meeting.folder} within {_OPEN_SECONDS:g} s")

    def has_workspace(self, session_id: str) -> bool:
        return self.engine.meeting(session_id).exists

    async def _assign(self, sandbox: AnySandbox, spec: SandboxSpec) -> None:
        sandbox.assign(spec, self.engine.meeting(spec.session_id).folder)

    async def settle(self, sandbox: Sandbox) -> None:
        """Name the container after its session; a gateway that is killed before loses it. An engine writes that to its
        disk, which takes 3 ms, and ten times that beside others who write."""
        if isinstance(sandbox, AnySandbox) and sandbox.alive:
            await sandbox.settle()

    def keep(self, session_ids: Collection[str]) -> None:
        self.engine.keep(session_ids)

    async def survivors(self) -> Collection[str]:
        return await self.engine.survivors()

    async def remove_container(self, name: str) -> None:
        """Remove a container, and the bridge of its name."""
        await self.engine.remove(name)
        await self.engine.remove_network(name)

    async def _remove(self, session_id: str) -> None:
        """Remove the session's container, volumes and channel folder."""
        await self.remove_container(container_name(self.engine.instance, session_id))
        await self.engine.remove_volumes(session_id)
        self.engine.meeting(session_id).remove()

    async def _close(self) -> None:
        await self.engine.aclose()


def _label(container: Mapping[str, Any], name: str) -> str | None:
    return cast(str | None, container["Config"]["Labels"].get(name))


def _is_in(pid: int, container: str) -> bool:
    """Whether a process of this machine is the container's: a gateway that is in one itself sees other pids."""
    try:
        return container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _has_volume(api: docker.APIClient, name: str) -> bool:
    try:
        api.inspect_volume(name)
    except NotFound:
        return False
    return True


async def _shake_hands(peer: Peer, limits: Limits, largest_file: int) -> None:
    """Send the settings, and wait for `ready`."""
    settings = (b"go", b"core=0", b"nofile=%d" % limits.open_files, b"fsize=%d" % largest_file)
    peer.sock.send(b"\0".join(settings))
    with anyio.move_on_after(_OPEN_SECONDS):
        await anyio.wait_readable(peer.sock)
    try:
        said = peer.sock.recv(64)
    except BlockingIOError:
        raise SandboxUnavailable("the sandbox did not start in time") from None
    if said != runner.READY:
        raise SandboxUnavailable("the runner ended before it was ready")


def build_image(context: bytes, dockerfile: str, tag: str) -> Iterator[str]:
    """Build an image out of a tar that holds its Dockerfile; yields what the engine says, line by line. Blocks.

    Raises SandboxUnavailable where a step fails.
    """
    with engine_errors(), contextlib.closing(connect(_BUILD_SECONDS)) as api:
        words = api.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            dockerfile=dockerfile,
            tag=tag,
            decode=True,
            rm=True,
            forcerm=True,
        )
        for word in words:
            if "error" in word:
                raise SandboxUnavailable(f"the image {tag} cannot be built: {word['error'].strip()}")
            yield from str(word.get("stream", "")).splitlines()
