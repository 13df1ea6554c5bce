"""The gateway's end of the direct channel, the same for every kind: calls over descriptors, none of it trusted.

What crosses is a pipe end, a control socket or /dev/null, made for this one call. What comes back are short lines on
the control socket, read by plain `recv`, so that no descriptor can come with them.
"""

import array
import asyncio
import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import termios
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from sandboxes import runner
from sandboxes.errors import FILE_CODES, CommandRefused, FileCode, FileRefused, SandboxLost
from sandboxes.sandbox import CHUNK_BYTES

ANY_SLOT: Final = b"c"
ACCEPT_SECONDS: Final = 1.0
END_SECONDS: Final = 2.5
"""Two seconds are the slot's own bound for the end of a tree; the rest is for the answer."""
_LOOK_SECONDS: Final = 0.02
"""When PID 1 dies, a slot that was just forked may hold its channel a moment longer than the others live."""
PIPE_BYTES: Final = 256 * 1024
_F_SETPIPE_SZ = 1031
_LINE_BYTES = 64
_LENGTH = struct.Struct("!I")
_MASTER = (5, 2)
"""The device number of every pseudo-terminal's master."""
_MOST_RIGHTS = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_END = re.compile(r"(exit|signal|done) (\d{1,12}) (\d{1,9})")
_LOST_SLOT = "the program's slot was killed or stopped; no exit status was seen"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word of a call: exit, signal, done, errno, file, pids, nojob, or `gone` where none was said."""

    word: str
    number: int = 0
    count: int = 0
    detail: str = ""


class Channel:
    """The channel of one sandbox. `end` kills the sandbox at once; it is called when its answers stop making sense.
    `files_lost` says that the workspace goes with the sandbox."""

    def __init__(self, sock: socket.socket, end: Callable[[], None], *, files_lost: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._end = end
        self._files_lost = files_lost
        self._calls: set[Call] = set()
        self._loop = asyncio.get_running_loop()
        self.lost: SandboxLost | None = None
        self.told = False
        self.nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._loop.add_reader(sock.fileno(), self._hear)

    async def call(
        self,
        body: bytes,
        stdin: int,
        stdout: int,
        stderr: int,
        on_end: Callable[[], None],
        to: bytes = ANY_SLOT,
        *,
        terminal: bool = False,
    ) -> "Call":
        """Hand over one request with its three streams, which may be closed afterwards; `on_end` runs once, when the
        last word has come, before anybody who waits for it. `to` is the address that PID 1 reads; with `terminal` the
        call brings the master of one, which is its caller's to take and close."""
        self.check()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        patience = ACCEPT_SECONDS if to == ANY_SLOT else ACCEPT_SECONDS + END_SECONDS  # a job's may be ending a tree
        call = Call(self, ours, on_end, patience, terminal=terminal)
        try:
            with theirs:
                rest = call.begin(_LENGTH.pack(len(body)) + body)
                await self._hand_over(to, array.array("i", (theirs.fileno(), stdin, stdout, stderr)))
            if rest:
                await call.send_rest(rest)
        except BaseException:
            await call.aclose()
            raise
        return call

    def check(self) -> None:
        """Raise the loss, if the sandbox is lost."""
        if self.lost is not None:
            self.told = True
            raise SandboxLost(self.lost.message, self.lost.remedy, files_lost=self.lost.files_lost)

    def lose(self, reason: str) -> None:
        """End the sandbox and every call in it."""
        if self.lost is not None:
            return
        self._end()
        self.say(runner.END)  # where to kill it is not ours
        self._close(SandboxLost(reason, files_lost=self._files_lost))

    def leave(self) -> None:
        """End every call and let the sandbox be: a runner that was told to stay waits for the next gateway."""
        if self.lost is None:
            self._close(SandboxLost("the gateway has stopped"))

    def say(self, *words: bytes) -> None:
        """Tell PID 1 something that is no call; one that does not listen is lost anyway."""
        with contextlib.suppress(OSError):
            self._socket.send(b"\0".join(words))

    def _close(self, lost: SandboxLost) -> None:
        self.lost = lost
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        os.close(self.nothing)
        for call in tuple(self._calls):
            call.finish(Ended("gone"))

    def add(self, call: "Call") -> None:
        self._calls.add(call)

    def forget(self, call: "Call") -> None:
        self._calls.discard(call)

    def look(self) -> None:
        """Notice now whether PID 1 is dead, and not only a slot."""
        if self.lost is None:
            self._hear()

    def _hear(self) -> None:
        """PID 1 says nothing after its first message: whatever comes is its end."""
        try:
            data = self._socket.recv(16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.lose("the sandbox said what it must not" if data else "the sandbox has died")

    async def _hand_over(self, to: bytes, fds: "array.array[int]") -> None:
        deadline = self._loop.time() + ACCEPT_SECONDS
        while True:
            self.check()
            try:
                self._socket.sendmsg([to], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            except BlockingIOError:
                if self._loop.time() > deadline:
                    self.lose("the sandbox takes no calls")
                await asyncio.sleep(0.002)
            except OSError:
                self.lose("the sandbox has died")
            else:
                return


class Call:
    """One request on its way; closing it kills what it started."""

    def __init__(
        self,
        channel: Channel,
        control: socket.socket,
        on_end: Callable[[], None],
        accept_seconds: float,
        *,
        terminal: bool,
    ) -> None:
        self._channel = channel
        self._wants_master = terminal
        self._master = -1
        self._accept_seconds = accept_seconds
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Future[None] | None = None
        self.killed = False
        self.accepted = False
        self._on_end = on_end
        self.killed = False
        self.ended: Ended | None = None

    def begin(self, request: bytes) -> bytes:
        """Write the request, listen, start the clock; returns what did not fit."""
        self._channel.add(self)
        sent = self._control.send(request)
        self._loop.add_reader(self._control.fileno(), self._hear)
        self._timer = self._loop.call_later(self._accept_seconds, self._late, "the sandbox does not answer")
        return request[sent:]

    async def send_rest(self, rest: bytes) -> None:
        """Send what `begin` left, as the slot takes it; a call that ends meanwhile says why itself."""
        view = memoryview(rest)
        while view and self.ended is None:
            self._writer = self._loop.create_future()
            self._loop.add_writer(self._control.fileno(), _resolve, self._writer)
            try:
                await self._writer
            finally:
                self._forget_writer()
            if self.ended is None:
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    view = view[self._control.send(view) :]

    def _forget_writer(self) -> None:
        if self._writer is not None:
            self._loop.remove_writer(self._control.fileno())
            _resolve(self._writer)
            self._writer = None

    def take_master(self) -> int:
        """The master of the call's terminal, once; -1 where there is none."""
        master, self._master = self._master, -1
        return master

    async def begun(self) -> None:
        """Return when the program runs, or the call is over."""
        await self._begun.wait()

    async def over(self) -> Ended:
        """Return the last word; SandboxLost where the sandbox died first."""
        await self._over.wait()
        ended = self.ended or Ended("gone")
        if ended.word == "gone":
            self._channel.check()
        return ended

    def commit(self) -> None:
        if self.ended is None:
            with contextlib.suppress(OSError):
                self._control.send(b"c")

    def kill(self) -> None:
        """Ask for the end of the tree; without an answer in time the sandbox is ended."""
        if self.ended is not None or self.killed:
            return
        self.killed = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._start_clock(END_SECONDS, "the program could not be killed")

    async def aclose(self) -> None:
        """Kill what still runs and wait until it is dead; bounded, and not to be cancelled."""
        if self.ended is None:
            self.kill()
            with anyio.CancelScope(shield=True):
                await self._over.wait()

    def finish(self, ended: Ended) -> None:
        if self.ended is not None:
            return
        self.ended = ended
        self._stop_clock()
        self._forget_writer()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        self._channel.forget(self)
        self._on_end()
        self._begun.set()
        self._over.set()

    def _start_clock(self, seconds: float, reason: str) -> None:
        self._stop_clock()
        self._timer = self._loop.call_later(seconds, self._late, reason)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, reason: str) -> None:
        self._channel.lose(reason)

    def _hear(self) -> None:
        try:
            data = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if self.ended is not None:
            return
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._loop.call_later(_LOOK_SECONDS, self._slot_lost)
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._buffer) > _LINE_BYTES:
            self._nonsense()

    def _receive(self) -> bytes:
        """What was said. Descriptors come only where a terminal's master was asked for, and of them only that one."""
        if not self._wants_master:
            return self._control.recv(4096)
        data, control, flags, _ = self._control.recvmsg(4096, _MOST_RIGHTS, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, body in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
        if fds:
            self._wants_master = False
            if len(fds) > 1 or flags & socket.MSG_CTRUNC or not _is_master(fds[0]):
                for fd in fds:
                    os.close(fd)
                self._nonsense()
                return b""
            os.set_blocking(fds[0], False)
            self._master = fds[0]
        return data

    def _slot_lost(self) -> None:
        self._channel.look()
        self.finish(Ended("gone", detail=_LOST_SLOT))

    def _line(self, line: bytes) -> None:
        if self.ended is not None:
            return
        text = line[: _LINE_BYTES + 1].decode("ascii", "replace")
        word, _, detail = text.partition(" ")
        if len(line) > _LINE_BYTES:
            self._nonsense()
        elif text in ("accepted", "spawned"):
            self._progress(text)
        elif match := _END.fullmatch(text):
            self.finish(Ended(match[1], int(match[2]), int(match[3])))
        elif (word == "errno" and re.fullmatch(r"[A-Z0-9]{2,20}", detail)) or (word == "file" and detail in FILE_CODES):
            self.finish(Ended(word, detail=detail))
        elif text in ("pids", "nojob"):
            self.finish(Ended(text))
        elif text == "stuck":
            self._channel.lose("what the program left behind could not be ended")
        else:
            self._nonsense()

    def _progress(self, text: str) -> None:
        if not self.killed:
            self._stop_clock()
        self.accepted = True
        if text == "spawned":
            if self._wants_master:
                self._nonsense()
            self._begun.set()

    def _nonsense(self) -> None:
        self._channel.lose("the sandbox said what it must not")


def _is_master(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISCHR(status.st_mode) and (os.major(status.st_rdev), os.minor(status.st_rdev)) == _MASTER


def pipe_for_output(size: int = PIPE_BYTES) -> tuple[int, int]:
    """Make a pipe of that size, 0 for the usual one."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if size:
        with contextlib.suppress(OSError):  # EPERM: this user's pipes are at their limit, a small one works too
            fcntl.fcntl(writer, _F_SETPIPE_SZ, size)
    return reader, writer


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


class _Pipe:
    """Our end of a pipe, non-blocking. Closing it wakes who waits for it."""

    def __init__(self, fd: int, *, writes: bool) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._writes = writes
        self._waiter: asyncio.Future[None] | None = None
        if fd >= 0:
            os.set_blocking(fd, False)

    async def _ready(self) -> None:
        """Wait until the descriptor is ready, or closed; cheaper than anyio's, which keeps a table for all tasks."""
        self._waiter = self._loop.create_future()
        add = self._loop.add_writer if self._writes else self._loop.add_reader
        add(self._fd, _resolve, self._waiter)
        try:
            await self._waiter
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._waiter is None:
            return
        (self._loop.remove_writer if self._writes else self._loop.remove_reader)(self._fd)
        _resolve(self._waiter)
        self._waiter = None

    def close(self) -> None:
        if self._fd >= 0:
            self._unwatch()
            os.close(self._fd)
            self._fd = -1

    async def aclose(self) -> None:
        self.close()


class OutputPipe(_Pipe, ByteReceiveStream):
    """Our end of a program's output. It ends at end of file, or with what was in the pipe when the call was over:
    whoever else got hold of the other end cannot keep us."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writes=False)
        self._size = 16 * 1024
        self._left: int | None = None

    async def receive(self, max_bytes: int = CHUNK_BYTES) -> bytes:
        while True:
            data = self._take(max_bytes)
            if data is not None:
                return data
            await self._ready()

    def _take(self, max_bytes: int) -> bytes | None:
        if self._fd < 0:
            raise anyio.ClosedResourceError
        size = min(max_bytes, self._size)
        if self._left is not None:
            size = min(size, self._left)
            if size == 0:
                raise anyio.EndOfStream
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return None
        if not data:
            self._left = 0
            raise anyio.EndOfStream
        if self._left is not None:
            self._left -= len(data)
        if len(data) == self._size:
            self._size = min(4 * self._size, CHUNK_BYTES)
        return data

    def end(self) -> None:
        """The call is over: every process that may write is dead, so what is in the pipe now is all."""
        if self._fd < 0 or self._left is not None:
            return
        pending = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, pending)
        self._left = pending[0]
        self._unwatch()


class TerminalOutput(OutputPipe):
    """What a terminal shows, read from its master. It ends when nobody has the terminal any more, or, once the call is
    over, when there is nothing left to read."""

    _over = False

    def _take(self, max_bytes: int) -> bytes | None:
        if self._fd < 0:
            raise anyio.ClosedResourceError
        try:
            return os.read(self._fd, min(max_bytes, CHUNK_BYTES))
        except BlockingIOError:
            if self._over:
                raise anyio.EndOfStream from None
            return None
        except OSError:  # EIO: the other end is closed
            raise anyio.EndOfStream from None

    def end(self) -> None:
        self._over = True
        self._unwatch()

    def resize(self, rows: int, columns: int) -> None:
        if self._fd >= 0:
            fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class InputPipe(_Pipe, ByteSendStream):
    """Our end of a program's input, a terminal's master too; -1 makes one that is closed from the start."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writes=True)

    async def send(self, item: bytes) -> None:
        view = memoryview(item)
        while view:
            if self._fd < 0:
                raise anyio.ClosedResourceError
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._ready()
            except OSError:  # EPIPE, or a terminal's EIO
                raise anyio.BrokenResourceError from None


@contextlib.asynccontextmanager
async def reading(link: Channel, body: bytes, to: bytes = ANY_SLOT) -> AsyncIterator[tuple[Call, OutputPipe]]:
    """A call whose output is read, and nothing else; it is over and its pipe closed when this is left."""
    link.check()
    reader, writer = pipe_for_output()
    pipe = OutputPipe(reader)
    try:
        try:
            call = await link.call(body, link.nothing, writer, link.nothing, pipe.end, to)
        finally:
            os.close(writer)
        try:
            yield call, pipe
        finally:
            await call.aclose()
    finally:
        pipe.close()


def refuse(ended: Ended, what: str) -> NoReturn:
    """Raise what the last word of a request that did nothing means."""
    raise refused(ended, what)


def refused(ended: Ended, what: str) -> CommandRefused | FileRefused:
    """What the last word of a request that did nothing means."""
    if ended.word == "errno":
        return CommandRefused(f"cannot start {what}: {ended.detail}", code=ended.detail)
    if ended.word == "pids":
        return CommandRefused(
            f"cannot start {what}: the sandbox's processes are used up", "wait, or allow more processes", code="EAGAIN"
        )
    code: FileCode = next((code for code in FILE_CODES if code == ended.detail), "sandbox_helper_failed")
    return FileRefused(f"{what}: {code.replace('_', ' ')}", code=code)
