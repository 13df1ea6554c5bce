"""Where a runner in a container and its gateway meet: a folder that the container shows, with a socket for one."""

import hmac
import os
import secrets
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
_WORD_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected; `pid` is 0 where the kernel cannot name it here (another PID namespace)."""

    sock: socket.socket
    pid: int


class Meeting:
    """The folder `<state>/channels/<session>` with the runner's source, and a socket that takes one connection; beside
    it, out of sight, the secret of a runner that may come again.

    Its parents are closed to everyone else on this machine; inside it is read-only, and after the connection there is
    nothing left to connect to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._secret = folder.with_name(f"{folder.name}.secret")
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
        self._listen()

    def _listen(self) -> None:
        (self.folder / _SOCKET).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        fd = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{fd}/{_SOCKET}")  # a socket's path has at most 107 bytes, a folder's more
        finally:
            os.close(fd)
        (self.folder / _SOCKET).chmod(0o666)
        self._socket.listen()

    async def accept(self, seconds: float) -> Peer | None:
        """Take the one connection, if it comes within that time."""
        with anyio.move_on_after(seconds):
            peer = await self._next()
            self.close()
            return peer
        return None

    async def accept_again(self, pid: int, seconds: float) -> Peer | None:
        """Take the connection of the runner that was here before, if it comes within that time: the process `pid`,
        which knows the secret. Programs may connect as well, and are sent away."""
        self._listen()
        with anyio.move_on_after(seconds):
            while True:
                peer = await self._next()
                if peer.pid in (0, pid) and await self._knows_secret(peer.sock):
                    self.close()
                    return peer
                peer.sock.close()
        self.close()
        return None

    async def _next(self) -> Peer:
        assert self._socket is not None
        while True:
            await anyio.wait_readable(self._socket)
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                continue
            sock.setblocking(False)
            pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            return Peer(sock, pid)

    async def _knows_secret(self, sock: socket.socket) -> bool:
        try:
            with anyio.move_on_after(_WORD_SECONDS):
                await anyio.wait_readable(sock)
            said = sock.recv(256)
        except BlockingIOError:
            return False
        except BaseException:
            sock.close()
            raise
        return hmac.compare_digest(said, runner.AGAIN + b"\0" + self.secret)

    @property
    def exists(self) -> bool:
        """Whether a sandbox was met here, by this gateway or an earlier life of it."""
        return self.folder.exists()

    def move(self, folder: Path) -> None:
        """Be another session's; what is mounted of the folder stays so."""
        self.folder = self.folder.rename(folder)
        self._secret = folder.with_name(f"{folder.name}.secret")

    def make_secret(self) -> bytes:
        """Make what the runner will have to say to the next gateway."""
        secret = secrets.token_hex(16).encode()
        fd = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secret)
        return secret

    @property
    def secret(self) -> bytes:
        """What the runner was given; empty where none was told to stay."""
        try:
            return self._secret.read_bytes()
        except FileNotFoundError:
            return b""

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            (self.folder / _SOCKET).unlink(missing_ok=True)
            self._socket.close()
            self._socket = None

    def remove(self) -> None:
        """Stop listening, and remove the folder and the secret."""
        self.close()
        self._secret.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
