"""The options of a Docker sandbox, as data; no engine is needed."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from sandboxes import Limits
from sandboxes.container import (
    Container,
    container_options,
    options_digest,
    preparing_options,
    volume_names,
    workload_env,
    workspace_bytes,
)
from sandboxes.seccomp import MACHINES, seccomp_profile

PROFILE = Path(__file__).parents[2] / "docker" / "seccomp.json"
ONE = Container("i", "s-1", "sha256:abc", Path("/state/channels/s-1"), limits=Limits(cpus=0.5))
MIB = 1 << 20


def test_options_are_the_hardened_set() -> None:
    """D.1, whole. A11: nobody who names no network gets one. A35: no file goes in by the engine's archive API."""
    options = container_options(ONE)
    assert options.pop("HostConfig") == {
        "AutoRemove": False,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "CpuPeriod": 100_000,
        "CpuQuota": 50_000,
        "Dns": ["127.0.0.1"],
        "DnsSearch": ["."],
        "Init": False,
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Memory": 1 << 30,
        "MemorySwap": 1 << 30,
        "Mounts": [
            {
                "Type": "bind",
                "Source": "/state/channels/s-1",
                "Target": "/run/sandgate",
                "ReadOnly": True,
                "BindOptions": {"Propagation": "rprivate"},
            }
        ],
        "NetworkMode": "none",
        "PidsLimit": 136,
        "Privileged": False,
        "ReadonlyRootfs": True,
        "RestartPolicy": {"Name": "no"},
        "SecurityOpt": ["no-new-privileges:true", "seccomp=" + json.dumps(seccomp_profile())],
        "Tmpfs": {
            "/tmp": f"rw,exec,nosuid,nodev,size={64 * MIB},nr_inodes=16384,mode=1777",
            "/dev/shm": f"rw,exec,nosuid,nodev,size={64 * MIB},nr_inodes=16384,mode=1777",
            "/workspace": f"rw,exec,nosuid,nodev,size={512 * MIB},nr_inodes=131072,mode=0755,uid=1000,gid=1000",
            "/home/agent": f"rw,exec,nosuid,nodev,size={128 * MIB},nr_inodes=32768,mode=0755,uid=1000,gid=1000",
        },
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": 512 * MIB, "Hard": 512 * MIB},
            {"Name": "msgqueue", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": 1024, "Hard": 1024},
        ],
    }
    assert options == {
        "Image": "sha256:abc",
        "User": "1000:1000",
        "Entrypoint": ["python3", "-I", "-S", "-B", "/run/sandgate/runner.py", "/run/sandgate/channel"],
        "Cmd": [],
        "Env": [],
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Labels": {
            "sandgate.instance": "i",
            "sandgate.session": "s-1",
            "sandgate.options": options_digest(ONE),
        },
        "Healthcheck": {"Test": ["NONE"]},
    }


def test_on_disk_the_volumes_are_mounted_and_the_scratch_stays_in_memory() -> None:
    host = container_options(Container("i", "s", "x", Path("/c"), "disk"))["HostConfig"]
    assert [(mount["Type"], mount["Source"], mount["Target"]) for mount in host["Mounts"]] == [
        ("bind", "/c", "/run/sandgate"),
        ("volume", "sandgate-i-s-workspace", "/workspace"),
        ("volume", "sandgate-i-s-home", "/home/agent"),
    ]
    assert set(host["Tmpfs"]) == {"/tmp", "/dev/shm"}
    assert host["Mounts"][1]["VolumeOptions"]["Labels"] == {"sandgate.instance": "i", "sandgate.session": "s"}
    assert volume_names("i", "s") == ("sandgate-i-s-workspace", "sandgate-i-s-home")


def test_open_network_is_a_bridge_of_the_sessions_own() -> None:
    host = container_options(Container("i", "s", "x", Path("/c"), network="open"))["HostConfig"]
    assert (host["NetworkMode"], host["Dns"], host["DnsSearch"]) == ("sandgate-i-s", [], ["."])


def test_without_a_runner_the_engines_init_waits_as_nobody() -> None:
    """D.1: no program of the sandbox's user can signal its first process."""
    options = container_options(Container("i", "s", "x", None))
    assert (options["User"], options["Entrypoint"][:2], options["HostConfig"]["Init"]) == (
        "65534:65534",
        ["sh", "-c"],
        True,
    )
    assert options["HostConfig"]["Mounts"] == []
    assert "uid=1000,gid=1000" in options["HostConfig"]["Tmpfs"]["/workspace"]


