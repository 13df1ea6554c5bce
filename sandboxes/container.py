"""What a Docker sandbox is made of, in the words of the engine's API: the options are the policy.

`container_options` is pure, so that a test can read the policy as data.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from sandboxes import runner
from sandboxes.cgroups import RUNNER_PROCESSES
from sandboxes.kind import Network
from sandboxes.sandbox import HOME, WORKSPACE, Limits
from sandboxes.seccomp import seccomp_profile

Storage = Literal["memory", "disk"]
"""Where a workspace lies: a tmpfs that is lost with its container, or named volumes that stay."""
DEFAULT_IMAGE: Final = "sandgate/sandbox"
BASE_IMAGE: Final = "debian:bookworm-slim"
RUN: Final = "/run/sandgate"
USER: Final = 1000
NOBODY: Final = 65534
"""Who waits in a container without a runner: no program of the sandbox can signal him."""
INSTANCE_LABEL: Final = "sandgate.instance"
SESSION_LABEL: Final = "sandgate.session"
OPTIONS_LABEL: Final = "sandgate.options"
PREPARES_LABEL: Final = "sandgate.prepares"
"""On a container that hands new volumes to the sandbox's user: as long as it is there, they are not his."""
BASE_ENV: Final[Mapping[str, str]] = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
PYTHON: Final = ("python3", "-I", "-S", "-B")
_SCRATCH_BYTES: Final = 64 << 20
_PAGE: Final = 4096
_PERIOD_US: Final = 100_000
_LEAST_INODES: Final = 1024
_HAND_OVER: Final = f"import os; [(os.chown(p, {USER}, {USER}), os.chmod(p, 0o755)) for p in ({WORKSPACE!r}, {HOME!r})]"

_HAND_OVER_BY_SHELL: Final = f"chown {USER}:{USER} {WORKSPACE} {HOME} && chmod 755 {WORKSPACE} {HOME}"
_LONGEST_SECONDS: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Container:
    """One container to make. `channel` is the folder that it shows at `RUN`, None where the engine's exec stands in for
    the runner; `image` a name or an id."""

    instance: str
    session_id: str
    image: str
    channel: Path | None
    storage: Storage = "memory"
    limits: Limits = field(default_factory=Limits)
    read_only: tuple[Path, ...] = ()
    network: Network = "none"

    @property
    def name(self) -> str:
        """Of the container, and of its bridge where it has one."""
        return container_name(self.instance, self.session_id)


def container_name(instance: str, session_id: str) -> str:
    return f"sandgate-{instance}-{session_id}"


def volume_names(instance: str, session_id: str) -> tuple[str, str]:
    """The names of a session's volumes on disk: of its workspace, and of its HOME."""
    name = container_name(instance, session_id)
    return f"{name}-workspace", f"{name}-home"


def labels(instance: str, session_id: str) -> dict[str, str]:
    return {INSTANCE_LABEL: instance, SESSION_LABEL: session_id}


