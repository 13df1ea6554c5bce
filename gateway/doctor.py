"""Doctor: what works on this machine, what is not enforced, and what helps. Nothing is left behind by looking."""

import errno
import fcntl
import os
import platform
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio.to_thread

from gateway.build import State, build_kind, build_store, check_configuration, kind_key, refuse_shadowed_packages
from gateway.errors import SandgateError
from gateway.settings import Profile, Settings
from gateway.transports.http.serving import listen
from gateway.workspace import collect_uri, is_remote
from sandboxes import Probe
from sandboxes import bwrap as bubblewrap
from sandboxes.errors import SandboxError
from sandboxes.machine import remedy_for
from stores import Source, Store
from stores.local import PARTIAL

Verdict = Literal["ok", "weak", "broken"]
KNOWN_KINDS: Final = ("local", "docker", "virtual")
"""Kinds that are looked at whether or not a profile names them."""
_MACHINE_KINDS: Final = ("local", "docker")
"""Kinds whose gaps are their machine's, which can be given more."""
_PROGRAM_SECONDS: Final = 10.0
_CGROUP_REMEDY: Final = (
    "run the gateway as root, or where control groups are delegated to it: "
    "systemd-run --user --scope -p Delegate=yes sandgate serve"
)
_KIND_REMEDY: Final = "of this kind's nature: use another where it matters, or narrow parallel_calls"
_CHANNEL_REMEDY: Final = "use an image with Python 3.9 or newer, on an engine of this machine"
_GAP_REMEDIES: Final = {
    "memory": "control groups; see there",
    "cpus": "control groups; see there",
    "processes": "control groups (see there), or a kernel of 5.14 or newer",
    "oom": "show the gateway's container /sys/fs/cgroup, read-only",
    "swap": "boot the engine's machine with swapaccount=1",
    "seccomp": "use an engine that is built with seccomp",
    "engine": "install Docker 29.5.1 or newer",
    "user namespaces": "set userns-remap for the engine, or run it rootless",
    "mandatory access control": "use a kernel with AppArmor or SELinux for the engine",
    "workspace_size": "give the state folder a file system of its own, or keep an eye on its free space",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One part. `weak` works and promises less than it could; `broken` does not work. `needed` is what the
    configuration cannot do without."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    needed: bool = False

    @property
    def fails(self) -> bool:
        """Whether the gateway of this configuration would not work."""
        return self.needed and self.verdict == "broken"


async def examine(settings: Settings, folder: Path, state_dir: Path) -> list[Check]:
    """Look at everything, for a gateway with these settings over that state folder."""
    running = held(state_dir)
    checks = [
        _python(),
        _platform(),
        _user(),
        *_packages(),
        _configuration(settings, folder),
        *await anyio.to_thread.run_sync(_bubblewrap),
    ]
    needed = {kind_key(profile): profile for profile in settings.profiles.values()}
    known = {kind_key(profile): profile for profile in (Profile(kind=name) for name in KNOWN_KINDS)}
    with scratch_state(state_dir) as scratch:
        for key, profile in ({**known, **needed}).items():
            checks += [*await _kind(profile, folder, scratch, needed=key in needed)]
        checks += _networks(settings)
        checks += [*await _store(settings, folder, scratch)]
    checks += [one async for one in _collections(settings, folder)]
    checks += [one async for one in _seeds(settings)]
    return [*checks, _state(state_dir, running=running), _port(settings, running=running)]


async def probe_kinds(names: Sequence[str]) -> list[Probe]:
    """Try sandbox kinds of our own for real, over a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sandgate-") as folder:
        state = _scratch(Path(folder))
        return [await probe_kind(Profile(kind=name), Path(), state) for name in names]


async def probe_kind(profile: Profile, folder: Path, state: State) -> Probe:
    """Try a profile's kind; one that cannot even be made does not work."""
    try:
        kind = build_kind(profile, folder, state)
    except SandgateError as error:
        return Probe(profile.kind, works=False, reason=error.message, remedy=error.remedy)
    try:
        return await kind.probe()
    finally:
        await kind.aclose()


def held(state_dir: Path) -> bool:
    """Whether a running gateway has the state folder; nothing is made to find out."""
    try:
        lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def scratch_state(state_dir: Path) -> Iterator[State]:
    """A state of our own, beside the real one's files: a running gateway's control groups and folders stay alone."""
    place = next((one for one in (state_dir, *state_dir.parents) if os.access(one, os.W_OK | os.X_OK)), None)
    with tempfile.TemporaryDirectory(prefix="sandgate-doctor-", dir=place) as folder:
        yield _scratch(Path(folder))


def _scratch(folder: Path) -> State:
    return State(folder, f"doctor-{secrets.token_hex(4)}", lock=-1)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()}, {sys.executable}", needed=True)


