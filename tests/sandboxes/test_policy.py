"""The policy as data: bubblewrap's arguments, the system call filter, and what of the host is shown."""

import ast
import struct
from pathlib import Path

import pytest

from sandboxes import SandboxUnavailable, bwrap, runner
from sandboxes.bwrap import Descriptors, Tools, View, bwrap_arguments, runner_command
from sandboxes.seccomp import MACHINES, seccomp_filter

TOOLS = Tools(
    bwrap=Path("/b/bwrap"), python=Path("/root/py/bin/python3.11"), prefix=Path("/root/py"), rg=Path("/v/bin/rg")
)
VIEW = View(TOOLS, Path("/s/w"), Path("/s/h"), links={"bin": "usr/bin", "lib64": None}, read_only=(Path("/data"),))
FDS = Descriptors(3, 4, 5, 6, {"/etc/passwd": 7})


def options(words: list[str], name: str, count: int) -> list[tuple[str, ...]]:
    return [tuple(words[at + 1 : at + 1 + count]) for at, word in enumerate(words) if word == name]


def test_fences_are_all_there() -> None:
    words = bwrap_arguments(VIEW, FDS)
    for word in (
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
    ):
        assert words.count(word) == 1
    assert options(words, "--cap-drop", 1) == [("ALL",)]
    assert options(words, "--seccomp", 1) == [("4",)]
    assert not any(word.startswith(("--share", "--cap-add", "--dev-bind", "--setenv")) for word in words)


def test_only_workspace_and_home_are_bound_writable() -> None:
    words = bwrap_arguments(VIEW, FDS, show=lambda path: f"/stage{path}")
    assert options(words, "--bind", 2) == [("/stage/s/w", "/workspace"), ("/stage/s/h", "/home/agent")]
    assert options(words, "--ro-bind", 2) == [
        ("/usr", "/usr"),
        ("/lib64", "/lib64"),
        ("/proc/sys", "/proc/sys"),
        ("/stage/root/py", "/root/py"),
        ("/stage/v/bin/rg", "/run/sandgate/bin/rg"),
        ("/stage/data", "/data"),
    ]
    assert words[-6:-2] == ["--remount-ro", "/dev", "--remount-ro", "/"]


def test_scratch_is_sized_before_anything_is_placed_in_it() -> None:
    words = bwrap_arguments(VIEW, FDS)
    assert options(words, "--tmpfs", 1) == [("/tmp",), ("/dev/shm",)]
    assert options(words, "--size", 2) == [(str(64 << 20), "--tmpfs")] * 2
    assert options(words, "--perms", 3)[-3:-1] == [("1777", "--size", str(64 << 20))] * 2
    assert words.index("/tmp") < words.index("/root/py")


def test_command_shows_nothing_of_the_host() -> None:
    """K20: it is what /proc/1/cmdline shows."""
    assert runner_command(VIEW, FDS) == ["/root/py/bin/python3.11", "-I", "-S", "-B", "/run/sandgate/runner.py", "6"]


def test_links_and_folders_are_shown_as_the_host_has_them(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    assert bwrap.system_links(tmp_path) == {"bin": "usr/bin", "lib": None}


def test_made_up_etc_holds_no_name_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("secret")
    (tmp_path / "alternatives").mkdir()
    assert bwrap.shown_etc(tmp_path) == (tmp_path / "alternatives",)
    assert not any(
        "passwd" in str(path) or "private" in str(path) or "shadow" in str(path) for path in bwrap.shown_etc()
    )


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/proc",
        "/dev/shm",
        "/workspace",
        "/home",
        "/home/agent/x",
        "/usr",
        "/etc",
        "/run/sandgate/x",
        "/run",
        "/tmp",
        "x",
        "/data/../etc",
    ],
)
def test_places_of_the_sandbox_cannot_be_covered(path: str) -> None:
    with pytest.raises(SandboxUnavailable):
        bwrap.check_read_only((Path(path),))


