"""A sandbox over a direct channel: programs and files, the same for every kind that has a runner inside."""

import asyncio
import contextlib
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, get_args

import anyio

from sandboxes.bulk import Gathered, frame, refusal
from sandboxes.cgroups import Counters
from sandboxes.channel import (
    Call,
    Channel,
    Ended,
    InputPipe,
    OutputPipe,
    TerminalOutput,
    pipe_for_output,
    reading,
    refuse,
)
from sandboxes.errors import CommandRefused, FileRefused, SandboxLost
from sandboxes.jobs import DirectJobs
from sandboxes.request import inside, request, run_request
from sandboxes.sandbox import (
    JOBS,
    TERMINALS,
    WORKSPACE,
    Entry,
    Exit,
    FileKind,
    Jobs,
    Listing,
    Process,
    Sandbox,
    SmallFile,
    TerminalSize,
)

_LISTING_BYTES: Final = 65 << 20
_START_TRIES: Final = 3
_NOT_STARTED: Final = ("errno", "file", "pids", "gone")
_KINDS: Final = get_args(FileKind)


class _Streams:
    """Our ends of a program's streams, and the kernel's counters at its start and end."""

    def __init__(self, counters: Callable[[], Counters], stdin: int, stdout: int, stderr: int) -> None:
        self._counters = counters
        self.before = self.after = counters()
        self.stdin, self.stdout, self.stderr = InputPipe(stdin), OutputPipe(stdout), OutputPipe(stderr)

    def use_terminal(self, master: int, *, over: bool) -> None:
        """Type and read there; nothing writes to `stderr`."""
        self.stdout.close()
        self.stdin, self.stdout = InputPipe(os.dup(master)), TerminalOutput(master)
        if over:
            self.stdout.end()

    def end(self) -> None:
        self.stdout.end()
        self.stderr.end()
        self.after = self._counters()

    def close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


class DirectProcess(Process):
    """One program behind a call."""

    def __init__(self, call: Call, streams: _Streams) -> None:
        self._call = call
        self._streams = streams
        self.stdin, self.stdout, self.stderr = streams.stdin, streams.stdout, streams.stderr

    def resize(self, size: TerminalSize) -> None:
        if isinstance(self.stdout, TerminalOutput):
            self.stdout.resize(size.rows, size.columns)

    async def wait(self) -> Exit:
        ended = await self._call.over()
        return name_exit(ended, self._streams.before, self._streams.after, asked=self._call.killed)

    async def kill(self) -> None:
        self._call.kill()

    async def aclose(self) -> None:
        await _end(self._call, self._streams)


async def _end(call: Call, streams: _Streams) -> None:
    """Kill what runs, and close all that the call has brought."""
    try:
        await call.aclose()
    finally:
        streams.close()
        if (master := call.take_master()) >= 0:
            os.close(master)


def name_exit(ended: Ended, before: Counters, after: Counters, asked: bool = False) -> Exit:
    """Say how a program ended; the kernel's counters give the reason only where the program's own status fits.

    `asked` says that we killed it: then a death by SIGKILL proves nothing.
    """
    if ended.word not in ("exit", "signal"):
        return Exit("signal", 0, notes=(ended.detail,) if ended.detail else ())
    killed_by_kernel = (ended.word, ended.number) in (("signal", 9), ("exit", 137)) and not asked
    failed = ended.word == "signal" or ended.number != 0
    out_of_memory, out_of_pids = after.oom > before.oom, after.pids > before.pids
    if out_of_memory and killed_by_kernel:
        return Exit("oom", ended.number, ended.count)
    if out_of_pids and failed and not asked:
        return Exit("pids", ended.number, ended.count)
    notes = []
    if out_of_memory:
        notes.append("meanwhile a process of this sandbox was killed for memory")
    if out_of_pids:
        notes.append("meanwhile this sandbox ran out of processes")
    return Exit("exit" if ended.word == "exit" else "signal", ended.number, ended.count, tuple(notes))


