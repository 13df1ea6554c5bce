"""What this machine's kernel allows, and what helps where it does not."""

import platform
from pathlib import Path
from typing import Final

_NPROC_IN_NAMESPACE: Final = (5, 14)


def nproc_is_per_namespace(release: str | None = None) -> bool:
    """Whether RLIMIT_NPROC, set inside a user namespace, counts only that namespace's processes (Linux >= 5.14)."""
    words = (release or platform.release()).replace("-", ".").split(".")
    try:
        return (int(words[0]), int(words[1])) >= _NPROC_IN_NAMESPACE
    except (IndexError, ValueError):
        return False


def remedy_for(text: str, sysctl: Path = Path("/proc/sys")) -> str:
    """Say what helps against an error of bubblewrap, from its words and the kernel's settings."""
    if _setting(sysctl / "kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor forbids user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0, "
            "or an AppArmor profile for bubblewrap with `userns,`"
        )
    if _setting(sysctl / "user/max_user_namespaces") == "0":
        return "user namespaces are off: sysctl user.max_user_namespaces=15000"
    if _setting(sysctl / "kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are off: sysctl kernel.unprivileged_userns_clone=1"
    if "execvp" in text:
        return "the gateway's Python must be readable for every user, with the folders above it"
    if "unshare" in text or "mount" in text.lower():
        return "as root the gateway needs CAP_SYS_ADMIN; run it as an ordinary user instead"
    if "namespace" in text or "uid map" in text:
        return 'allow user namespaces (in a container: its seccomp profile), or use kind = "docker"'
    return ""


def _setting(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
