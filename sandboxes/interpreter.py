"""The inner end of the channel of kind `virtual`: a process of its own with bashkit inside, and no other program.

It speaks the same words as `runner.py`. bashkit is a library for use in one's own process; here it has one to itself,
because a line of shell can make it ask for more memory than there is, and then its allocator ends the process: tried
with bashkit 0.20, `for i in {1..200}; do cat 9MB; done | wc -c`, whatever its own limits said.

Each command has an interpreter of its own, over one file system that all of them share.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

COMMANDS: Final = 10_000_000
LOOPS: Final = 10_000_000
SECONDS: Final = 60
OUTPUT_BYTES: Final = 10 << 20
FILE_BYTES: Final = 10_000_000
BASE_BYTES: Final = 128 << 20
"""What Python, bashkit and the stacks of its threads may take beside the sandbox's own memory."""
READY: Final = b"ready 1"
KILL_SECONDS: Final = 1.5
WORKERS: Final = 8
STUCK: Final = 4
"""So many commands that do not heed their end leave too few threads to the others."""
LIST_DEPTH: Final = 100
LIST_SECONDS: Final = 8.0
BODY_BYTES: Final = 4 << 20
CHUNK: Final = 256 * 1024
LINKS: Final = 40
NOBODY: Final = 65534
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
LENGTH: Final = struct.Struct("!I")
FRAME: Final = struct.Struct("!III")
FD: Final = struct.Struct("i")
ROOTS: Final = (("workspace",), ("home", "agent"), ("tmp",))
FEED: Final = "sandgate-standard-input"
HIDDEN: Final = (
    *range(0x01, 0x20),
    *range(0x7F, 0xA0),
    0x180E,
    *range(0x200B, 0x200E),
    *range(0x202A, 0x202F),
    0x2060,
    *range(0x2066, 0x2070),
    0xFEFF,
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),
    *range(0xDC80, 0xDD00),
)
"""What bashkit 0.20 takes in no name (each character tried): controls, direction marks, what has no width; and at the
end the bytes that are no UTF-8, as Python decodes them."""
STAND_INS: Final = {code: 0x10F000 + place for place, code in enumerate(HIDDEN)}
"""Characters for private use, which stand for them inside: commands see these."""
ORIGINALS: Final = {stand_in: code for code, stand_in in STAND_INS.items()}


class Refused(Exception):
    """A file operation that ends here; the word is one of the gateway's file codes."""


class Cancelled(Exception):
    """The gateway has closed its end of the control socket."""


# --- files


CODES: Final = (
    ("not found", "missing_file"),
    ("filesystem full", "disk_full"),
    ("file too large", "disk_full"),
    ("too many", "disk_full"),
)
"""bashkit raises plain RuntimeErrors: their words are all there is. What is not named here is a path that cannot be."""


@contextlib.contextmanager
def mapped() -> Iterator[None]:
    """Turn what bashkit's file system raises into Refused."""
    try:
        yield
    except (RuntimeError, UnicodeError) as error:
        text = str(error).lower()
        raise Refused(next((code for words, code in CODES if words in text), "invalid_path")) from error


def parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def inner(path: bytes) -> str:
    """The path of the gateway as bashkit takes it. As a command has shown it is right, too."""
    return path.decode(errors="surrogateescape").translate(STAND_INS)


def outer(path: str) -> bytes:
    """The other way round."""
    return path.translate(ORIGINALS).encode(errors="surrogateescape")


def absolute(names: list[str]) -> str:
    return "/" + "/".join(names)