class DirectSandbox(Sandbox):
    """What a kind adds: where the channel comes from, the counters, and what `end` frees when the channel is closed."""

    channel = "direct"
    lacks = frozenset()

    def __init__(
        self,
        session_id: str,
        link: Channel,
        env: Mapping[str, str],
        end: Callable[[], Awaitable[object]],
        *,
        restored: bool,
    ) -> None:
        self.session_id = session_id
        self.restored = restored
        self._link = link
        self._env = dict(env)
        self._jobs = DirectJobs(link, self._env)
        self._end = end
        self._closing = False
        self._closed = asyncio.Event()

    @property
    def jobs(self) -> Jobs:
        self.check_offered(JOBS)
        return self._jobs

    def add_env(self, env: Mapping[str, str]) -> None:
        """What further programs get as well."""
        self._env.update(env)

    @abstractmethod
    def counters(self) -> Counters:
        """The kernel's counters of this sandbox, now; must be cheap."""

    @property
    def alive(self) -> bool:
        return self._link.lost is None

    async def aclose(self) -> None:
        self._link.lose("the sandbox is closed")
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            with anyio.CancelScope(shield=True):
                await self._end()
        finally:
            self._closed.set()

    def untold_loss(self) -> SandboxLost | None:
        return None if self._link.told else self._link.lost

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> DirectProcess:
        if terminal is not None:
            self.check_offered(TERMINALS)
        operation = b"run" if terminal is None else b"terminal\0%d\0%d" % (terminal.columns, terminal.rows)
        body = run_request(argv, cwd, {**self._env, **(env or {})}, operation=operation)
        for _ in range(_START_TRIES):
            call, process = await self._try_to_start(body, stdin and terminal is None, terminal is not None)
            ended = call.ended
            if ended is None or ended.word not in _NOT_STARTED or (ended.word == "gone" and call.accepted):
                return process
            await process.aclose()
            self._link.check()
            if ended.word != "gone":  # a slot that was lost before it accepted has done nothing: ask another
                refuse(ended, cwd if ended.word == "file" else argv[0])
        raise CommandRefused(
            f"cannot start {argv[0]}: its slots are killed", "end what runs in this sandbox", code="EAGAIN"
        )

    async def _try_to_start(self, body: bytes, stdin: bool, terminal: bool) -> tuple[Call, DirectProcess]:
        self._link.check()
        in_reader, in_writer = os.pipe2(os.O_CLOEXEC) if stdin else (self._link.nothing, -1)
        out_reader, out_writer = pipe_for_output()
        err_reader, err_writer = pipe_for_output(0)
        streams = _Streams(self.counters, in_writer, out_reader, err_reader)
        try:
            try:
                call = await self._link.call(body, in_reader, out_writer, err_writer, streams.end, terminal=terminal)
            finally:
                for fd in (out_writer, err_writer, *((in_reader,) if stdin else ())):
                    os.close(fd)
        except BaseException:
            streams.close()
            raise
        try:
            await call.begun()
        except BaseException:
            await _end(call, streams)
            raise
        if (master := call.take_master()) >= 0:
            streams.use_terminal(master, over=call.ended is not None)
        return call, DirectProcess(call, streams)

    async def read(
        self, path: str, start: int = 0, end: int | None = None, *, follow: bool = True
    ) -> AsyncGenerator[bytes, None]:
        body = request("read", inside(path), str(max(start, 0)), "" if end is None else str(max(end, 0)), _flag(follow))
        async for chunk in self._stream(body, path):
            yield chunk

    async def write(self, path: str, chunks: AsyncIterable[bytes] | bytes, *, mode: int = 0o644) -> int:
        body = request("write", inside(path), str(mode & 0o777))
        return (await self._upload(body, chunks, path, self._link.nothing, _nothing)).number

    async def _upload(
        self, body: bytes, chunks: AsyncIterable[bytes] | bytes, path: str, stdout: int, on_end: Callable[[], None]
    ) -> Ended:
        """Send the chunks to a slot's standard input, then commit; returns its last word."""
        self._link.check()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pipe = InputPipe(writer)
        try:
            try:
                call = await self._link.call(body, reader, stdout, self._link.nothing, on_end)
            finally:
                os.close(reader)
            try:
                await _pour(chunks, pipe)
                pipe.close()
                call.commit()
                return await _done(call, path)
            finally:
                await call.aclose()
        finally:
            pipe.close()

    async def read_many(self, paths: Sequence[str], max_bytes: int) -> AsyncGenerator[bytes | FileRefused, None]:
        """All in one call, since a call costs ten times what a small file does."""
        body = request("gather", str(max_bytes), *map(inside, paths))
        async with aclosing(self._stream(body, f"{len(paths)} files")) as chunks:
            files = Gathered(chunks, max_bytes)
            for path in paths:
                yield await files.next(path)

    async def write_many(self, files: Sequence[SmallFile]) -> None:
        data = b"".join([frame(inside(file.path), file) for file in files])
        reader, writer = pipe_for_output(0)
        pipe = OutputPipe(reader)
        try:
            try:
                await self._upload(request("scatter"), data, f"{len(files)} files", writer, pipe.end)
            finally:
                os.close(writer)
            with contextlib.suppress(anyio.EndOfStream):
                raise refusal(await pipe.receive(), files)
        finally:
            pipe.close()

    async def list(self, path: str = WORKSPACE, *, recursive: bool = False, max_entries: int = 100_000) -> Listing:
        body = request("list", inside(path), _flag(recursive), str(max_entries))
        data = bytearray()
        last = Ended("done")

        def keep(ended: Ended) -> None:
            nonlocal last
            last = ended

        async for chunk in self._stream(body, path, keep):
            data += chunk
            if len(data) > _LISTING_BYTES:
                raise FileRefused(f"{path}: the listing has no end", code="sandbox_helper_failed")
        entries = tuple(_entries(bytes(data), path))
        if len(entries) > max_entries:
            raise FileRefused(f"{path}: more entries than asked", code="sandbox_helper_failed")
        return Listing(entries, complete=last.count == 1)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        self._link.check()
        nothing = self._link.nothing
        call = await self._link.call(
            request("remove", inside(path), _flag(recursive)), nothing, nothing, nothing, _nothing
        )
        try:
            await _done(call, path)
        finally:
            await call.aclose()

    async def _stream(
        self, body: bytes, path: str, on_done: Callable[[Ended], None] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield what a slot writes on its output; the last word goes to `on_done`."""
        async with reading(self._link, body) as (call, pipe):
            while True:
                try:
                    chunk = await pipe.receive()
                except anyio.EndOfStream:
                    break
                yield chunk
            last = await _done(call, path)
            if on_done is not None:
                on_done(last)


def _nothing() -> None:
    """What happens at the end of a call that has no output."""


async def _pour(chunks: AsyncIterable[bytes] | bytes, pipe: InputPipe) -> None:
    """Send all of it; a slot that no longer reads says why in its last word."""
    try:
        if isinstance(chunks, bytes):
            await pipe.send(chunks)
            return
        async for chunk in chunks:
            await pipe.send(chunk)
    except anyio.BrokenResourceError:
        return


async def _done(call: Call, path: str) -> Ended:
    ended = await call.over()
    if ended.word != "done":
        refuse(ended, path)
    return ended


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _entries(data: bytes, path: str) -> Iterator[Entry]:
    fields = data.split(b"\0")
    try:
        for at in range(0, len(fields) - 1, 5):
            name, kind, size, mode, modified = fields[at : at + 5]
            yield Entry(relative(name), _kind(kind), int(size), int(mode), int(modified) / 1e9)
    except ValueError as error:
        raise FileRefused(f"{path}: the listing makes no sense", code="sandbox_helper_failed") from error


def relative(name: bytes) -> str:
    """The name of an entry below the listed folder; ValueError for one that leads elsewhere."""
    if name.startswith(b"/") or b".." in name.split(b"/"):
        raise ValueError("a name that leads elsewhere")
    return os.fsdecode(name)


def _kind(word: bytes) -> FileKind:
    for kind in _KINDS:
        if word == kind.encode():
            return kind  # type: ignore[no-any-return]
    raise ValueError("no such kind of file")
