"""The sessions' folders on disk, and the host uid that each session has when the gateway is root."""

import os
import secrets
import stat
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import SandboxError, SandboxUnavailable
from sandboxes.kind import check_session_id

_REMOVE_TRIES = 5


@dataclass(frozen=True, slots=True)
class Folders:
    """One session's folders; `uid` is -1 where the gateway's own is used; `restored` says that they were there."""

    workspace: Path
    home: Path
    uid: int
    restored: bool


class Workspaces:
    """`<state>/workspaces/<session>/{workspace,home}`, all 0700; a folder's owner is its session's uid."""

    def __init__(self, state_dir: Path, uids: range | None) -> None:
        self._root = state_dir / "workspaces"
        self._uids = uids or range(0)
        self._lent: dict[str, int] = {}

    def open(self, session_id: str) -> Folders:
        """Make the folders where they are missing; an existing one keeps its owner."""
        top = self._place(session_id)
        for folder in (self._root.parent, self._root):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        restored = top.is_dir()
        uid = self._uid(session_id, top)
        for folder in (top, top / "workspace", top / "home"):
            _make(folder, uid)
        return Folders(top / "workspace", top / "home", uid, restored)

    def has(self, session_id: str) -> bool:
        return self._place(session_id).exists()

    def others(self, session_ids: Collection[str]) -> list[str]:
        """All sessions that have folders, but these."""
        names = [folder.name for folder in self._root.iterdir()] if self._root.exists() else []
        return [name for name in names if name not in session_ids]

    def rename(self, session_id: str, new: str) -> None:
        """Give a session's folders to another that has none; what is mounted of them stays so."""
        self._place(session_id).rename(self._place(new))
        if session_id in self._lent:
            self._lent[new] = self._lent.pop(session_id)

    def release(self, session_id: str) -> None:
        """Give the uid back; a folder that stays goes on holding it."""
        self._lent.pop(session_id, None)

    def destroy(self, session_id: str) -> None:
        """Remove the session's folders, verified; modes, depth and odd names do not matter."""
        top = self._place(session_id)
        for _ in range(_REMOVE_TRIES):
            _run("rm", "-rf", "--one-file-system", "--", str(top))
            if not top.exists() and not top.is_symlink():
                return
            _run("chmod", "-R", "u+rwX", "--", str(top))
        raise SandboxError(f"the workspace of session {session_id} could not be removed", f"look at {top}")

    def _place(self, session_id: str) -> Path:
        check_session_id(session_id)
        return self._root / session_id

    def _uid(self, session_id: str, top: Path) -> int:
        if not self._uids:
            return -1
        owner = top.stat().st_uid if top.is_dir() else -1
        uid = owner if owner in self._uids else self._unused()
        self._lent[session_id] = uid
        return uid

    def _unused(self) -> int:
        taken = {*self._lent.values(), *self._owners()}
        start = secrets.randbelow(len(self._uids))  # two gateways on one machine seldom meet
        for step in range(len(self._uids)):
            uid = self._uids[(start + step) % len(self._uids)]
            if uid not in taken:
                return uid
        raise SandboxUnavailable(
            f"all {len(self._uids)} uids of sessions are taken", "close sessions, or widen local_uids"
        )

    def _owners(self) -> Iterator[int]:
        for folder in self._root.iterdir():
            try:
                yield folder.lstat().st_uid
            except FileNotFoundError:
                continue


def _make(folder: Path, uid: int) -> None:
    """Make a folder, or take it as it is; a link in its place is an error of somebody else's making."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise SandboxUnavailable(f"{folder} is not a folder") from None
        folder.chmod(0o700)  # its owner may have closed it, and locked the next sandbox out
    else:
        if uid >= 0:
            os.chown(folder, uid, uid)


def _run(*command: str) -> None:
    subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin"},
    )