def test_read_only_paths_are_bound_read_only() -> None:
    one = Container("i", "s", "x", Path("/c"), read_only=(Path("/data"),))
    [_, mount] = container_options(one)["HostConfig"]["Mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == ("/data", "/data", True)


def test_handing_over_volumes_takes_two_capabilities_and_shows_nothing_else() -> None:
    """It runs as root of the container, and nobody's program."""
    options = preparing_options(Container("i", "s", "x", Path("/c"), "disk"))
    host = options["HostConfig"]
    assert (options["User"], host["CapDrop"], host["CapAdd"]) == ("0:0", ["ALL"], ["CHOWN", "FOWNER"])
    assert (host["NetworkMode"], host["ReadonlyRootfs"]) == ("none", True)
    assert [mount["Target"] for mount in host["Mounts"]] == ["/workspace", "/home/agent"]
    assert options["Labels"] == {"sandgate.instance": "i", "sandgate.session": "s", "sandgate.prepares": "volumes"}


@pytest.mark.parametrize("memory", [32 * MIB, 128 * MIB, 1 << 30, 8 << 30])
def test_all_tmpfs_together_leave_a_quarter_of_the_memory(memory: int) -> None:
    """D.1: they are charged to the sandbox's own memory."""
    limits = Limits(memory=memory, workspace_size=1 << 40)
    places = container_options(Container("i", "s", "x", Path("/c"), limits=limits))["HostConfig"]["Tmpfs"]
    sizes = [int(dict(word.partition("=")[::2] for word in text.split(","))["size"]) for text in places.values()]
    assert sum(sizes) <= memory * 3 // 4
    assert workspace_bytes(limits, "memory") == memory // 2
    assert workspace_bytes(limits, "disk") == 1 << 40


def test_env_of_the_image_is_the_programs_but_home_is_ours() -> None:
    assert workload_env(["PATH=/opt/bin:/bin", "HOME=/root", "A=b=c"]) == {
        "PATH": "/opt/bin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "A": "b=c",
    }


# --- the system calls

RULES: list[dict[str, Any]] = seccomp_profile()["syscalls"]
OPEN = set(RULES[0]["names"])
"""What needs no look at its arguments."""


def action(name: str, *arguments: int) -> int:
    """What the profile answers: 0 for yes, else an errno; no two rules hold for one call, so their order is nothing."""
    compares = {
        "SCMP_CMP_EQ": lambda value, rule: value == rule["value"],
        "SCMP_CMP_GT": lambda value, rule: value > rule["value"],
        "SCMP_CMP_MASKED_EQ": lambda value, rule: value & rule["value"] == rule["valueTwo"],
    }
    answers = [
        rule.get("errnoRet", 0)
        for rule in RULES
        if name in rule["names"] and all(compares[one["op"]](arguments[one["index"]], one) for one in rule["args"])
    ]
    assert len(answers) <= 1
    return answers[0] if answers else errno.EPERM


def test_profile_is_the_engines_without_ours() -> None:
    """D.1: what nobody named is refused."""
    engine = set(json.loads(PROFILE.read_text())["syscalls"][0]["names"])
    assert engine > OPEN
    assert seccomp_profile()["defaultAction"] == "SCMP_ACT_ERRNO"
    assert engine - OPEN == {
        *("adjtimex", "clock_adjtime", "io_uring_enter", "io_uring_register", "io_uring_setup", "modify_ldt"),
        *("name_to_handle_at", "process_vm_readv", "process_vm_writev", "ptrace", "socketcall"),
        *("clone", "ioctl", "prlimit64", "socket"),
    }
    assert action("no_such_call") == action("mount") == errno.EPERM


def test_profile_lets_ordinary_calls_through() -> None:
    assert [action("socket", family) for family in (1, 2, 10)] == [0, 0, 0]
    assert [action("clone", flags) for flags in (17, 0x3D0F00)] == [0, 0]
    assert [action("ioctl", 0, request) for request in (0, 0x5411, 0x5413, 0x541B, 0x541D, 0xC0385720)] == [0] * 6
    assert (action("prlimit64", 0), action("read", 0)) == (0, 0)


def test_profile_refuses_the_list() -> None:
    """D.1."""
    assert {action(name) for machine in MACHINES.values() for name in machine.names} == {errno.EPERM}
    families = (0, 3, 4, 9, 16, 17, 38, 40, 40 | 1 << 32, 1 | 1 << 32)
    assert {action("socket", family) for family in families} == {errno.EAFNOSUPPORT}
    assert {action("clone", flag | 17) for flag in (0x20000, *(1 << bit for bit in range(25, 31)))} == {errno.EPERM}
    assert {action("ioctl", 0, request) for request in (0x5412, 0x541C, 0x5412 | 1 << 32)} == {errno.EPERM}
    assert (action("clone3", 0), action("prlimit64", 1)) == (errno.ENOSYS, errno.EPERM)