def workspace_bytes(limits: Limits, storage: Storage) -> int:
    """How much a workspace holds: what is asked, in memory at most half of the sandbox's."""
    return limits.workspace_size if storage == "disk" else min(limits.workspace_size, limits.memory // 2)


def container_options(one: Container) -> dict[str, Any]:
    """Return the body of the engine's request to create the sandbox, whose PID 1 is the runner, or the engine's init
    with a program that waits."""
    options = _options(one)
    return {**options, "Labels": {**options["Labels"], OPTIONS_LABEL: options_digest(one)}}


def options_digest(one: Container) -> str:
    """What must be the same for a running container to be taken up again: the options that are not only its own, but
    for the image's newest id, and the runner that serves it."""
    anyone = replace(one, session_id="", image="", channel=Path("/"))
    text = json.dumps(_options(anyone), sort_keys=True).encode()
    return hashlib.sha256(text + Path(runner.__file__).read_bytes()).hexdigest()


def _options(one: Container) -> dict[str, Any]:
    if one.channel is None:
        first = {"Entrypoint": ["sh", "-c", f"exec sleep {_LONGEST_SECONDS}"]}
        user, shown = NOBODY, []
    else:
        first = {"Entrypoint": [*PYTHON, f"{RUN}/runner.py", f"{RUN}/channel"]}
        user, shown = USER, [(one.channel, RUN)]
    return {
        **_common(one, f"{user}:{user}"),
        **first,
        "HostConfig": {
            **_fences(one.limits, workspace_bytes(one.limits, one.storage)),
            "CapAdd": [],
            "Init": one.channel is None,
            "Tmpfs": _tmpfs(one.limits, one.storage),
            **({"NetworkMode": one.name, "Dns": []} if one.network == "open" else {}),
            "Mounts": [*_bound([*shown, *((path, str(path)) for path in one.read_only)]), *_volumes(one)],
        },
    }


def preparing_options(one: Container) -> dict[str, Any]:
    """Return the body for a container that makes the volumes and hands them to the sandbox's user; it runs no
    workload, and has the one capability for it."""
    options = _common(one, "0:0")
    options["Labels"] |= {PREPARES_LABEL: "volumes"}
    return {
        **options,
        "Entrypoint": ["sh", "-c", _HAND_OVER_BY_SHELL] if one.channel is None else [*PYTHON, "-c", _HAND_OVER],
        "HostConfig": {
            **_fences(one.limits, workspace_bytes(one.limits, one.storage)),
            "CapAdd": ["CHOWN", "FOWNER"],
            "Mounts": _volumes(one),
        },
    }


def workload_env(image_env: Iterable[str]) -> dict[str, str]:
    """What a program gets beside the session's own: what the image sets, and HOME."""
    pairs = (item.partition("=") for item in image_env)
    return {**BASE_ENV, **{name: value for name, _, value in pairs}, "HOME": HOME}


def _common(one: Container, user: str) -> dict[str, Any]:
    return {
        "Image": one.image,
        "User": user,
        "Cmd": [],
        "Env": [],
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Labels": labels(one.instance, one.session_id),
        "Healthcheck": {"Test": ["NONE"]},  # the image's would run beside the workload
    }


def _fences(limits: Limits, largest_file: int) -> dict[str, Any]:
    return {
        "AutoRemove": False,  # the engine forgets to after its own restart
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "CpuPeriod": _PERIOD_US,
        "CpuQuota": round(limits.cpus * _PERIOD_US),  # NanoCpus is refused where the machine has fewer
        "Dns": ["127.0.0.1"],  # nobody; an empty list shows the host's resolver
        "DnsSearch": ["."],
        "Init": False,
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "NetworkMode": "none",
        "PidsLimit": limits.processes + RUNNER_PROCESSES,
        "Privileged": False,
        "ReadonlyRootfs": True,
        "RestartPolicy": {"Name": "no"},
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={json.dumps(seccomp_profile())}"],
        "Ulimits": [
            {"Name": name, "Soft": value, "Hard": value}
            for name, value in (
                ("core", 0),
                ("fsize", largest_file),
                ("msgqueue", 0),  # the engine's /dev/mqueue is for everyone to write
                ("nofile", limits.open_files),
            )
        ],
    }


def _tmpfs(limits: Limits, storage: Storage) -> dict[str, str]:
    """All of them together hold at most three quarters of the memory, which they are charged to."""
    scratch = min(_SCRATCH_BYTES, limits.memory // 16)
    places = {"/tmp": _tmpfs_options(scratch, "mode=1777"), "/dev/shm": _tmpfs_options(scratch, "mode=1777")}  # noqa: S108
    if storage == "memory":
        own = f"mode=0755,uid={USER},gid={USER}"
        places[WORKSPACE] = _tmpfs_options(workspace_bytes(limits, storage), own)
        places[HOME] = _tmpfs_options(limits.memory // 8, own)
    return places


def _tmpfs_options(size: int, owner: str) -> str:
    return f"rw,exec,nosuid,nodev,size={size},nr_inodes={max(_LEAST_INODES, size // _PAGE)},{owner}"


def _bound(places: Iterable[tuple[Path, str]]) -> list[dict[str, Any]]:
    return [
        {
            "Type": "bind",
            "Source": str(source),
            "Target": target,
            "ReadOnly": True,
            "BindOptions": {"Propagation": "rprivate"},
        }
        for source, target in places
    ]


def _volumes(one: Container) -> list[dict[str, Any]]:
    if one.storage == "memory":
        return []
    names = volume_names(one.instance, one.session_id)
    return [
        {
            "Type": "volume",
            "Source": name,
            "Target": target,
            "VolumeOptions": {"NoCopy": True, "Labels": labels(one.instance, one.session_id)},
        }
        for name, target in zip(names, (WORKSPACE, HOME), strict=True)
    ]
