"""Limits by control groups, version 1 or 2, where this process may make them; what it may not is named.

All groups of one gateway lie in one parent group, `sandgate-<instance>`, below the gateway's own group, so that what
limits the gateway limits them too. It is swept at start and end, and no other instance's is touched.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxes.errors import SandboxUnavailable
from sandboxes.sandbox import Limits, Usage

CONTROLLERS: Final = ("memory", "pids", "cpu")
ACCOUNTING: Final = "cpuacct"
"""Limits nothing; of version 1 only, which counts processor time apart."""
RUNNER_PROCESSES: Final = 8
"""PID 1, bubblewrap and idle slots: what a sandbox needs besides the workload."""
_LEAF = "sandgate-self"
_PERIOD_US = 100_000
_REMOVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Counters:
    """How often the kernel killed for memory and refused a fork; -1 where it does not say."""

    oom: int = -1
    pids: int = -1


class Group:
    """The control groups of one sandbox: to be joined, read and removed."""

    def __init__(self, folders: dict[str, Path], version: int) -> None:
        self._folders = folders
        self._version = version
        self._open: dict[str, int] = {}

    @property
    def procs(self) -> tuple[Path, ...]:
        """The files that a process writes `0` to."""
        return tuple(dict.fromkeys(folder / "cgroup.procs" for folder in self._folders.values()))

    def counters(self) -> Counters:
        memory = "memory.events" if self._version == 2 else "memory.oom_control"
        return Counters(self._count("memory", memory, b"oom_kill"), self._count("pids", "pids.events", b"max"))

    def usage(self) -> Usage:
        """Memory now and processor time so far, as the kernel accounts them."""
        if self._version == 2:
            microseconds = self._number("cpu", "cpu.stat", after="usage_usec")
            return Usage(self._number("memory", "memory.current"), microseconds and microseconds / 1e6)
        nanoseconds = self._number("cpuacct", "cpuacct.usage")
        return Usage(self._number("memory", "memory.usage_in_bytes"), nanoseconds and nanoseconds / 1e9)

    def _number(self, controller: str, name: str, after: str = "") -> int | None:
        """The first number in a file, or the one behind a word."""
        try:
            words = (self._folders[controller] / name).read_text().split()
            return int(words[words.index(after) + 1 if after else 0])
        except (KeyError, OSError, ValueError):
            return None

    def _count(self, controller: str, name: str, word: bytes) -> int:
        if controller not in self._folders:
            return -1
        try:
            if controller not in self._open:
                self._open[controller] = os.open(self._folders[controller] / name, os.O_RDONLY | os.O_CLOEXEC)
            lines = os.pread(self._open[controller], 4096, 0).splitlines()
        except OSError:
            return -1
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [word]), -1)

    def close(self) -> None:
        """Read no more."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def remove(self) -> None:
        """Remove the groups; the kernel may need a moment after the last process is gone."""
        self.close()
        for folder in set(self._folders.values()):
            _remove(folder)


class Groups:
    """Makes groups below the parent of one instance; `controllers` are those that can be had here."""

    def __init__(self, parents: dict[str, Path], version: int) -> None:
        self._parents = parents
        self._version = version

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self._parents) - {ACCOUNTING}

    @property
    def not_enforced(self) -> tuple[str, ...]:
        missing = []
        if "memory" not in self._parents:
            missing.append("memory: per process only")
        if "cpu" not in self._parents:
            missing.append("cpus: not limited")
        return (*missing, "workspace_size: per file only")

    def create(self, name: str, limits: Limits) -> Group:
        """Make and limit the groups of one sandbox; SandboxUnavailable where the kernel refuses a limit."""
        folders = {controller: parent / name for controller, parent in self._parents.items()}
        group = Group(folders, self._version)
        try:
            for folder in set(folders.values()):
                folder.mkdir(exist_ok=True)
            for path, value in self._settings(folders, limits):
                path.write_text(value)
        except OSError as error:
            group.remove()
            raise SandboxUnavailable(f"control group {name} cannot be limited: {error}") from error
        return group

    def _settings(self, folders: dict[str, Path], limits: Limits) -> Iterator[tuple[Path, str]]:
        quota = max(1000, round(limits.cpus * _PERIOD_US))
        pids = str(limits.processes + RUNNER_PROCESSES)
        for controller, folder in folders.items():
            if controller == "pids":
                yield folder / "pids.max", pids
            elif controller == "memory":
                yield from _memory_settings(folder, limits.memory, self._version)
            elif controller == ACCOUNTING:
                continue
            elif self._version == 2:
                yield folder / "cpu.max", f"{quota} {_PERIOD_US}"
            else:
                yield folder / "cpu.cfs_period_us", str(_PERIOD_US)
                yield folder / "cpu.cfs_quota_us", str(quota)

    def sweep(self) -> None:
        """End what an earlier life of this instance left behind, and remove the parent."""
        for parent in set(self._parents.values()):
            for folder in (path for path in parent.iterdir() if path.is_dir()) if parent.exists() else ():
                _kill(folder)
                _remove(folder)

    def close(self) -> None:
        self.sweep()
        for parent in set(self._parents.values()):
            _remove(parent)


