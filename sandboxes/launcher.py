"""The launcher: a small process that starts every bubblewrap of one gateway and is the parent of them all.

Run as a program of its own (`python -I -S launcher.py FD`), standard library only. It exists because bubblewrap's
`--die-with-parent` is bound to the thread that forked it, and because as root each start must join its cgroups, get
a mount namespace of its own and give up root before anything of the sandbox exists. It ends, and with it every
sandbox, when the gateway's end of its socket closes.

Messages are NUL-separated fields:
    gateway -> launcher   open ID UID STAGE  N NAME SOURCE...  N CGROUP...  ARGV...    with the descriptors of the start
                          kill ID
    launcher -> gateway   started ID PID | refused ID ERRNO | exited ID STATUS
The first descriptor becomes the standard error of bubblewrap, the others its descriptors 3, 4, 5 and so on.
"""

# ruff: noqa: PTH102, PTH123, PTH208, S606, SIM105, UP031 - few imports; starting programs is what it is for

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import ctypes
import fcntl
import os
import select
import stat
import sys
import time

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV = 2, 4
CLONE_NEWNS = 0x20000
PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 2.0
FIRST_FD = 3
MESSAGE_BYTES = 200_000
MAX_FDS = 64


def libc(name: str, *arguments: object) -> None:
    """Call a C function that answers 0, or raise its OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: bytes, target: bytes, kind: bytes, flags: int, data: bytes = b"") -> None:
    libc("mount", source, target, kind, ctypes.c_ulong(flags), data)


class Start:
    """One `open` request, parsed."""

    def __init__(self, fields: list[bytes], fds: list[int]) -> None:
        self.id, self.uid, self.stage = fields[0], int(fields[1]), fields[2]
        sources, rest = counted(fields[3:], 2)
        self.sources = list(zip(sources[::2], sources[1::2]))  # noqa: B905
        self.cgroups, self.argv = counted(rest, 1)
        self.fds = fds

    def become(self) -> None:
        """Turn this forked process into bubblewrap; never returns."""
        try:
            self.place_descriptors()
            for group in self.cgroups:
                join(group)
            if self.stage:
                self.show_sources()
            if self.uid >= 0:
                drop_to(self.uid)
            for number in (_signal.SIGPIPE, _signal.SIGCHLD, _signal.SIGINT, _signal.SIGTERM):
                _signal.signal(number, _signal.SIG_DFL)
            os.execve(self.argv[0], self.argv, {})
        except BaseException as error:
            os.write(2, f"launcher: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)

    def place_descriptors(self) -> None:
        above = FIRST_FD + len(self.fds) + 16
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in self.fds]
        os.dup2(copies[0], 2)
        for number, fd in enumerate(copies[1:], FIRST_FD):
            os.dup2(fd, number)

    def show_sources(self) -> None:
        """Bind each source below a small tmpfs, so that the session's uid reaches what lies in closed folders.

        The sources are opened before the tmpfs covers anything; no link at their end is followed.
        """
        libc("unshare", CLONE_NEWNS)
        mount(b"none", b"/", b"none", MS_REC | MS_PRIVATE)
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = [(name, os.open(source, flags)) for name, source in self.sources]
        mount(b"tmpfs", self.stage, b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=1m")
        for name, fd in opened:
            target = b"%s/%s" % (self.stage, name)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                os.mkdir(target, 0o755)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            mount(b"/proc/self/fd/%d" % fd, target, b"none", MS_BIND | MS_REC)
            os.close(fd)


def counted(fields: list[bytes], width: int) -> tuple[list[bytes], list[bytes]]:
    end = 1 + width * int(fields[0])
    return fields[1:end], fields[end:]


def join(procs: bytes) -> None:
    fd = os.open(procs, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"0")
    os.close(fd)


def drop_to(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, _signal.SIGKILL)
    except OSError:
        pass


def children() -> set[int]:
    """Our children: bubblewraps, and as a subreaper what a killed bubblewrap left.

    A bubblewrap that is killed while it starts leaves its child waiting for it for ever: the child has not yet asked
    to die with its parent.
    """
    me = os.getpid()
    try:
        with open("/proc/self/task/%d/children" % me, "rb") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == me}


def parent(pid: int) -> int:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read(1024).rpartition(b")")[2].split()[1])
    except OSError:
        return 0


class Launcher:
    """The loop: requests from the gateway, ends of bubblewraps."""

    def __init__(self, gateway: _socket.socket) -> None:
        self.gateway = gateway
        self.running: dict[int, bytes] = {}
        self.wake, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        while True:
            ready = select.select([self.gateway.fileno(), self.wake], [], [])[0]
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.gateway.fileno() in ready and not self.request():
                break
        self.end()

    def request(self) -> bool:
        data, control, _, _ = self.gateway.recvmsg(
            MESSAGE_BYTES, _socket.CMSG_SPACE(4 * MAX_FDS), _socket.MSG_CMSG_CLOEXEC
        )
        fds = [
            int.from_bytes(body[at : at + 4], sys.byteorder)
            for _, _, body in control
            for at in range(0, len(body) - 3, 4)
        ]
        word, _, rest = data.partition(b"\0")
        if word == b"open":
            self.open(rest.split(b"\0"), fds)
        elif word == b"kill":
            self.kill(rest)
        for fd in fds:
            os.close(fd)
        return bool(data)

    def open(self, fields: list[bytes], fds: list[int]) -> None:
        start = Start(fields, fds)
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(b"refused", start.id, error.errno or 0)
            return
        if pid == 0:
            start.become()
        self.running[pid] = start.id
        self.tell(b"started", start.id, pid)

    def kill(self, identifier: bytes) -> None:
        for pid, running in self.running.items():
            if running == identifier:
                kill(pid)

    def reap(self) -> bool:
        """Report the bubblewraps that ended, and kill what one that was killed left behind; False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self.running:
                identifier = self.running.pop(pid)
                for stray in children() - self.running.keys():
                    kill(stray)
                self.tell(b"exited", identifier, status)

    def end(self) -> None:
        """Kill every bubblewrap, and wait for them and their strays, for a bounded time."""
        for pid in self.running:
            kill(pid)
        deadline = time.monotonic() + END_SECONDS
        while self.reap() and time.monotonic() < deadline:
            select.select([self.wake], [], [], 0.01)

    def tell(self, word: bytes, identifier: bytes, number: int) -> None:
        try:
            self.gateway.send(b"%s\0%s\0%d" % (word, identifier, number))
        except OSError:  # the gateway is gone: the loop sees it next
            pass


def main(fd: int) -> None:
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE):
        _signal.signal(number, _signal.SIG_IGN)
    os.chdir("/")
    libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(fd, False)
    Launcher(_socket.socket(-1, -1, -1, fd)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