# --- the filter, run by a small interpreter of classic BPF

ALLOW, KILL = 0x7FFF0000, 0x80000000


def refused(number: int) -> int:
    return 0x00050000 | number


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    program = list(struct.iter_unpack("<HBBI", seccomp_filter(machine)))
    padded = (*arguments, *([0] * (6 - len(arguments))))
    data = struct.pack("<iIQ6Q", number, audit or MACHINES[machine].audit, 0, *padded)
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += if_true if holds else if_false


NUMBERS = {
    "x86_64": {
        "read": 0,
        "execve": 59,
        "clone": 56,
        "ioctl": 16,
        "socket": 41,
        "prlimit64": 302,
        "ptrace": 101,
        "mount": 165,
        "unshare": 272,
        "setns": 308,
        "bpf": 321,
        "keyctl": 250,
        "reboot": 169,
    },
    "aarch64": {
        "read": 63,
        "execve": 221,
        "clone": 220,
        "ioctl": 29,
        "socket": 198,
        "prlimit64": 261,
        "ptrace": 117,
        "mount": 40,
        "unshare": 97,
        "setns": 268,
        "bpf": 280,
        "keyctl": 219,
        "reboot": 142,
    },
}


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_lets_ordinary_calls_through(machine: str) -> None:
    numbers = NUMBERS[machine]
    assert verdict(machine, numbers["read"]) == ALLOW
    assert verdict(machine, numbers["execve"]) == ALLOW
    assert verdict(machine, numbers["clone"], 17) == ALLOW
    assert verdict(machine, numbers["clone"], 0x3D0F00) == ALLOW  # a thread
    assert verdict(machine, numbers["ioctl"], 0, 0x5413) == ALLOW
    assert verdict(machine, numbers["prlimit64"], 0, 7) == ALLOW
    assert [verdict(machine, numbers["socket"], family) for family in (1, 2, 10)] == [ALLOW] * 3


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_refuses_the_list(machine: str) -> None:
    """D.1, D.2."""
    numbers = NUMBERS[machine]
    for name in ("ptrace", "mount", "unshare", "setns", "bpf", "keyctl", "reboot"):
        assert verdict(machine, numbers[name]) == refused(1), name
    for number in (425, 426, 427, 429, 432, 438):
        assert verdict(machine, number) == refused(1)
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, numbers["clone"], flag | 17) == refused(1)
    assert verdict(machine, 435) == refused(38)
    assert verdict(machine, numbers["prlimit64"], 1) == refused(1)
    assert [verdict(machine, numbers["socket"], family) for family in (16, 17, 38, 40)] == [refused(97)] * 4


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_looks_at_the_low_32_bits(machine: str) -> None:
    """F54: the kernel ignores what is above them, so must we."""
    numbers = NUMBERS[machine]
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x541C | 1 << 63):
        assert verdict(machine, numbers["ioctl"], 0, request) == refused(1)
    assert verdict(machine, numbers["socket"], 40 | 1 << 32) == refused(97)


def test_filter_refuses_other_tables() -> None:
    assert verdict("x86_64", 0, audit=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000 | 39) == refused(1)


def test_filter_is_missing_for_other_machines() -> None:
    with pytest.raises(SandboxUnavailable):
        seccomp_filter("riscv64")


def test_runner_is_one_file_for_old_pythons() -> None:
    """Any image's Python >= 3.9 runs it, from this file alone, without the imports that make a start slow."""
    tree = ast.parse(Path(runner.__file__).read_text(), feature_version=(3, 9))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules <= {
        "_signal",
        "_socket",
        "ctypes",
        "errno",
        "fcntl",
        "gc",
        "os",
        "resource",
        "select",
        "stat",
        "struct",
        "sys",
        "time",
    }
    assert [node.module for node in tree.body if isinstance(node, ast.ImportFrom)] == ["__future__"]  # types aside