class Files:
    """bashkit's file system, seen through the three roots. Its own calls follow links; here each name is looked at."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def make_roots(self) -> None:
        """Make the roots again where a command has removed them."""
        for root in ROOTS:
            if not self.fs.exists(absolute([*root])):
                with contextlib.suppress(RuntimeError):
                    self.fs.mkdir(absolute([*root]), recursive=True)

    def link_target(self, path: str) -> str | None:
        try:
            return str(self.fs.read_link(path))
        except RuntimeError:
            return None

    def status(self, path: str) -> dict[str, Any] | None:
        """What is there, links not followed; None where nothing is."""
        target = self.link_target(path)
        if target is not None:
            return {"file_type": "symlink", "size": len(target.encode()), "mode": 0o777, "modified": 0.0}
        try:
            return dict(self.fs.stat(path))
        except RuntimeError as error:
            if "not found" in str(error):
                return None
            raise Refused("invalid_path") from error

    def kind(self, path: str) -> str | None:
        status = self.status(path)
        return None if status is None else str(status["file_type"])

    def locate(self, path: str, *, follow: bool = False, make: bool = False) -> str:
        """A path below the roots, free of links but perhaps for its last name. With `follow` links are resolved here,
        the last one too; without, one above the last name is refused."""
        here: list[str] = []
        pending, links = parts(path)[::-1], 0
        while pending:
            name = pending.pop()
            if name == "..":
                here = here[:-1]
                continue
            self.check_root([*here, name])
            target = self.link_target(absolute([*here, name])) if follow or pending else None
            if target is None:
                here.append(name)
                if pending:
                    self.enter(absolute(here), make=make)
                continue
            links += 1
            if not follow or links > LINKS:
                raise Refused("invalid_path")
            pending += parts(target)[::-1]
            if target.startswith("/"):
                here = []
        if not any(here[: len(root)] == [*root] for root in ROOTS):
            raise Refused("invalid_path")
        return absolute(here)

    def check_root(self, names: list[str]) -> None:
        for root in ROOTS:
            shorter = min(len(root), len(names))
            if names[:shorter] == [*root[:shorter]]:
                return
        raise Refused("invalid_path")

    def enter(self, path: str, *, make: bool) -> None:
        status = self.status(path)
        if status is None and make:
            with mapped():
                self.fs.mkdir(path)
            return
        self.expect(status, "directory", 0o100)

    def expect(self, status: dict[str, Any] | None, kind: str, mode: int) -> None:
        """Raise Refused unless that is there, and its owner may use it so. bashkit itself knows no closed files."""
        if status is None:
            raise Refused("missing_file")
        if status["file_type"] != kind:
            raise Refused("invalid_path")
        if status["mode"] & mode != mode:
            raise Refused("permission_denied")

    def folder(self, path: str) -> str:
        """A folder that a program can start in."""
        found = self.locate(path, follow=True)
        self.expect(self.status(found), "directory", 0o100)
        return found

    def read(self, path: str, *, follow: bool) -> bytes:
        found = self.locate(path, follow=follow)
        self.expect(self.status(found), "file", 0o400)
        with mapped():
            return bytes(self.fs.read_file(found))

    def writable(self, path: str) -> str:
        """Where a file may be written: its folders are made; only a file or a link is replaced."""
        found = self.locate(path, make=True)
        if self.kind(found) not in (None, "file", "symlink"):
            raise Refused("invalid_path")
        return found

    def write(self, path: str, data: bytes, mode: int) -> None:
        found = self.writable(path)
        temporary = f"{found.rpartition('/')[0]}/.sandgate-{os.urandom(8).hex()}"
        try:
            with mapped():
                self.fs.write_file(temporary, data)
                self.fs.chmod(temporary, mode & 0o777)
                self.fs.rename(temporary, found)
        except Refused:
            with contextlib.suppress(RuntimeError):
                self.fs.remove(temporary)
            raise

    def remove(self, path: str, *, recursive: bool) -> None:
        found = self.locate(path)
        kind = self.kind(found)
        if kind is None:
            raise Refused("missing_file")
        if tuple(parts(found)) in ROOTS:
            raise Refused("invalid_path")
        with mapped():
            self.fs.remove(found, recursive=recursive and kind == "directory")

    def entries(self, path: str) -> list[dict[str, Any]]:
        """What is in a folder, in name order."""
        with mapped():
            return sorted(self.fs.read_dir(path), key=lambda one: str(one["name"]).encode())


class Lister:
    """Makes records of five NUL-ended fields: path, kind, size, mode, time of change in nanoseconds."""

    def __init__(self, files: Files, max_entries: int) -> None:
        self.files = files
        self.left = max_entries
        self.count = 0
        self.deadline = time.monotonic() + LIST_SECONDS
        self.records: list[bytes] = []

    def run(self, path: str, *, recursive: bool) -> bool:
        """Fill `records`; whether everything is in them."""
        found = self.files.locate(path)
        status = self.files.status(found)
        if status is None:
            raise Refused("missing_file")
        if status["file_type"] != "directory":
            return self.emit(".", status)
        self.files.expect(status, "directory", 0o500)
        return self.walk(found, "", recursive, depth=0)

    def walk(self, folder: str, prefix: str, recursive: bool, depth: int) -> bool:
        if depth > LIST_DEPTH:
            return False
        complete = True
        for entry in self.files.entries(folder):
            name, status = str(entry["name"]), entry["metadata"]
            if not self.emit(prefix + name, status):
                return False
            if not recursive or status["file_type"] != "directory":
                continue
            is_open = status["mode"] & 0o500 == 0o500
            complete &= is_open and self.walk(f"{folder}/{name}", f"{prefix}{name}/", recursive, depth + 1)
        return complete

    def emit(self, path: str, status: dict[str, Any]) -> bool:
        if self.left < 1 or time.monotonic() > self.deadline:
            return False
        self.left -= 1
        self.count += 1
        kind = status["file_type"] if status["file_type"] in ("file", "directory", "symlink") else "other"
        fields = (kind, status["size"], status["mode"] & 0o7777, int(status["modified"] * 1e9))
        self.records.append(outer(path) + b"\0" + "".join(f"{field}\0" for field in fields).encode())
        return True


# --- one call


def resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Call:
    """The four descriptors of a call: control, and the program's three streams."""

    def __init__(self, fds: list[int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.control = socket.socket(fileno=fds[0])
        self.control.setblocking(False)
        self.streams = fds[1:]
        self.turns = [asyncio.Lock() for _ in self.streams]
        self.waiters: dict[int, asyncio.Future[None]] = {}
        self.has_input = stat.S_ISFIFO(os.fstat(self.streams[0]).st_mode)
        for fd in self.streams:
            os.set_blocking(fd, False)

    def close_streams(self) -> None:
        """Close them, and wake who waits for one: its number may soon be another call's."""
        for fd in self.streams:
            self.unwatch(fd)
            os.close(fd)
        self.streams = []

    async def ready(self, number: int) -> None:
        """Wait until standard input can be read from, or another stream written to; or until it is closed."""
        fd = self.streams[number]
        waiter = self.waiters[fd] = self.loop.create_future()
        (self.loop.add_writer if number else self.loop.add_reader)(fd, resolve, waiter)
        try:
            await waiter
        finally:
            if self.waiters.get(fd) is waiter:
                self.unwatch(fd)

    def unwatch(self, fd: int) -> None:
        waiter = self.waiters.pop(fd, None)
        if waiter is not None:
            self.loop.remove_reader(fd)
            self.loop.remove_writer(fd)
            resolve(waiter)

    def tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.control.send(text.encode() + b"\n", socket.MSG_NOSIGNAL)

    async def body(self) -> list[bytes]:
        (size,) = LENGTH.unpack(await self.exactly(LENGTH.size))
        if size > BODY_BYTES:
            raise Cancelled
        return (await self.exactly(size)).split(b"\0")

    async def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await self.loop.sock_recv(self.control, min(size - len(data), 1 << 20))
            if not piece:
                raise Cancelled
            data += piece
        return bytes(data)

    async def word(self) -> bytes:
        """What the gateway says next: `c` commits, nothing is its end."""
        with contextlib.suppress(OSError):
            return await self.loop.sock_recv(self.control, 1)
        return b""

    async def read_in(self) -> bytes:
        """The next bytes of standard input, empty at its end."""
        while self.has_input and self.streams:
            try:
                return os.read(self.streams[0], CHUNK)
            except BlockingIOError:
                await self.ready(0)
        return b""

    async def write_to(self, number: int, data: bytes) -> None:
        """Write to a stream as its reader takes it; a reader that is gone takes everything."""
        view = memoryview(data)
        async with self.turns[number]:
            while view and self.streams:
                try:
                    view = view[os.write(self.streams[number], view) :]
                except BlockingIOError:
                    await self.ready(number)
                except BrokenPipeError:
                    return


class Interpreter:
    """Serves the calls of one sandbox, all in this process."""

    def __init__(self, bash: Callable[..., Any]) -> None:
        self.bash = bash
        self.base = bash(username="agent", hostname="sandbox")
        self.files = Files(self.base.fs())
        self.files.make_roots()
        self.programs = frozenset(self.base.capabilities().builtins)
        self.stuck = 0
        self.operations = {
            b"read": self.read_file,
            b"write": self.write_file,
            b"list": self.list_folder,
            b"remove": self.remove_entry,
            b"gather": self.read_many,
            b"scatter": self.write_many,
        }

    async def serve(self, call: Call) -> None:
        answer = await self.answer(call)
        call.close_streams()
        call.tell(answer)
        call.control.close()

    async def answer(self, call: Call) -> str:
        try:
            operation, *fields = await call.body()
            call.tell("accepted")
            self.files.make_roots()
            if operation == b"run":
                return await self.run(call, fields)
            work = asyncio.create_task(self.operations[operation](call, fields))
            return await work if operation in (b"write", b"scatter") else await self.unless_ended(call, work)
        except Refused as error:
            return f"file {error}"
        except Cancelled:
            return "signal 9 0"
        except Exception:  # bashkit's, or ours: this call's end, not the sandbox's
            return "file sandbox_helper_failed"

    async def unless_ended(self, call: Call, work: "asyncio.Task[str]") -> str:
        """The answer, or Cancelled when the gateway ends the call first."""
        ending = asyncio.create_task(call.word())
        try:
            await asyncio.wait([work, ending], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Cancelled
            return work.result()
        finally:
            work.cancel()
            ending.cancel()

    # programs

    async def run(self, call: Call, fields: list[bytes]) -> str:
        folder = self.files.folder(inner(fields[0]))
        end = 2 + int(fields[1])
        try:
            argv = [word.decode() for word in fields[2:end]]
            env = dict(item.decode().split("=", 1) for item in fields[end:])
        except UnicodeDecodeError:
            return "errno EILSEQ"
        if refusal := self.cannot_start(argv[0], folder):
            return f"errno {refusal}"
        call.tell("spawned")
        return await self.execute(call, self.interpreter(folder, env), argv)

    def cannot_start(self, name: str, folder: str) -> str:
        """The errno that a kernel would give for this program, or nothing."""
        if "/" not in name:
            return "" if name in self.programs else "ENOENT"
        try:
            status = self.files.fs.stat(name if name.startswith("/") else f"{folder}/{name}")
        except RuntimeError:
            return "ENOENT"
        is_program = status["file_type"] == "file" and status["mode"] & 0o111
        return "" if is_program else "EACCES"

    def interpreter(self, folder: str, env: dict[str, str]) -> Any:
        """A new shell; the files of the sandbox are all that it shares."""
        bash = self.bash(
            username="agent",
            hostname="sandbox",
            cwd=folder,
            env=env,
            max_commands=COMMANDS,
            max_loop_iterations=LOOPS,
            timeout_seconds=SECONDS,
        )
        bash.mount("/", self.files.fs)
        return bash

    async def execute(self, call: Call, bash: Any, argv: list[str]) -> str:
        script = " ".join(map(quoted, argv))
        if call.has_input:
            bash.add_command(FEED, feeder(call))
            script = f"{FEED} | {script}"
        running = asyncio.ensure_future(bash.execute(script, stdout=writer(call, 1), stderr=writer(call, 2)))
        ending = asyncio.create_task(call.word())
        await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return await self.end(bash, running)
        ending.cancel()
        return await said(call, running.result())

    async def end(self, bash: Any, running: "asyncio.Future[Any]") -> str:
        """Stop a command before its next step. Some steps heed only their own time limit, and are left to it."""
        bash.cancel()
        await asyncio.wait({running}, timeout=KILL_SECONDS)
        if not running.done():
            self.stuck += 1
            running.add_done_callback(self.unstuck)
            if self.stuck >= STUCK:
                return "stuck"
        return "signal 9 0"

    def unstuck(self, running: "asyncio.Future[Any]") -> None:
        self.stuck -= 1
        running.cancelled() or running.exception()

    # files

    async def read_file(self, call: Call, fields: list[bytes]) -> str:
        data = self.files.read(inner(fields[0]), follow=fields[3] == b"1")
        part = memoryview(data)[int(fields[1]) : int(fields[2]) if fields[2] else None]
        for at in range(0, len(part), CHUNK):
            await call.write_to(1, bytes(part[at : at + CHUNK]))
        return f"done {len(part)} 1"

    async def read_many(self, call: Call, fields: list[bytes]) -> str:
        """Small files, each whole: a line `ok SIZE` and its bytes, or a line with the reason."""
        limit = int(fields[0])
        for path in fields[1:]:
            try:
                data = self.files.read(path.decode(), follow=False)
                answer = b"ok %d\n" % len(data) + data if len(data) <= limit else b"content_too_large\n"
            except Refused as error:
                answer = f"{error}\n".encode()
            except UnicodeDecodeError:
                answer = b"invalid_path\n"
            await call.write_to(1, answer)
        return f"done {len(fields) - 1} 1"

    async def write_many(self, call: Call, fields: list[bytes]) -> str:
        """Small files, each whole or not at all; the first that is refused ends it, told by place and reason."""
        for count, (path, mode, data) in enumerate(frames(await self.committed(call))):
            try:
                self.files.write(path.decode(), data, mode)
            except Refused as error:
                await call.write_to(1, f"{count} {error}".encode())
                break
            except UnicodeDecodeError:
                await call.write_to(1, f"{count} invalid_path".encode())
                break
        return "done 1 1"

    async def write_file(self, call: Call, fields: list[bytes]) -> str:
        path = inner(fields[0])
        self.files.writable(path)
        data = await self.committed(call)
        self.files.write(path, data, int(fields[1]))
        return f"done {len(data)} 1"

    async def committed(self, call: Call) -> bytes:
        """Standard input to its end, once the gateway has said that this was all."""
        filling = asyncio.create_task(self.filled(call))
        ending = asyncio.create_task(call.word())
        try:
            await asyncio.wait([filling, ending], return_when=asyncio.FIRST_COMPLETED)
            if await ending_word(filling, ending) != b"c":
                raise Cancelled
            return await filling
        finally:
            filling.cancel()
            ending.cancel()

    async def filled(self, call: Call) -> bytes:
        """Standard input to its end; no more of it than one file may hold."""
        data = bytearray()
        while chunk := await call.read_in():
            data += chunk
            if len(data) > FILE_BYTES:
                raise Refused("disk_full")
        return bytes(data)

    async def list_folder(self, call: Call, fields: list[bytes]) -> str:
        lister = Lister(self.files, int(fields[2]))
        complete = lister.run(inner(fields[0]), recursive=fields[1] == b"1")
        await call.write_to(1, b"".join(lister.records))
        return f"done {lister.count} {int(complete)}"

    async def remove_entry(self, call: Call, fields: list[bytes]) -> str:
        self.files.remove(inner(fields[0]), recursive=fields[1] == b"1")
        return "done 1 1"


def frames(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """The files of a bulk write: path, mode and bytes."""
    at = 0
    while at < len(data):
        name_size, mode, size = FRAME.unpack_from(data, at)
        start = at + FRAME.size + name_size
        at = start + size
        yield data[start - name_size : start], mode, data[start:at]


async def ending_word(filling: "asyncio.Future[bytes]", ending: "asyncio.Future[bytes]") -> bytes:
    """What the gateway says about an upload; a refusal of its bytes comes first."""
    if filling.done() and filling.exception():
        return b"c"
    return await ending


def quoted(word: str) -> str:
    """One word of a shell, always in quotes: no word is a keyword, an alias or an assignment."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def writer(call: Call, number: int) -> Callable[[bytes], Any]:
    """Where a command's output goes, as it comes."""

    async def write(data: bytes) -> None:
        await call.write_to(number, data)

    return write


def feeder(call: Call) -> Callable[[Any], Any]:
    """A command of the interpreter that writes the call's standard input; a reader that is gone ends it."""

    async def feed(ctx: Any) -> int:
        with contextlib.suppress(OSError, RuntimeError):
            while chunk := await call.read_in():
                await ctx.stdout.write(chunk)
        return 0

    return feed


async def said(call: Call, result: Any) -> str:
    """The last word about a command that has ended; what stopped it is told on its standard error."""
    if result.error:
        await call.write_to(2, f"{result.error}\n".encode())
    if result.stdout_truncated or result.stderr_truncated:
        await call.write_to(2, f"output beyond {OUTPUT_BYTES >> 20} MiB was left out\n".encode())
    return f"exit {result.exit_code & 0xFF} 0"


# --- the process


def harden(memory: int) -> None:
    """Give up what an interpreter of text does not need, for good; as root also the user."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory + BASE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_NO_NEW_PRIVS, 1)):
        if kernel.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def receive(channel: socket.socket) -> list[int]:
    """The descriptors of the next call; none at the end of the channel."""
    data, control, _, _ = channel.recvmsg(16, socket.CMSG_SPACE(4 * FD.size), socket.MSG_CMSG_CLOEXEC)
    if not data:
        return []
    return [number for _, _, body in control for (number,) in FD.iter_unpack(body)]


async def serve(channel: socket.socket, bash: Callable[..., Any]) -> None:
    loop = asyncio.get_running_loop()
    interpreter, calls, ended = Interpreter(bash), set[asyncio.Task[None]](), asyncio.Event()

    def hear() -> None:
        try:
            fds = receive(channel)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return
            fds = []
        if len(fds) != 4:
            ended.set()
            return
        task = loop.create_task(interpreter.serve(Call(fds)))
        calls.add(task)
        task.add_done_callback(calls.discard)

    loop.add_reader(channel, hear)
    channel.send(READY)
    await ended.wait()
    os._exit(0)  # whatever still runs: its sandbox is gone


def main(channel_fd: int, packages: str, memory: int) -> None:
    os.chdir("/")
    os.environ["TOKIO_WORKER_THREADS"] = str(WORKERS)
    sys.path.append(packages)
    from bashkit import Bash, ExecutionProfile

    harden(memory)
    channel = socket.socket(fileno=channel_fd)
    channel.setblocking(False)

    def bash(**options: Any) -> Any:
        return Bash(profile=ExecutionProfile.Interactive, **options)

    asyncio.run(serve(channel, bash))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
