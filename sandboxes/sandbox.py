"""The interface of a sandbox: processes, and four file primitives. Everything else is built above it."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from sandboxes.capture import Capture
from sandboxes.errors import FileRefused, NotOffered, SandboxLost

WORKSPACE: Final = "/workspace"
HOME: Final = "/home/agent"
CHUNK_BYTES: Final = 256 * 1024
JOBS: Final = "background jobs"
TERMINALS: Final = "terminals"
"""What a kind lacks that has none of them."""
MOST_JOBS: Final = 16
JOB_LOG_BYTES: Final = 1 << 20
EXECUTED_BYTES: Final = 1 << 20
_SOON_SECONDS: Final = 0.003


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use; sizes in bytes."""

    memory: int = 1 << 30
    cpus: float = 1.0
    processes: int = 128
    open_files: int = 1024
    workspace_size: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses: bytes of memory now, its files there and the kernel's caches included, and processor time so
    far. None where that is not told."""

    memory: int | None = None
    cpu_seconds: float | None = None


class Sink(Protocol):
    """Takes one stream's bytes as they come; a slow sink slows the program, nothing is buffered for it."""

    async def write(self, chunk: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Exit:
    """How a program ended. `how` is `signal` with code 0 where no status was seen (its slot was killed).

    `oom` and `pids` mean: the kernel counted such an event meanwhile **and** the program's own status fits it
    (channel-facts 7); with several calls at once the reason is only probable. `killed` counts the processes that
    the program had left behind and that were ended with it.
    """

    how: Literal["exit", "signal", "oom", "pids"]
    code: int
    killed: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Executed:
    """What one shell command did; each output at most 1 MiB, head and tail. No `exit_code` where none was seen."""

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How one command ended: `timed_out` is told apart from the signal that ended it."""

    exit: Exit
    timed_out: bool
    duration_seconds: float


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """How large a terminal is, in characters."""

    columns: int = 80
    rows: int = 24


class Process(ABC):
    """A started program: its three streams, and its end. Leaving it (`aclose`) kills what is left of its tree.

    On a terminal `stdin` is what is typed and `stdout` what is shown; `stderr` is empty.
    """

    stdin: ByteSendStream
    stdout: ByteReceiveStream
    stderr: ByteReceiveStream

    @abstractmethod
    async def wait(self) -> Exit:
        """Return when the program **and everything it started** is dead.

        Raises SandboxLost where the sandbox died first.
        """

    @abstractmethod
    async def kill(self) -> None:
        """End the whole process tree with SIGKILL; `wait` then returns within 2 seconds or raises SandboxLost."""

    def resize(self, size: TerminalSize) -> None:  # noqa: B027 - a program without a terminal has nothing to do
        """Give its terminal another size, which its program hears of; nothing where it has none."""

    @abstractmethod
    async def aclose(self) -> None:
        """Kill if running, close the streams. Safe to call twice and under cancellation."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(frozen=True, slots=True)
class Job:
    """A program in the background, as its sandbox tells it. `exit` is None while it runs; of what it wrote the bytes
    `first..total` are kept; times in seconds since 1970."""

    name: str
    title: str
    exit: Exit | None
    started: float
    ended: float | None
    first: int
    total: int


@dataclass(frozen=True, slots=True)
class JobOutput:
    """A part of a job's output, and the job at that moment. `start` is where the part begins: later than asked for
    where the bytes there are gone."""

    job: Job
    start: int
    data: bytes


class Jobs(ABC):
    """The background jobs of one sandbox: programs that run on after the call that started them, until they end, are
    stopped, or the sandbox ends. They and their output are kept inside the sandbox.

    At most `MOST_JOBS` are kept, each for one process of the sandbox's limit besides its own; the oldest that has ended
    makes room. Of each job's output (both streams, as they
    came) the last `JOB_LOG_BYTES` are kept at least, twice as much at most: a flood neither fills anything nor waits
    for a reader. Every method raises SandboxLost once the sandbox is dead, and JobNotFound for what is not there.
    """

    @abstractmethod
    async def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        title: str = "",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start a program under a name of `[A-Za-z0-9-]` that is new in this session; its input stays open.

        Raises as `Sandbox.start` does, and TooManyJobs. `title` is what `list` shows, cut at 200 bytes.
        """

    @abstractmethod
    async def list(self) -> tuple[Job, ...]:
        """All that are kept, in the order of their start."""

    @abstractmethod
    async def read(self, name: str, offset: int = 0, max_bytes: int = CHUNK_BYTES) -> JobOutput:
        """Output from a byte offset on, counted from its start; a negative offset counts from its present end."""

    @abstractmethod
    async def write(self, name: str, data: bytes, *, close: bool = False) -> int:
        """Give it input; returns how many bytes were taken, which is what its pipe had room for.

        `close` ends the input where all was taken. Raises anyio.BrokenResourceError where it is closed.
        """

    @abstractmethod
    async def stop(self, name: str) -> Job:
        """Kill its whole process tree; it is dead when this returns. One that has ended is fine."""


FileKind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a listing; `path` is relative to the listed folder, bytes that are not UTF-8 as surrogates."""

    path: str
    kind: FileKind
    size: int
    mode: int
    modified: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries in name order, each folder before its content; `complete` is False where a cap (entries, depth, time)
    ended it, or a folder could not be read."""

    entries: tuple[Entry, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file to be written, with all of its content."""

    path: str
    content: bytes
    mode: int = 0o644


class Sandbox(ABC):
    """A live sandbox. Calls may run at the same time; every method raises SandboxLost once it is dead.

    Paths are POSIX, absolute or relative to `/workspace`, and must end below `/workspace`, `/home/agent` or `/tmp`;
    anything else is FileRefused `invalid_path`. File operations run inside, as the sandbox's user.
    """

    kind: str
    session_id: str
    restored: bool
    """Whether the workspace was there before this sandbox was opened."""
    taken_up: bool = False
    """Whether it ran already, left by an earlier life of the gateway."""
    stays: bool = False
    """Whether it goes on when it is left."""
    channel: str = "direct"
    channel_reason: str = ""
    """Why it is not the direct one."""
    not_enforced: tuple[str, ...] = ()
    workspace: str = WORKSPACE
    is_executable: bool = True
    lacks: frozenset[str] = frozenset({JOBS, TERMINALS})

    @abstractmethod
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> Process:
        """Start a program in a session of its own; `env` is added to the sandbox's.

        Without `stdin` the program reads end of file at once. With `terminal` it has one, made inside, as its
        controlling terminal. Raises CommandRefused (no such program, arguments too long: 128 KiB for one, about 2 MB
        for all with the environment), FileRefused where `cwd` is not a folder of the sandbox, NotOffered for a
        terminal that the kind has not.
        """

    @abstractmethod
    def read(self, path: str, start: int = 0, end: int | None = None, *, follow: bool = True) -> AsyncIterator[bytes]:
        """Yield the bytes `start..end` of a regular file. Links are followed only within the three roots; with
        `follow=False` a link anywhere in the path is refused."""

    @abstractmethod
    async def write(self, path: str, chunks: AsyncIterable[bytes] | bytes, *, mode: int = 0o644) -> int:
        """Write a file whole or not at all (temporary name, then rename); parents are made; returns its size.

        A link in the path of the parents is refused, a link at the name itself is replaced. Set-uid, set-gid and
        sticky bits of `mode` are dropped.
        """

    @abstractmethod
    async def list(self, path: str = WORKSPACE, *, recursive: bool = False, max_entries: int = 100_000) -> Listing:
        """List a folder; links are shown, never followed. A file lists itself, with the path `.`."""

    @abstractmethod
    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a folder (with all in it only if `recursive`). Missing is `missing_file`."""

    @property
    def jobs(self) -> Jobs:
        """Its background jobs. Raises NotOffered where it lacks them."""
        self.check_offered(JOBS)
        raise NotImplementedError

    def check_offered(self, what: str) -> None:
        """Raise NotOffered where it lacks that; it names what works."""
        if what in self.lacks:
            raise NotOffered(
                f"a sandbox of kind {self.kind} has no {what}",
                "Use a profile of kind local or docker (by a direct channel); here a command runs to its end.",
            )

    @abstractmethod
    async def aclose(self) -> None:
        """End every process and free what the sandbox held; the workspace stays for `SandboxKind.destroy`."""

    def stay(self, until: float) -> None:  # noqa: B027 - most kinds end with their gateway
        """Outlive the gateway from now on, if the kind can: up to that time (Unix), and two minutes more. Say so when
        the workspace is as a later life of the gateway may find it."""

    async def leave(self) -> None:
        """End every call, and let a sandbox that was to `stay` go on for the next life of the gateway: `open` takes it
        up. Any other is closed."""
        await self.aclose()

    async def usage(self) -> Usage:
        """What it uses now, as far as that is known cheaply; for people to see, not for limits."""
        return Usage()

    def untold_loss(self) -> SandboxLost | None:
        """How it died, as long as no call was told."""
        return None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the sandbox could still be used when last looked at."""

    async def read_many(self, paths: Sequence[str], max_bytes: int) -> AsyncGenerator[bytes | FileRefused, None]:
        """Yield each file whole, in the order of `paths`, or why it cannot be had: links are refused as by
        `follow=False`, and a file over `max_bytes`, which should be small, is `content_too_large`."""
        for path in paths:
            try:
                yield await whole(self.read(path, 0, max_bytes + 1, follow=False), path, max_bytes)
            except FileRefused as refused:
                yield refused

    async def write_many(self, files: Sequence[SmallFile]) -> None:
        """Write each file as `write` does, in order; the first that is refused ends it."""
        for file in files:
            await self.write(file.path, file.content, mode=file.mode)

    async def execute(
        self,
        command: str,
        *,
        cwd: str | None = None,
        timeout_seconds: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> Executed:
        """Run a shell command and keep its output; on timeout its whole tree is dead."""
        stdout, stderr = Capture(EXECUTED_BYTES), Capture(EXECUTED_BYTES)
        result = await self.exec(
            ["sh", "-c", command],
            cwd=cwd or WORKSPACE,
            env=env,
            stdout=stdout,
            stderr=stderr,
            timeout_seconds=timeout_seconds,
        )
        code = result.exit.code if result.exit.how == "exit" and not result.timed_out else None
        return Executed(code, stdout.text(), stderr.text(), result.timed_out)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file's bytes; over the limit is FileRefused `content_too_large`, never a part of it."""
        return await whole(self.read(path, 0, max_bytes + 1), path, max_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a small file whole; see `write`."""
        await self.write(path, content)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdout: Sink,
        stderr: Sink,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_seconds: float | None = None,
    ) -> ExecResult:
        """Run a program to its end and that of everything it started; on timeout or cancellation the tree is killed.

        Output up to that moment has reached the sinks when this returns.
        """
        started = time.monotonic()
        async with await self.start(argv, cwd=cwd, env=env, stdin=bool(stdin)) as process:
            end, timed_out = None, False
            if not stdin and (timeout_seconds is None or timeout_seconds > _SOON_SECONDS):
                end = await _end_soon(process)
            if end is None:
                end, timed_out = await _run(process, stdin, timeout_seconds, stdout, stderr)
            else:
                await _copy(process.stdout, stdout)
                await _copy(process.stderr, stderr)
        return ExecResult(end, timed_out, time.monotonic() - started)


async def whole(chunks: AsyncIterator[bytes], path: str, max_bytes: int) -> bytes:
    """Join what a read for one byte more than the limit gives; FileRefused where that byte is there."""
    content = b"".join([chunk async for chunk in chunks])
    if len(content) > max_bytes:
        raise FileRefused(f"{path}: over {max_bytes:,} bytes", "Ask for more with max_bytes.", code="content_too_large")
    return content


async def _end_soon(process: Process) -> Exit | None:
    """Wait a moment without reading: most programs end while their output still fits the pipes, and one wake-up
    for all three is a quarter cheaper than one for each."""
    with anyio.move_on_after(_SOON_SECONDS):
        return await process.wait()
    return None


async def _run(
    process: Process, stdin: bytes, timeout_seconds: float | None, stdout: Sink, stderr: Sink
) -> tuple[Exit, bool]:
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, process.stdout, stdout)
            tasks.start_soon(_copy, process.stderr, stderr)
            if stdin:
                tasks.start_soon(_feed, process.stdin, stdin)
            with anyio.move_on_after(timeout_seconds) as limit:
                end = await process.wait()
            if limit.cancelled_caught:
                await process.kill()
                end = await process.wait()
    except BaseExceptionGroup as group:
        raise _only(group) from None
    return end, limit.cancelled_caught


async def _copy(stream: ByteReceiveStream, sink: Sink) -> None:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            await sink.write(await stream.receive(CHUNK_BYTES))


async def _feed(stream: ByteSendStream, data: bytes) -> None:
    with contextlib.suppress(anyio.BrokenResourceError):  # the program does not want to read it all
        await stream.send(data)
    await stream.aclose()


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group, as itself: a sink's error is its caller's, SandboxLost is ours."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
