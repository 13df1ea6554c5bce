"""The inner end of the channel: PID 1 of a sandbox, and the reused slots that run one call each.

This file runs alone inside every kind of sandbox: standard library only, Python >= 3.9, few and cheap imports.

PID 1 receives the four descriptors of a call (control, stdin, stdout, stderr) and hands them to an idle slot; it never
parses what a call asks. A slot reads the request from the control socket, serves it, ends whatever the call left
behind until the kernel says that there is nothing (ECHILD), and answers with lines of at most 64 bytes. A workload
shares the slots' uid and may kill or stop one; PID 1 it cannot: such a slot is replaced, its orphans are killed.

A background job keeps its slot, which holds the end of the job's output in its own memory and answers later calls
about it: so a job needs no gateway, and what it writes goes nowhere else.

On the channel:         gateway -> PID 1  `c` any slot, `n` NAME a slot for a new job, `j` NAME that job's slot, `l` the
                                          names of the jobs; each with the call's four descriptors
                                          stay SECRET SECONDS  from now on outlive the gateway, but not that long
                                          end
                        PID 1 -> gateway  ready 1, once; after a reconnection again SECRET
On the control socket:  gateway -> slot   4-byte length, NUL-separated fields; then `c` commits a write
                                          end of file kills
                        slot -> gateway   accepted, spawned, errno NAME, pids, nojob, file CODE, done N M,
                                          exit CODE KILLED, signal NUMBER KILLED, stuck; with `spawned` comes the
                                          master of a terminal, where one was asked for
"""