def _platform() -> Check:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return Check("platform", "broken", system, "run the gateway on Linux; clients run anywhere", needed=True)
    return Check("platform", "ok", system, needed=True)


def _user() -> Check:
    if os.geteuid() == 0:
        return Check("user", "ok", "root; each session of the kind local gets a user of its own")
    return Check("user", "ok", f"uid {os.geteuid()}; sandboxes of the kind local run as this user")


def _packages() -> Iterator[Check]:
    try:
        refuse_shadowed_packages()
    except SandgateError as error:
        yield Check("packages", "broken", error.message, error.remedy, needed=True)
    else:
        yield Check("packages", "ok", "gateway, sandboxes and stores are sandgate's own", needed=True)


def _configuration(settings: Settings, folder: Path) -> Check:
    """Hooks, tools and seeds, looked at as the start does."""
    try:
        check_configuration(settings, folder)
    except SandgateError as error:
        return Check("configuration", "broken", error.message, error.remedy, needed=True)
    return Check("configuration", "ok", f"{len(settings.hooks)} hooks, {len(settings.tools)} tools", needed=True)


def _bubblewrap() -> list[Check]:
    """The program, and whether the kernel lets it make namespaces."""
    try:
        program = bubblewrap.find_tools().bwrap
    except SandboxError as error:
        return [Check("bubblewrap", "broken", error.message, error.remedy)]
    version = _first_line([str(program), "--version"])
    tried = _first_line(
        [str(program), "--unshare-user", "--unshare-pid", "--dev-bind", "/", "/", "/bin/sh", "-c", "echo works"]
    )
    if tried == "works":
        return [Check("bubblewrap", "ok", f"{version}, {program}"), Check("user namespaces", "ok", "allowed")]
    return [
        Check("bubblewrap", "ok", f"{version}, {program}"),
        Check("user namespaces", "broken", tried, remedy_for(tried)),
    ]


def _first_line(command: list[str]) -> str:
    """The first line that a program writes, wherever it writes it."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROGRAM_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return next(iter(done.stdout.decode(errors="replace").splitlines()), f"ended with code {done.returncode}")


async def _kind(profile: Profile, folder: Path, state: State, *, needed: bool) -> Iterable[Check]:
    probe = await probe_kind(profile, folder, state)
    label = f"kind {kind_key(profile)}" if needed else f"kind {profile.kind}"
    if not probe.works:
        return [Check(label, "broken", probe.reason, probe.remedy, needed)]
    detail = (
        "a sandbox was opened and removed"
        if profile.kind != "none"
        else "functions and hooks only; there is no sandbox"
    )
    checks = [Check(label, "ok", detail, needed=needed)]
    if channel := probe.facts.get("channel"):
        checks.append(Check(label, "weak", f"commands go through {channel}", _CHANNEL_REMEDY, needed))
    if groups := probe.facts.get("control groups"):
        checks.append(_cgroups(groups))
    remedies = {
        gap: remedy_of_gap(gap) if profile.kind in _MACHINE_KINDS else _KIND_REMEDY for gap in probe.not_enforced
    }
    return [
        *checks,
        *(Check(label, "weak", f"not enforced: {gap}", remedy, needed) for gap, remedy in remedies.items()),
    ]


def _networks(settings: Settings) -> list[Check]:
    return [
        Check(
            f"profile {name}",
            "weak",
            "network open: its sandboxes reach the internet, and what listens on this machine, unfiltered",
            "network = 'none' where that is not wanted",
        )
        for name, profile in settings.profiles.items()
        if profile.network == "open"
    ]


def remedy_of_gap(gap: str) -> str:
    """What helps against a limit that is not enforced; `gap` begins with the limit's name."""
    return _GAP_REMEDIES.get(gap.partition(":")[0], "")


def _cgroups(controllers: str) -> Check:
    missing = [name for name in ("cpu", "memory", "pids") if name not in controllers.split(", ")]
    if not missing:
        return Check("control groups", "ok", controllers)
    return Check("control groups", "weak", f"not to be had: {', '.join(missing)}; rlimits instead", _CGROUP_REMEDY)


async def _store(settings: Settings, folder: Path, scratch: State) -> Iterable[Check]:
    """The configured store, tried for real; the default one at the same place under another name."""
    where = "the state folder" if settings.store.uri is None else ""
    return await _tried("store", where, lambda: build_store(settings, folder, scratch))


