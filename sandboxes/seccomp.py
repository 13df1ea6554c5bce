"""The system calls that no program in a sandbox gets: a classic BPF program for `bwrap --seccomp`, and a profile in the
engines' JSON for Docker.

The namespaces and the missing capabilities are the fence. This list takes away what reaches kernel code or other
processes in spite of them: for bubblewrap out of all calls, for Docker out of those that its default profile allows.
"""

import errno
import json
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sandboxes.errors import SandboxUnavailable

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCH_OFFSET = 0, 4
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_TERMINAL_PUSH_BACK = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SOCKET_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6
_LOW_BITS: Final = 0xFFFFFFFF
_ENGINE_PROFILE: Final = Path(__file__).with_name("seccomp.json")
_BY_ARGUMENT: Final = {"clone", "ioctl", "socket", "prlimit64"}
_BY_POINTER: Final = {"socketcall"}  # its family lies in memory


@dataclass(frozen=True, slots=True)
class Machine:
    """One architecture: its audit number and its system call numbers."""

    audit: int
    has_x32: bool
    prlimit64: int
    socket: int
    clone: int
    ioctl: int
    names: Mapping[str, int]
    engine_name: str

    @property
    def refused(self) -> tuple[int, ...]:
        return tuple(self.names.values())


_COMMON: Final = {  # added after the tables were unified: the same number everywhere
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "open_tree_attr": 467,
}
_CLONE3: Final = 435
_X86_64: Final = {
    "uselib": 134,
    "personality": 135,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "_sysctl": 156,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "init_module": 175,
    "delete_module": 176,
    "get_kernel_syms": 177,
    "query_module": 178,
    "quotactl": 179,
    "nfsservctl": 180,
    "ptrace": 101,
    "syslog": 103,
    "lookup_dcookie": 212,
    "clock_settime": 227,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "migrate_pages": 256,
    "unshare": 272,
    "move_pages": 279,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
}
_AARCH64: Final = {
    "lookup_dcookie": 18,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "nfsservctl": 42,
    "chroot": 51,
    "vhangup": 58,
    "quotactl": 60,
    "acct": 89,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "clock_settime": 112,
    "syslog": 116,
    "ptrace": 117,
    "reboot": 142,
    "sethostname": 161,
    "setdomainname": 162,
    "settimeofday": 170,
    "adjtimex": 171,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "swapon": 224,
    "swapoff": 225,
    "migrate_pages": 238,
    "move_pages": 239,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "clock_adjtime": 266,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "bpf": 280,
    "userfaultfd": 282,
    "kexec_file_load": 294,
}
MACHINES: Final = {
    "x86_64": Machine(0xC000003E, True, 302, 41, 56, 16, {**_X86_64, **_COMMON}, "SCMP_ARCH_X86_64"),
    "aarch64": Machine(0xC00000B7, False, 261, 198, 220, 29, {**_AARCH64, **_COMMON}, "SCMP_ARCH_AARCH64"),
}


def seccomp_filter(machine: str | None = None) -> bytes:
    """Return the program for this machine (or the named one); SandboxUnavailable where there is none."""
    name = machine or platform.machine()
    try:
        return b"".join(_program(MACHINES[name]))
    except KeyError:
        raise SandboxUnavailable(
            f"no system call filter for {name}", 'use x86_64 or aarch64, or kind = "docker"'
        ) from None


def seccomp_profile() -> dict[str, Any]:
    """Return the policy for an engine, which compiles it for its own machine: the calls that its default profile lets
    through (`docker/seccomp.json`), without ours. What nobody named is refused, what the engine does not know is left
    out.

    A call of an architecture that is not listed (32 bits, x32) ends its process.
    """
    refused = {name for machine in MACHINES.values() for name in machine.names} | _BY_POINTER
    [engine] = json.loads(_ENGINE_PROFILE.read_text())["syscalls"]
    families = [_rule("SCMP_CMP_EQ", other) for other in range(max(_SOCKET_FAMILIES)) if other not in _SOCKET_FAMILIES]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": [machine.engine_name for machine in MACHINES.values()],
        "syscalls": [
            _allowed(sorted({*engine["names"]} - refused - _BY_ARGUMENT)),
            _refused(["clone3"], errno.ENOSYS),  # its flags lie in memory, which a filter cannot read
            _allowed(["clone"], _rule("SCMP_CMP_MASKED_EQ", _NEW_NAMESPACES, 0)),
            *(
                _allowed(["ioctl"], _rule("SCMP_CMP_MASKED_EQ", mask, value, index=1))
                for mask, value in _all_but(_TERMINAL_PUSH_BACK)
            ),
            *(_allowed(["socket"], _rule("SCMP_CMP_EQ", family)) for family in _SOCKET_FAMILIES),
            *(
                _refused(["socket"], errno.EAFNOSUPPORT, rule)
                for rule in (*families, _rule("SCMP_CMP_GT", max(_SOCKET_FAMILIES)))
            ),
            _allowed(["prlimit64"], _rule("SCMP_CMP_EQ", 0)),
        ],
    }


def _all_but(values: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield masks with values: the low 32 bits of a number match one of them exactly if they are none of ours.

    An engine combines rules by "or" alone, so "neither this nor that" must be said by what is left: for every leading
    part of one of our values, the other next bit.
    """
    for bit in range(32):
        leading = {value >> bit for value in values}
        for other in {part ^ 1 for part in leading} - leading:
            yield _LOW_BITS >> bit << bit, other << bit


def _allowed(names: list[str], *rules: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(rules)}


def _refused(names: list[str], number: int, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": list(rules)}


def _rule(compare: str, value: int, value_two: int = 0, *, index: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": compare}


def _program(machine: Machine) -> list[bytes]:
    code = [
        _op(_LOAD, _ARCH_OFFSET),
        _op(_EQUAL, machine.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER_OFFSET),
    ]
    if machine.has_x32:
        code += [_op(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    code += _when(_CLONE3, [_refuse(errno.ENOSYS)])  # its flags lie in memory, which a filter cannot read
    code += _when(machine.clone, _argument(0, [_op(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)]))
    code += _when(machine.ioctl, _argument(1, _one_of(_TERMINAL_PUSH_BACK, _refuse(errno.EPERM), _allow())))
    code += _when(machine.socket, _argument(0, _one_of(_SOCKET_FAMILIES, _allow(), _refuse(errno.EAFNOSUPPORT))))
    code += _when(machine.prlimit64, _argument(0, _one_of((0,), _allow(), _refuse(errno.EPERM))))
    for number in sorted(machine.refused):
        code += [_op(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    return [*code, _allow()]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _allow() -> bytes:
    return _op(_RETURN, _ALLOW)


def _refuse(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _when(number: int, body: list[bytes]) -> list[bytes]:
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int, body: list[bytes]) -> list[bytes]:
    """Look at the low 32 bits of an argument (both machines are little-endian), allow what the body lets through."""
    return [_op(_LOAD, 16 + 8 * index), *body, _allow()]


def _one_of(values: tuple[int, ...], then: bytes, otherwise: bytes) -> list[bytes]:
    checks = [step for value in values for step in (_op(_EQUAL, value, 0, 1), then)]
    return [*checks, otherwise]