# ruff: noqa: PTH112, PTH118, PTH123, PTH208, SIM105, UP031 - imports cost time at every start; bytes know no f-strings

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` costs 4 ms of imports
import _socket
import ctypes
import errno
import fcntl
import gc
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # `typing` costs 6 ms of imports
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Action = tuple[Any, ...]
    Operation = Callable[["Call", list[bytes]], str]

READY = b"ready 1"
AGAIN = b"again"
STAY = b"stay"
END = b"end"
SPARE_SLOTS = 2
IDLE_SLOTS = 4
END_SECONDS = 2.0
LIST_SECONDS = 8.0
LIST_DEPTH = 100
LIST_BYTES = 64 << 20
BODY_BYTES = 4 << 20
LONGEST_WAIT = 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25
CHUNK = 256 * 1024
LOG_BYTES = 1 << 20  # of a job's output this much is kept for sure, twice as much at most
PIPE_BYTES = 64 * 1024
OOM_SCORE = b"500"
IDLE, LEAVING = b"i", b"l"  # what a slot says to PID 1
WALL = 0x40000000  # __WALL: also children that were cloned without an exit signal
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
FD = struct.Struct("i")
LENGTH = struct.Struct("!I")
FRAME = struct.Struct("!III")
WINDOW = struct.Struct("HHHH")
TIOCSWINSZ = 0x5414
ROOTS = ((b"workspace",), (b"home", b"agent"), (b"tmp",))
LIMITS = {
    b"core": resource.RLIMIT_CORE,
    b"nofile": resource.RLIMIT_NOFILE,
    b"fsize": resource.RLIMIT_FSIZE,
    b"nproc": resource.RLIMIT_NPROC,
    b"data": resource.RLIMIT_DATA,
}
IGNORED = [number for number in _signal.valid_signals() if number not in (_signal.SIGKILL, _signal.SIGSTOP)]


# --- both: descriptors, signals


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def receive(sock: _socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors; nothing where they were truncated, so that none stays open unseen."""
    data, control, flags, _ = sock.recvmsg(4096, _socket.CMSG_SPACE(4 * FD.size), _socket.MSG_CMSG_CLOEXEC)
    fds = [
        value
        for level, kind, body in control
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS
        for (value,) in FD.iter_unpack(body[: len(body) - len(body) % FD.size])
    ]
    if flags & (_socket.MSG_CTRUNC | _socket.MSG_TRUNC):
        close(fds)
        return b"", []
    return data, fds


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def wakeup_pipe() -> int:
    """A descriptor that becomes readable at every SIGCHLD of this process."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda number, frame: None)
    return reader


def drain(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        pass


def send_signal(pid: int) -> bool:
    try:
        os.kill(pid, _signal.SIGKILL)
    except OSError:
        return False
    return True


# --- the process tree


def parents() -> dict[int, int]:
    """Every process in /proc and its parent; zombies are left out, since they only wait for their own parent."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb", 0) as file:
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 1 and fields[0] != b"Z":
            found[int(name)] = int(fields[1])
    return found


def below(root: int, tree: dict[int, int]) -> list[int]:
    """Descendants of one process; `tree` maps a process to its parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in tree.items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        for pid in children.pop(todo.pop(), ()):
            found.append(pid)
            todo.append(pid)
    return found


def below_quick(root: int) -> list[int]:
    """The same by the kernel's own lists of children: quicker, but absent on some kernels and racy."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir("/proc/%d/task" % pid):
                with open("/proc/%d/task/%s/children" % (pid, task), "rb", 0) as file:
                    new = [int(child) for child in file.read().split()]
                found += new
                todo += new
        except OSError:
            continue
    return found


class Children:
    """The processes of one call, all of them descendants of this slot."""

    def __init__(self, wake: int) -> None:
        self.wake = wake
        self.main = 0
        self.status: int | None = None
        self.killed = 0
        self.gone = True

    def started(self, pid: int) -> None:
        self.main, self.status, self.killed, self.gone = pid, None, 0, False

    def reap(self, count_killed: bool = False) -> None:
        """Collect every dead child; `gone` is set by ECHILD and by nothing else."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | WALL)
            except ChildProcessError:
                self.gone = True
                return
            if pid == 0:
                return
            if pid == self.main and self.status is None:
                self.status = status
            elif count_killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == _signal.SIGKILL:
                self.killed += 1

    def end(self) -> bool:
        """Kill and reap until nothing is left; False where that did not converge in time."""
        deadline = time.monotonic() + END_SECONDS
        me, quick = os.getpid(), True
        self.reap()
        if not self.gone and self.status is None:
            send_signal(self.main)  # first and alone: alive, it could reap (and hide) children that are being killed
            select.select([self.wake], [], [], 0.05)
            drain(self.wake)
            self.reap(count_killed=True)
        while not self.gone:
            for pid in below_quick(me) if quick else below(me, parents()):
                send_signal(pid)
            quick = not quick
            select.select([self.wake], [], [], 0.005)
            drain(self.wake)
            self.reap(count_killed=True)
            if time.monotonic() > deadline:
                return False
        return True


# --- paths: every step relative to a descriptor, no link followed by the kernel


class Refused(Exception):
    """A file operation that ends here; the word is one of the gateway's file codes."""


class Cancelled(Exception):
    """The gateway has closed its end of the control socket."""


CODES = {
    errno.ENOENT: "missing_file",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "disk_full",
    errno.ESTALE: "file_changed",
}
INVALID = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.ENXIO,
    errno.EINVAL,
    errno.EBUSY,
)
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def code_of(error: OSError) -> str:
    number = error.errno or 0
    return CODES.get(number, "invalid_path" if number in INVALID else "sandbox_helper_failed")


def parts(path: bytes) -> list[bytes]:
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def root_of(names: list[bytes]) -> int:
    """Open a root; -1 while the names still lead to one."""
    for root in ROOTS:
        if root == tuple(names):
            return os.open(b"/" + b"/".join(names), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if root[: len(names)] == tuple(names):
            return -1
    raise Refused("invalid_path")


def link_target(name: bytes, folder: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


class Walk:
    """A descriptor that moves down from one of the roots; `names` is where it stands, free of links."""

    def __init__(self) -> None:
        self.fd = -1
        self.names: list[bytes] = []

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def restart(self, names: list[bytes]) -> None:
        self.close()
        self.names = []
        for name in names:
            self.down(name, make=False)

    def down(self, name: bytes, make: bool) -> None:
        if self.fd < 0:
            self.fd = root_of([*self.names, name])
        else:
            folder = self.child(name, make)
            self.close()
            self.fd = folder
        self.names.append(name)

    def child(self, name: bytes, make: bool) -> int:
        try:
            return os.open(name, FOLDER, dir_fd=self.fd)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, 0o755, dir_fd=self.fd)
        return os.open(name, FOLDER, dir_fd=self.fd)


def locate(path: bytes, follow: bool = False, make: bool = False) -> tuple[int, bytes]:
    """The folder that holds a path's last name, as a descriptor, and that name (`.` for a root itself).

    With `follow` links are resolved here, name by name, and may lead only to the roots; without, a link above the
    last name is refused. The last name is looked at by the caller.
    """
    walk, links, pending = Walk(), 0, parts(path)[::-1]
    try:
        while pending:
            name = pending.pop()
            if name == b"..":
                walk.restart(walk.names[:-1])
                continue
            target = link_target(name, walk.fd) if walk.fd >= 0 and (follow or pending) else None
            if target is not None:
                links += 1
                if not follow or links > 40:
                    raise Refused("invalid_path")
                pending += parts(target)[::-1]
                if target.startswith(b"/"):
                    walk.restart([])
            elif walk.fd >= 0 and not pending:
                return walk.fd, name
            else:
                walk.down(name, make)
        if walk.fd < 0:
            raise Refused("invalid_path")
        return walk.fd, b"."
    except BaseException:
        walk.close()
        raise


def open_regular(path: bytes, follow: bool) -> int:
    folder, name = locate(path, follow)
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise Refused("invalid_path")
        fd = os.open(name, os.O_RDONLY | PLAIN, dir_fd=folder)
    finally:
        os.close(folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise Refused("invalid_path")


def open_folder(path: bytes) -> int:
    folder, name = locate(path, follow=True)
    try:
        return os.open(name, FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def enter(name: bytes, folder: int) -> int:
    """Open a folder for emptying it, whatever its mode."""
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=folder)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=folder)


def first_full_folder(folder: int) -> bytes | None:
    """Remove what can be removed at once, in the order of the folder, up to the first folder that is not empty."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(name, dir_fd=folder)
                continue
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return name
    return None


# --- one call


class Call:
    """The four descriptors of a call, seen from its slot."""

    def __init__(self, fds: list[int]) -> None:
        self.control = _socket.socket(-1, -1, -1, fds[0])
        self.streams = fds[1:]

    def close_streams(self) -> None:
        close(self.streams)
        self.streams = []

    def close(self) -> None:
        self.close_streams()
        self.control.close()

    def tell(self, text: str, fds: list[int] | None = None) -> None:
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(map(FD.pack, fds)))] if fds else []
        try:
            self.control.sendmsg([text.encode() + b"\n"], rights, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)
        except OSError:
            pass

    def body(self) -> list[bytes]:
        """The request; raises Cancelled where the gateway went away or speaks another language."""
        (size,) = LENGTH.unpack(self.exactly(LENGTH.size))
        if size > BODY_BYTES:
            raise Cancelled
        return self.exactly(size).split(b"\0")

    def exactly(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            piece = self.control.recv(min(left, 1 << 20))
            if not piece:
                raise Cancelled
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def check(self, timeout: float = 0) -> None:
        if select.select([self.control], [], [], timeout)[0]:
            raise Cancelled

    def read_in(self) -> bytes:
        """The next bytes of stdin, empty at its end; the end of the control socket comes first."""
        ready = select.select([self.streams[0], self.control.fileno()], [], [])[0]
        if self.streams[0] in ready:
            return os.read(self.streams[0], CHUNK)
        self.committed()
        return os.read(self.streams[0], CHUNK)

    def committed(self) -> None:
        """Look whether the gateway commits: the byte stays where it is, anything else cancels."""
        if self.control.recv(1, _socket.MSG_PEEK) != b"c":
            raise Cancelled

    def write_out(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            readable, writable, _ = select.select([self.control], [self.streams[1]], [])
            if readable:
                raise Cancelled
            if writable:
                try:
                    view = view[os.write(self.streams[1], view) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise Cancelled from None


def find_program(name: bytes, path: bytes) -> list[bytes]:
    if b"/" in name:
        return [name]
    found = [os.path.join(folder, name) for folder in path.split(b":") if folder]
    return [program for program in found if os.access(program, os.X_OK) and not os.path.isdir(program)]


def on_streams(streams: list[int]) -> list[Action]:
    return [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)]


def on_terminal(name: str) -> list[Action]:
    """The leader of a session that opens a terminal has it as its controlling one."""
    opened = (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)
    return [opened, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]


def spawn(argv: list[bytes], env: dict[bytes, bytes], actions: list[Action]) -> int:
    """Start a program in a session of its own, with only its three streams open; OSError where the kernel refuses."""
    refused = OSError(errno.ENOENT, "not found")
    for program in find_program(argv[0], env.get(b"PATH", b"/usr/bin:/bin")):
        try:
            return os.posix_spawn(
                program, argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=IGNORED
            )
        except (FileNotFoundError, PermissionError) as error:
            refused = error
    raise refused


def prefer_as_victim(pid: int) -> None:
    """Let the kernel take the workload before the runner when memory ends."""
    try:
        fd = os.open("/proc/%d/oom_score_adj" % pid, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, OOM_SCORE)
    except OSError:
        pass
    finally:
        os.close(fd)


class Job:
    """A program that outlives the call which started it: its input, and the end of what it wrote."""

    def __init__(self, title: bytes, input_fd: int, output: int) -> None:
        self.title = title
        self.input = input_fd
        self.output = output
        self.log = bytearray()
        self.first = 0
        self.how = "running 0 0"
        self.times = [time.time_ns(), 0]
        os.set_blocking(input_fd, False)
        os.set_blocking(output, False)

    @property
    def running(self) -> bool:
        return self.how.startswith("running")

    def take(self) -> int:
        """Keep what has come, and of a flood only the end; returns how much came."""
        try:
            data = os.read(self.output, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self.close_output()
        self.log += data
        if len(self.log) > 2 * LOG_BYTES:
            surplus = len(self.log) - LOG_BYTES
            del self.log[:surplus]
            self.first += surplus
        return len(data)

    def ended(self, how: str) -> None:
        """Note how it ended and keep what is in its pipe, but not what others may go on writing to that."""
        self.how = how
        self.times[1] = time.time_ns()
        left = PIPE_BYTES
        while left > 0 and self.output >= 0:
            came = self.take()
            left -= came or left
        self.close_output()
        self.close_input()

    def part(self, offset: int, most: int) -> tuple[int, bytes]:
        """The kept bytes from an offset on; a negative one counts from the end."""
        total = self.first + len(self.log)
        start = min(max(offset if offset >= 0 else total + offset, self.first), total)
        return start, bytes(self.log[start - self.first : start - self.first + most])

    def state(self, start: int) -> bytes:
        """Seven NUL-ended fields: how it is, when it started and ended, what is kept from where to where, its title."""
        numbers = (*self.times, start, self.first, self.first + len(self.log))
        return b"".join(b"%s\0" % field for field in (self.how.encode(), *(b"%d" % one for one in numbers), self.title))

    def feed(self, data: bytes) -> int:
        """Write what its input takes now; -1 where that is closed."""
        if self.input < 0:
            return -1
        try:
            return os.write(self.input, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self.close_input()
            return -1

    def close_input(self) -> None:
        if self.input >= 0:
            os.close(self.input)
            self.input = -1

    def close_output(self) -> None:
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class Slot:
    """A forked process that serves one call at a time, and again after the last process of the call is gone."""

    def __init__(self, link: _socket.socket) -> None:
        self.link = link
        self.wake = wakeup_pipe()
        self.children = Children(self.wake)
        self.operations: dict[bytes, Operation] = {
            b"run": self.run,
            b"terminal": self.run_on_terminal,
            b"start": self.start_job,
            b"read": self.read_file,
            b"write": self.write_file,
            b"list": self.list_folder,
            b"remove": self.remove_entry,
            b"gather": self.read_many,
            b"scatter": self.write_many,
        }
        self.job: Job | None = None
        self.job_operations: dict[bytes, Operation] = {
            b"look": self.look,
            b"feed": self.feed,
            b"stop": self.stop,
            b"forget": self.forget,
        }

    def serve(self) -> None:
        while self.serve_one(self.operations):
            if self.job is not None:
                self.attend(self.job)
                return  # the job is forgotten, and the process may be wanted for another

    def serve_one(self, operations: dict[bytes, Operation]) -> bool:
        """Serve the next call; False at the end of the link."""
        data, fds = receive(self.link)
        if not data or len(fds) != 4:
            return False
        call = Call(fds)
        answer = self.answer(call, operations)
        call.close_streams()
        if self.job is None:  # told before the answer, as the next call may follow that at once
            self.link.send(IDLE if operations is self.operations else LEAVING)
        call.tell(answer)
        call.close()
        return True

    def answer(self, call: Call, operations: dict[bytes, Operation]) -> str:
        try:
            operation, *fields = call.body()
            call.tell("accepted")
            return operations[operation](call, fields)
        except Refused as error:
            return "file " + str(error)
        except Cancelled:
            return "signal 9 0"
        except OSError as error:
            return "file " + code_of(error)

    def run(self, call: Call, fields: list[bytes]) -> str:
        refused = self.launch(fields, on_streams(call.streams))
        if refused:
            return refused
        call.close_streams()
        call.tell("spawned")
        self.watch(call)
        return self.end()

    def run_on_terminal(self, call: Call, fields: list[bytes]) -> str:
        """The same on a new terminal of that size, whose master goes to the gateway and stays with nobody here."""
        master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, TIOCSWINSZ, WINDOW.pack(int(fields[1]), int(fields[0]), 0, 0))
            refused = self.launch(fields[2:], on_terminal(os.ttyname(slave)))
            if refused:
                return refused
            call.tell("spawned", [master])
        finally:
            close([master, slave])
            call.close_streams()
        self.watch(call)
        return self.end()

    def launch(self, fields: list[bytes], actions: list[Action]) -> str:
        """Start a program; the answer to the call where the kernel refuses it, else nothing."""
        folder = open_folder(fields[0])
        try:
            os.fchdir(folder)
        finally:
            os.close(folder)
        end = 2 + int(fields[1])
        env = {name: value for name, _, value in (item.partition(b"=") for item in fields[end:])}
        try:
            pid = spawn(fields[2:end], env, actions)
        except OSError as error:
            return "errno " + errno.errorcode.get(error.errno or 0, "EIO")
        finally:
            os.chdir("/")
        self.children.started(pid)
        prefer_as_victim(pid)
        return ""

    def end(self) -> str:
        """End the program and what it left behind; how that went is the last word."""
        return self.outcome() if self.children.end() else "stuck"

    def watch(self, call: Call) -> None:
        """Return when the program has ended, or when the gateway wants it to."""
        poll = select.poll()
        poll.register(call.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        control = call.control.fileno()
        while self.children.status is None:
            if any(fd == control for fd, _ in poll.poll()):
                return
            drain(self.wake)
            self.children.reap()

    def outcome(self) -> str:
        status = self.children.status or 0
        if os.WIFSIGNALED(status):
            return "signal %d %d" % (os.WTERMSIG(status), self.children.killed)
        return "exit %d %d" % (os.WEXITSTATUS(status), self.children.killed)

    def start_job(self, call: Call, fields: list[bytes]) -> str:
        """Start a program whose output is kept here, and whose input stays open."""
        theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
        ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
        try:
            refused = self.launch(fields[1:], on_streams([theirs_in, theirs_out, theirs_out]))
        except BaseException:
            close([ours_in, ours_out])
            raise
        finally:
            close([theirs_in, theirs_out])
        if refused:
            close([ours_in, ours_out])
            return refused
        self.job = Job(fields[0], ours_in, ours_out)
        return "done 0 1"

    def attend(self, job: Job) -> None:
        """Keep what the job writes, notice its end and serve the calls about it, until one of them forgets it."""
        while self.job is not None:
            poll = select.poll()
            for fd in (self.link.fileno(), self.wake, job.output):
                if fd >= 0:
                    poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if job.output in ready:
                job.take()
            if self.wake in ready:
                drain(self.wake)
                self.children.reap()
                if self.children.status is not None:
                    self.end_job(job)
            if self.link.fileno() in ready and not self.serve_one(self.job_operations):
                os._exit(1)

    def end_job(self, job: Job) -> None:
        if job.running:
            job.ended(self.end())

    def look(self, call: Call, fields: list[bytes]) -> str:
        """Say how the job is, then what it wrote: from an offset on, or so far before the end; at most so much."""
        job = self.the_job()
        os.set_blocking(call.streams[1], False)
        start, data = job.part(int(fields[0]), int(fields[1]))
        call.write_out(job.state(start))
        call.write_out(data)
        return "done %d 1" % len(data)

    def feed(self, call: Call, fields: list[bytes]) -> str:
        """Give the job what its input takes at once, and then perhaps its end; `done` counts the bytes taken."""
        data = b"\0".join(fields[1:])
        job = self.the_job()
        taken = job.feed(data)
        if fields[0] == b"1" and taken == len(data):
            job.close_input()
        return "done %d %d" % (max(taken, 0), taken >= 0)

    def stop(self, call: Call, fields: list[bytes]) -> str:
        job = self.the_job()
        self.end_job(job)
        return "stuck" if job.how == "stuck" else "done 0 1"

    def forget(self, call: Call, fields: list[bytes]) -> str:
        answer = self.stop(call, fields)
        if answer != "stuck":
            self.job = None
        return answer

    def the_job(self) -> Job:
        assert self.job is not None  # these operations are served only while there is one
        return self.job

    def read_file(self, call: Call, fields: list[bytes]) -> str:
        start, follow = int(fields[1]), fields[3] == b"1"
        fd = open_regular(fields[0], follow)
        try:
            os.set_blocking(call.streams[1], False)
            end = os.fstat(fd).st_size
            end = min(end, int(fields[2])) if fields[2] else end
            sent = start
            while sent < end:
                chunk = os.pread(fd, min(CHUNK, end - sent), sent)
                if not chunk:
                    break
                call.write_out(chunk)
                sent += len(chunk)
        finally:
            os.close(fd)
        return "done %d 1" % (sent - start)

    def read_many(self, call: Call, fields: list[bytes]) -> str:
        """Small files, each whole: a line `ok SIZE` and its bytes, or a line with the reason."""
        os.set_blocking(call.streams[1], False)
        limit, waiting, size = int(fields[0]), [], 0
        for path in fields[1:]:
            try:
                data = read_small(path, limit)
                waiting += [b"ok %d\n" % len(data), data]
                size += len(data) + 16
            except Refused as error:
                waiting.append(b"%s\n" % str(error).encode())
            except OSError as error:
                waiting.append(b"%s\n" % code_of(error).encode())
            if size > CHUNK:
                call.write_out(b"".join(waiting))
                waiting, size = [], 0
        call.write_out(b"".join(waiting))
        return "done %d 1" % (len(fields) - 1)

    def write_many(self, call: Call, fields: list[bytes]) -> str:
        """Small files, each whole or not at all; the first that is refused ends it, told by place and reason."""
        frames, count = Frames(call), 0
        while frames.more():
            name_size, mode, size = FRAME.unpack(frames.take(FRAME.size))
            path, data = frames.take(name_size), frames.take(size)
            try:
                write_small(path, mode, data)
            except Refused as error:
                return self.stopped(call, count, str(error))
            except OSError as error:
                return self.stopped(call, count, code_of(error))
            count += 1
        return "done %d 1" % count

    def stopped(self, call: Call, count: int, code: str) -> str:
        os.write(call.streams[1], b"%d %s" % (count, code.encode()))  # fits; the commit must not be taken for an end
        return "done %d 0" % count

    def write_file(self, call: Call, fields: list[bytes]) -> str:
        new = NewFile(fields[0])
        try:
            size = self.fill(call, new.fd)
            new.keep(int(fields[1]))
        finally:
            new.close()
        return "done %d 1" % size

    def fill(self, call: Call, fd: int) -> int:
        """Copy stdin to its end and wait for the commit: a cancelled upload never becomes a file."""
        size = 0
        while True:
            chunk = call.read_in()
            if not chunk:
                break
            size += write_all(fd, chunk)
        if call.control.recv(1) != b"c":
            raise Cancelled
        return size

    def list_folder(self, call: Call, fields: list[bytes]) -> str:
        os.set_blocking(call.streams[1], False)
        listing = Lister(call, int(fields[2]))
        folder, name = locate(fields[0])
        try:
            complete = listing.run(folder, name, recursive=fields[1] == b"1")
        finally:
            os.close(folder)
        return "done %d %d" % (listing.count, complete)

    def remove_entry(self, call: Call, fields: list[bytes]) -> str:
        folder, name = locate(fields[0])
        try:
            if name == b".":
                raise Refused("invalid_path")
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
            elif fields[1] == b"1":
                remove_tree(call, name, folder)
            else:
                os.rmdir(name, dir_fd=folder)
        finally:
            os.close(folder)
        return "done 1 1"


def read_small(path: bytes, limit: int) -> bytes:
    fd = open_regular(path, follow=False)
    try:
        pieces: list[bytes] = []
        size = 0
        while size <= limit:
            piece = os.read(fd, limit + 1 - size)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
    finally:
        os.close(fd)
    raise Refused("content_too_large")


class NewFile:
    """A file that becomes visible whole, under its name, when it is kept; else it is forgotten."""

    def __init__(self, path: bytes) -> None:
        self.folder, self.name = locate(path, make=True)
        self.temporary = b".sandgate-" + os.urandom(8).hex().encode()
        try:
            refuse_special(self.name, self.folder)
            self.fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600, dir_fd=self.folder)
        except BaseException:
            os.close(self.folder)
            raise

    def keep(self, mode: int) -> None:
        os.fchmod(self.fd, mode & 0o777)
        os.rename(self.temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.temporary = b""

    def close(self) -> None:
        if self.temporary:
            forget_file(self.temporary, self.folder)
        os.close(self.fd)
        os.close(self.folder)


def write_small(path: bytes, mode: int, data: bytes) -> None:
    new = NewFile(path)
    try:
        write_all(new.fd, data)
        new.keep(mode)
    finally:
        new.close()


def write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


class Frames:
    """Standard input in pieces of announced sizes; it may end between two files, and nowhere else."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.buffer = b""
        self.at = 0

    def more(self) -> bool:
        if self.at == len(self.buffer):
            self.buffer, self.at = self.call.read_in(), 0
        return bool(self.buffer)

    def take(self, size: int) -> bytes:
        while len(self.buffer) - self.at < size:
            chunk = self.call.read_in()
            if not chunk:
                raise Cancelled
            self.buffer, self.at = self.buffer[self.at :] + chunk, 0
        self.at += size
        return self.buffer[self.at - size : self.at]


def forget_file(name: bytes, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass


def refuse_special(name: bytes, folder: int) -> None:
    """A write replaces regular files and links, nothing else."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise Refused("invalid_path")


def remove_tree(call: Call, name: bytes, parent: int) -> None:
    """Remove a folder of any depth with one descriptor: down by name, up by `..`, which must be where we came from."""
    here = enter(name, parent)
    trail, came_from = [name], [identity(parent)]
    try:
        while trail:
            call.check()
            child = first_full_folder(here)
            if child is not None:
                below_here = enter(child, here)
                trail.append(child)
                came_from.append(identity(here))
                os.close(here)
                here = below_here
                continue
            up = (
                os.open(b"..", FOLDER, dir_fd=here)
                if len(trail) == 1
                else os.open(b"..", os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=here)
            )
            os.close(here)
            here = up
            if identity(here) != came_from.pop():
                raise Refused("file_changed")
            os.rmdir(trail.pop(), dir_fd=here)
    finally:
        os.close(here)


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class Lister:
    """Writes records of five NUL-ended fields: path, kind, size, mode, time of change in nanoseconds."""

    def __init__(self, call: Call, max_entries: int) -> None:
        self.call = call
        self.left = max_entries
        self.room = LIST_BYTES
        self.count = 0
        self.deadline = time.monotonic() + LIST_SECONDS
        self.buffer: list[bytes] = []
        self.buffered = 0

    def run(self, folder: int, name: bytes, recursive: bool) -> bool:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        complete = self.walk(folder, name, recursive) if is_folder else self.emit(b".", status)
        self.call.write_out(b"".join(self.buffer))
        return complete

    def walk(self, folder: int, name: bytes, recursive: bool) -> bool:
        """Depth first, in name order, with one open descriptor for each level."""
        top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=folder)
        try:
            names, complete = self.names(top)
        except BaseException:
            os.close(top)
            raise
        levels: list[tuple[int, bytes, list[bytes]]] = [(top, b"", names)]
        try:
            while levels:
                here, prefix, names = levels[-1]
                if not names:
                    os.close(levels.pop()[0])
                    continue
                name = names.pop()
                try:
                    status = os.stat(name, dir_fd=here, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except PermissionError:
                    complete = False
                    continue
                if not self.emit(prefix + name, status):
                    return False
                if recursive and stat.S_ISDIR(status.st_mode):
                    complete &= self.enter(levels, here, name, prefix)
        finally:
            for here, _, _ in levels:
                os.close(here)
        return complete

    def enter(self, levels: list[tuple[int, bytes, list[bytes]]], here: int, name: bytes, prefix: bytes) -> bool:
        """Go down into a folder; False where its content stays unseen."""
        if len(levels) > LIST_DEPTH:
            return False
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=here)
        except OSError:
            return False
        levels.append((fd, prefix + name + b"/", []))  # closed by the caller from here on
        names, complete = self.names(fd)
        levels[-1][2].extend(names)
        return complete

    def names(self, fd: int) -> tuple[list[bytes], bool]:
        """Names in reverse order, no more than may still be shown."""
        found: list[bytes] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(found) >= self.left or (len(found) % 1024 == 0 and time.monotonic() > self.deadline):
                    return sorted(found, reverse=True), False
                found.append(os.fsencode(entry.name))
        return sorted(found, reverse=True), True

    def emit(self, path: bytes, status: os.stat_result) -> bool:
        """Write one record; False when a cap is reached."""
        record = b"%s\0%s\0%d\0%d\0%d\0" % (
            path,
            kind_of(status.st_mode),
            status.st_size,
            stat.S_IMODE(status.st_mode),
            status.st_mtime_ns,
        )
        if self.left < 1 or len(record) > self.room or time.monotonic() > self.deadline:
            return False
        self.left -= 1
        self.room -= len(record)
        self.count += 1
        self.buffer.append(record)
        self.buffered += len(record)
        if self.buffered > 65536:
            self.call.write_out(b"".join(self.buffer))
            self.buffer, self.buffered = [], 0
        return True


def kind_of(mode: int) -> bytes:
    if stat.S_ISREG(mode):
        return b"file"
    if stat.S_ISDIR(mode):
        return b"directory"
    return b"symlink" if stat.S_ISLNK(mode) else b"other"


# --- PID 1


class Runner:
    """PID 1: a switch for descriptors, and the parent that nothing inside can kill, stop or read.

    Without a gateway it looks for the next one at `where`, if it was told to stay.
    """

    def __init__(self, channel: _socket.socket, where: str) -> None:
        self.channel: _socket.socket | None = channel
        self.where = where
        self.secret = b""
        self.deadline = float("inf")
        self.pause = FIRST_PAUSE
        self.wake = wakeup_pipe()
        self.slots: dict[int, _socket.socket] = {}
        self.idle: list[int] = []
        self.jobs: dict[bytes, int] = {}
        self.leaving: set[int] = set()
        self.strays = False
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def serve(self) -> None:
        while time.monotonic() < self.deadline:
            ready = {fd for fd, _ in self.poll.poll(1000 * self.patience())}
            for pid, link in list(self.slots.items()):
                if link.fileno() in ready:
                    self.hear(pid, link)
            if self.wake in ready or self.strays:
                drain(self.wake)
                self.reap()
                self.kill_strays()
            if self.channel is None:
                self.reconnect()
            elif self.channel.fileno() in ready and not self.obey(self.channel):
                return

    def patience(self) -> float:
        """How many seconds may pass without a word from anybody."""
        seconds = min(self.deadline - time.monotonic(), LONGEST_WAIT)
        if self.channel is None:
            seconds = min(seconds, self.pause)
        return max(min(seconds, 0.005) if self.strays else seconds, 0)

    def obey(self, channel: _socket.socket) -> bool:
        """Do what the gateway says; False where that is to end, or where it went and left no word to stay."""
        try:
            data, fds = receive(channel)
        except OSError:
            data, fds = b"", []
        if data and len(fds) == 4:
            self.hand_over(data, fds)
            return True
        close(fds)
        word, *fields = data.split(b"\0")
        if word == STAY:
            self.secret, self.deadline = fields[0], time.monotonic() + float(fields[1])
            return True
        self.poll.unregister(channel)
        channel.close()
        self.channel = None
        return bool(self.secret) and word != END

    def reconnect(self) -> None:
        """Look once whether a gateway waits; the secret tells it who comes. Programs may connect as well, so that
        their queue may be full: that is no reason to wait here."""
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        try:
            sock.connect(self.where)
            sock.send(AGAIN + b"\0" + self.secret, _socket.MSG_NOSIGNAL)
        except OSError:
            sock.close()
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            return
        self.channel, self.pause = sock, FIRST_PAUSE
        self.poll.register(sock, select.POLLIN)

    def hear(self, pid: int, link: _socket.socket) -> None:
        try:
            data = link.recv(16)
        except OSError:
            data = b""
        if not data:
            self.drop(pid)
            return
        self.forget_jobs(pid)
        if data == LEAVING:
            return
        if len(self.idle) >= IDLE_SLOTS:
            self.leaving.add(pid)  # it may still have to give its answer; then it sees the end of its link and goes
            self.forget(pid)
        elif pid not in self.idle:
            self.idle.append(pid)

    def forget_jobs(self, pid: int) -> None:
        self.jobs = {name: slot for name, slot in self.jobs.items() if slot != pid}

    def forget(self, pid: int) -> None:
        self.forget_jobs(pid)
        link = self.slots.pop(pid, None)
        if pid in self.idle:
            self.idle.remove(pid)
        if link is not None:
            self.poll.unregister(link)
            link.close()

    def drop(self, pid: int) -> None:
        """End a slot: its call's control socket closes with it, and its orphans become strays."""
        self.forget(pid)
        send_signal(pid)
        self.strays = True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | WALL)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.slots:
                self.drop(pid)
            elif os.WIFSTOPPED(status):
                send_signal(pid)
            else:
                self.leaving.discard(pid)

    def kill_strays(self) -> None:
        """Kill what belongs to no slot: children that PID 1 adopted, and their descendants."""
        tree = parents()
        me = os.getpid()
        mine = self.leaving.union(self.slots)
        for slot in self.slots:
            mine.update(below(slot, tree))
        strays = [pid for pid in below(me, tree) if pid not in mine]
        for pid in strays:
            send_signal(pid)
        self.strays = bool(strays)

    def hand_over(self, data: bytes, fds: list[int]) -> None:
        """Give one call to a slot."""
        refused = self.route(data[:1], data[1:], fds)
        if refused:
            self.say(fds[0], refused)
        close(fds)
        while len(self.idle) < SPARE_SLOTS and self.fork():
            pass

    def route(self, word: bytes, name: bytes, fds: list[int]) -> bytes:
        """Give a call to the slot that it is for; the answer where there is none, or where PID 1 has it itself."""
        if word == b"l":
            self.say(fds[2], b"".join(job + b"\n" for job in self.jobs))
            return b"done 0 1\n"
        if word == b"j":
            return b"" if self.give(self.jobs.get(name, 0), fds) else b"nojob\n"
        while self.idle or self.fork():
            pid = self.idle.pop()
            if self.give(pid, fds):
                if word == b"n":
                    self.jobs[name] = pid
                return b""
        return b"pids\n"

    def give(self, pid: int, fds: list[int]) -> bool:
        if pid not in self.slots:
            return False
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(map(FD.pack, fds)))]
        try:
            self.slots[pid].sendmsg([b"c"], rights, _socket.MSG_DONTWAIT)
        except OSError:
            self.drop(pid)
            return False
        return True

    def say(self, fd: int, text: bytes) -> None:
        """Write what fits any empty pipe or socket."""
        try:
            os.write(fd, text)
        except OSError:
            pass

    def fork(self) -> bool:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return False
        if pid == 0:
            become_slot(theirs)
        theirs.close()
        self.slots[pid] = ours
        self.idle.append(pid)
        self.poll.register(ours, select.POLLIN)
        return True


def become_slot(link: _socket.socket) -> None:
    """Run as a slot and never return; every descriptor of PID 1 is closed first."""
    code = 1
    try:
        _signal.set_wakeup_fd(-1)
        fd = link.fileno()
        os.closerange(3, fd)
        os.closerange(fd + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        Slot(link).serve()
        code = 0
    finally:
        os._exit(code)


def apply(settings: bytes) -> None:
    """Set what holds for every process of the sandbox: `name=value` fields after the word `go`."""
    word, *fields = settings.split(b"\0")
    if word != b"go":
        raise SystemExit("no settings")
    for field in fields:
        name, _, value = field.partition(b"=")
        hard = resource.getrlimit(LIMITS[name])[1]  # the gateway's own, which may be lower and cannot be raised
        limit = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(LIMITS[name], (limit, limit))


def connect(channel: str) -> _socket.socket:
    """The channel by its number, inherited; or by the path of the socket where the gateway waits."""
    if channel.isdigit():
        os.set_inheritable(int(channel), False)
        return _socket.socket(-1, -1, -1, int(channel))
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    sock.connect(channel)
    return sock


def main(where: str) -> None:
    prctl(PR_SET_DUMPABLE, 0)
    for number in IGNORED:
        try:
            _signal.signal(number, _signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    os.umask(0o022)
    os.chdir("/")
    channel = connect(where)
    apply(channel.recv(4096))
    runner = Runner(channel, where)
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):  # standard error led to whoever started us until here
        os.dup2(nothing, number)
    os.close(nothing)
    gc.collect()
    gc.freeze()
    channel.send(READY)
    while len(runner.idle) < SPARE_SLOTS and runner.fork():
        pass
    runner.serve()


if __name__ == "__main__":
    main(sys.argv[1])