async def _collections(settings: Settings, folder: Path) -> AsyncIterator[Check]:
    """Where sessions' files go at their end: each place tried for real, since later nobody could mend it."""
    wanted = (collect_uri(one.to, folder) for profile in settings.profiles.values() for one in profile.collect)
    for to in dict.fromkeys(wanted):
        with _as_it_was(to):
            checks = await _tried("collect", to, partial(Store.from_uri, to))
        for check in checks:
            yield check


@contextmanager
def _as_it_was(to: str) -> Iterator[None]:
    """Folders of this machine that are made by trying are removed again, as long as they are empty."""
    place = Path(to.removeprefix("file://"))
    made = [one for one in (place / PARTIAL, place, *place.parents) if not is_remote(to) and not one.exists()]
    yield
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


async def _seeds(settings: Settings) -> AsyncIterator[Check]:
    """What lies elsewhere and sessions begin with; `configuration` has looked at what lies here."""
    wanted = (one.source for profile in settings.profiles.values() for one in profile.seed if is_remote(one.source))
    for uri in dict.fromkeys(wanted):
        try:
            with anyio.fail_after(_PROGRAM_SECONDS):
                found = await anyio.to_thread.run_sync(Source.at(uri).exists, abandon_on_cancel=True)
        except Exception as error:  # a foreign file system: whatever it raises means that it cannot be read
            reason = getattr(error, "message", str(error) or type(error).__name__)
            yield Check("seed", "broken", f"{uri}: {reason}", getattr(error, "remedy", ""), needed=True)
            continue
        verdict: Verdict = "ok" if found else "broken"
        yield Check("seed", verdict, f"{uri}: {'is there' if found else 'nothing is there'}", needed=True)


async def _tried(label: str, where: str, opened: Callable[[], Store]) -> list[Check]:
    try:
        store = opened()
        try:
            probe = await store.probe()
        finally:
            await store.aclose()
    except Exception as error:  # a foreign file system: whatever it raises means that it does not work
        remedy = getattr(error, "remedy", "")
        return [Check(label, "broken", str(getattr(error, "message", error)), remedy, needed=True)]
    if not probe.works:
        place = f"{where}: " if where else ""
        return [Check(label, "broken", f"{place}{probe.reason}", probe.remedy, needed=True)]
    return [
        Check(label, "ok", f"{where or store.kind}; written, read and deleted", needed=True),
        *(Check(label, "weak", f"not enforced: {gap}", needed=True) for gap in probe.not_enforced),
    ]


def _state(state_dir: Path, *, running: bool) -> Check:
    """The folder as it is; a missing one is made at the first start."""
    length = len(os.fsencode(state_dir))
    try:
        status = state_dir.stat()
    except FileNotFoundError:
        return _new_state(state_dir, length)
    except OSError as error:
        return _unusable(state_dir, str(error.strerror))
    if not stat.S_ISDIR(status.st_mode):
        return _unusable(state_dir, "not a folder")
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        return _unusable(state_dir, f"belongs to uid {status.st_uid}")
    mode, use = stat.S_IMODE(status.st_mode), ", in use by a running gateway" if running else ""
    if mode & 0o077:
        return Check(
            "state folder",
            "weak",
            f"{state_dir}, mode {mode:04o}{use}: others may look in",
            "the next start sets 0700",
            needed=True,
        )
    return Check("state folder", "ok", f"{state_dir}, mode {mode:04o}, {length} bytes of path{use}", needed=True)


def _new_state(state_dir: Path, length: int) -> Check:
    parent = next(one for one in state_dir.parents if one.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return _unusable(state_dir, f"cannot be made: {parent} is not writable")
    return Check("state folder", "ok", f"{state_dir}, {length} bytes of path; made at the first start", needed=True)


def _unusable(state_dir: Path, why: str) -> Check:
    return Check(
        "state folder", "broken", f"{state_dir}: {why}", "name a folder of your own with --state-dir", needed=True
    )


def _port(settings: Settings, *, running: bool) -> Check:
    server = settings.server
    where = f"{server.host}:{server.port}"
    if running and _answers(server.host, server.port):
        return Check(
            "port",
            "ok",
            f"{where} is taken; a gateway runs over this state folder, and it is probably that one",
            needed=True,
        )
    try:
        listen(server).close()
    except SandgateError as error:
        taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        detail = f"{where} is taken by another program" if taken else error.message
        return Check("port", "broken", detail, error.remedy, needed=True)
    return Check("port", "ok", f"{where} is free" if server.port else "any free one, as server.port is 0", needed=True)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