def _memory_settings(folder: Path, limit: int, version: int) -> Iterator[tuple[Path, str]]:
    if version == 2:
        yield folder / "memory.max", str(limit)
        if (folder / "memory.swap.max").exists():
            yield folder / "memory.swap.max", "0"
        yield folder / "memory.oom.group", "0"
        return
    yield folder / "memory.limit_in_bytes", str(limit)
    if (folder / "memory.memsw.limit_in_bytes").exists():
        yield folder / "memory.memsw.limit_in_bytes", str(limit)


def _kill(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        else:
            return


def find_groups(instance: str, proc: Path = Path("/proc/self")) -> Groups:
    """Find the controllers that this process may use and make the instance's parent in each; none is an answer too."""
    mounts = _mounts(proc)
    own = _own_groups(proc)
    parents: dict[str, Path] = {}
    for controller in (*CONTROLLERS, ACCOUNTING):
        base = _below(mounts.get(controller), own.get(controller))
        if base is not None and _make_parent(base / f"sandgate-{instance}"):
            parents[controller] = base / f"sandgate-{instance}"
    if parents:
        return Groups(parents, 1)
    base = _below(mounts.get(""), own.get(""))
    if base is not None and base.name == _LEAF:
        base = base.parent
    if base is not None and _delegated(base) and _make_parent(base / f"sandgate-{instance}"):
        parent = base / f"sandgate-{instance}"
        enabled = _enable(parent)
        return Groups(dict.fromkeys(enabled, parent), 2)
    return Groups({}, 1)


def group_of(pid: int, proc: Path = Path("/proc")) -> Group:
    """The groups that a process is in, to be read; empty where they cannot be seen from here."""
    try:
        mounts, own = _mounts(proc / "self"), _own_groups(proc / str(pid))
    except OSError:
        return Group({}, 1)
    version, keys = _keys(mounts)
    found = {name: _below(mounts.get(key), own.get(key)) for name, key in keys.items()}
    return Group({name: folder for name, folder in found.items() if folder is not None}, version)


def group_of_container(container_id: str, proc: Path = Path("/proc")) -> Group:
    """The groups that Docker puts a container in, for who does not see its processes; empty where they are not seen."""
    mounts = _mounts(proc / "self")
    version, keys = _keys(mounts)
    names = (f"docker/{container_id}", f"system.slice/docker-{container_id}.scope")
    places = {name: mounts[key][0] for name, key in keys.items() if key in mounts}
    found = {name: [place / one for one in names if (place / one).is_dir()] for name, place in places.items()}
    return Group({name: folders[0] for name, folders in found.items() if folders}, version)


def _keys(mounts: Mapping[str, object]) -> tuple[int, dict[str, str]]:
    """The version that limits here, and by which key its mounts are known for each controller."""
    version = 1 if "memory" in mounts else 2
    return version, {name: name if version == 1 else "" for name in (*CONTROLLERS, ACCOUNTING)}


def _mounts(proc: Path) -> dict[str, tuple[Path, str]]:
    """Map a controller (empty for version 2) to where it is mounted and to the group that is the mount's root."""
    found: dict[str, tuple[Path, str]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            found.setdefault(name, (Path(place), root))
    return found


def _own_groups(proc: Path) -> dict[str, str]:
    lines = (line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines())
    return {name: path for _, names, path in lines for name in names.split(",")}


def _below(mount: tuple[Path, str] | None, own: str | None) -> Path | None:
    if mount is None or own is None:
        return None
    place, root = mount
    inner = own.removeprefix(root.rstrip("/")).lstrip("/") if own.startswith(root) else ""
    return place / inner


def _make_parent(parent: Path) -> bool:
    try:
        parent.mkdir(exist_ok=True)
    except OSError:
        return False
    return True


def _delegated(base: Path) -> bool:
    """Hand the controllers of the gateway's own group down; the gateway moves into a leaf where the kernel wants it."""
    if _enable(base):
        return True
    leaf = base / _LEAF
    try:
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    return bool(_enable(base))


def _enable(folder: Path) -> tuple[str, ...]:
    """Turn the controllers on for the folder's children; returns those that are on."""
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
        for name in CONTROLLERS:
            if name in offered:
                (folder / "cgroup.subtree_control").write_text(f"+{name}")
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return ()
    return tuple(name for name in CONTROLLERS if name in enabled)
