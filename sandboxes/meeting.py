"""Where a runner in a container and its gateway meet: a folder that the container shows, with a socket for one."""

import os
import shutil
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from sandboxes import runner

_CREDENTIALS: Final = struct.Struct("3i")
_SOCKET: Final = "channel"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected; `pid` is 0 where the kernel cannot name it here (another PID namespace)."""

    sock: socket.socket
    pid: int


class Meeting:
    """The folder `<state>/channels/<session>` with the runner's source, and a socket that takes one connection.

    Its parents are closed to everyone else on this machine; inside it is read-only, and after the connection there is
    nothing left to connect to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Make the folder and listen."""
        self.remove()
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir()
        self.folder.chmod(0o755)  # whatever the umask: the sandbox's user is another
        source = self.folder / "runner.py"
        source.write_bytes(Path(runner.__file__).read_bytes())
        source.chmod(0o444)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        fd = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{fd}/{_SOCKET}")  # a socket's path has at most 107 bytes, a folder's more
        finally:
            os.close(fd)
        (self.folder / _SOCKET).chmod(0o666)
        self._socket.listen(1)

    async def accept(self, seconds: float) -> Peer | None:
        """Take the one connection, if it comes within that time."""
        assert self._socket is not None
        with anyio.move_on_after(seconds):
            await anyio.wait_readable(self._socket)
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return None
        (self.folder / _SOCKET).unlink()
        self.close()
        sock.setblocking(False)
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return Peer(sock, pid)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def remove(self) -> None:
        """Stop listening, and remove the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
