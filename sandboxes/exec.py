"""A sandbox without a runner inside: each request is an exec of the engine's, served by a shell (`helper.sh`).

Slower by far (an exec costs 45-70 ms), for where the direct channel is impossible, and without jobs and terminals. A
daemon that a running call has detached dies when any other call ends: without a runner nobody can tell whose it is.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import stat
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from sandboxes.cgroups import Counters
from sandboxes.channel import Ended, refused
from sandboxes.container import BASE_ENV
from sandboxes.direct import name_exit, relative
from sandboxes.errors import CommandRefused, FileRefused, SandboxError, SandboxLost, SandboxUnavailable
from sandboxes.hijack import Hijacked
from sandboxes.request import inside, run_request
from sandboxes.sandbox import (
    JOBS,
    TERMINALS,
    WORKSPACE,
    Entry,
    Exit,
    FileKind,
    Listing,
    Process,
    Sandbox,
    TerminalSize,
)

ANSWER_SECONDS: Final = 20.0
KILL_SECONDS: Final = 5.0
"""The way to a kill is an exec, which takes its time on a machine under load."""
LIST_SECONDS: Final = 8.0
HELPER: Final = ("sh", "-c", 'eval "$1"')
_ROOM_FOR_HELPER: Final = 16 * 1024
_MOST_WORDS: Final = (2 << 20) - 4096 - _ROOM_FOR_HELPER
_LISTING_BYTES: Final = 65 << 20
_RETRY_SECONDS: Final = 0.1
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DONE: Final = re.compile(r"done (\d{1,18}) (\d{1,9})")
_ENDED: Final = re.compile(r"ended (\d{1,9}) ?(?:\[\d+\] *[+-]? *)?(.*)")
_STATUS: Final = re.compile(r"(?:Done|Exit ?)?\(?(\d{1,3})\)?")
_SIGNALS: Final = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_KINDS: Final[Mapping[int, FileKind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
}
_LOST: Final = "what watched over the program was killed; no exit status was seen"
_NO_PROCESS: Final = ("resource temporarily unavailable", "Cannot fork", "can't fork")


class Execs(ABC):
    """One container of an engine's, as an `ExecSandbox` needs it."""

    @abstractmethod
    async def start(self, argv: Sequence[str], env: Mapping[str, str], call_id: str, *, stdin: bool) -> Hijacked:
        """Start a program as the sandbox's user, connected to its streams. Raises SandboxUnavailable."""

    @abstractmethod
    async def runs(self) -> bool:
        """Whether the container still does. Raises SandboxUnavailable."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, as far as that can be done without waiting."""

    @abstractmethod
    def counters(self) -> Counters:
        """The kernel's counters of the container, now."""


class ExecProcess(Process):
    """One program behind an exec."""

    def __init__(self, sandbox: "ExecSandbox", hijacked: Hijacked, before: Counters) -> None:
        self._sandbox = sandbox
        self._hijacked = hijacked
        self._before = before
        self._asked = False
        self.stdin, self.stdout, self.stderr = hijacked.stdin, hijacked.stdout, hijacked.stderr

    async def wait(self) -> Exit:
        await self._hijacked.over.wait()
        word = self._hijacked.word
        if word == "stuck":
            raise self._sandbox.lose("what the program left behind could not be ended")
        if not word:
            await self._sandbox.look()
            await self._sandbox.sweep()
        return name_exit(ended_of(word), self._before, self._sandbox.counters(), asked=self._asked)

    async def kill(self) -> None:
        """As every `kill`; it takes up to `KILL_SECONDS` here, and then the sandbox is ended."""
        if self._hijacked.over.is_set():
            return
        self._asked = True
        with anyio.move_on_after(KILL_SECONDS):
            while not self._hijacked.over.is_set():
                with contextlib.suppress(SandboxUnavailable, CommandRefused):  # no process is left for it: once more
                    await self._sandbox.kill_call(self._hijacked.call_id)
                    await self._hijacked.over.wait()
                await anyio.sleep(_RETRY_SECONDS)
        if not self._hijacked.over.is_set():
            self._sandbox.lose("the program could not be killed")

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                if self._sandbox.alive:
                    await self.kill()
            finally:
                self._sandbox.forget(self._hijacked)


def ended_of(word: str) -> Ended:
    """What the helper's last word says of a program's end; `gone` where it says nothing that makes sense.

    A shell names a signal by its description, and a status by `Done(3)`; where it names nothing, 128 plus the signal's
    number is a status like any other.
    """
    match = _ENDED.fullmatch(word)
    if match is None:
        return Ended("gone", detail=_LOST)
    killed, state = int(match[1]), match[2].strip().removesuffix(" (core dumped)")
    if state == "Done":
        return Ended("exit", 0, killed)
    if status := _STATUS.fullmatch(state):
        return Ended("exit", int(status[1]), killed)
    if state in _SIGNALS:
        return Ended("signal", _SIGNALS[state], killed)
    return Ended("gone", detail=_LOST)


class ExecSandbox(Sandbox):
    """What a kind adds: the container, and what `end` frees."""

    channel = "engine"
    lacks = frozenset({JOBS, TERMINALS})

    def __init__(
        self,
        session_id: str,
        execs: Execs,
        env: Mapping[str, str],
        end: Callable[[], Awaitable[object]],
        *,
        restored: bool,
        files_lost: bool,
    ) -> None:
        self.session_id = session_id
        self.restored = restored
        self._execs = execs
        self._env = env
        self._end = end
        self._files_lost = files_lost
        self._lost: SandboxLost | None = None
        self._helper = Path(__file__).with_name("helper.sh").read_text()
        self._running: set[Hijacked] = set()
        self._closing = False
        self._closed = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._lost is None

    def counters(self) -> Counters:
        return self._execs.counters()

    def check(self) -> None:
        """Raise the loss, if the sandbox is lost."""
        if self._lost is not None:
            raise SandboxLost(self._lost.message, files_lost=self._files_lost)

    def lose(self, reason: str) -> SandboxLost:
        """End the sandbox and every call in it; returns the loss."""
        if self._lost is None:
            self._lost = SandboxLost(reason, files_lost=self._files_lost)
            self._execs.kill()
            for hijacked in tuple(self._running):
                hijacked.close()
        return self._lost

    async def look(self) -> None:
        """Raise the loss where the container has ended."""
        self.check()
        if not await self._execs.runs():
            raise self.lose("the sandbox has died")

    async def aclose(self) -> None:
        self.lose("the sandbox is closed")
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            with anyio.CancelScope(shield=True):
                await self._end()
        finally:
            self._closed.set()

    # programs

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> ExecProcess:
        if terminal is not None:
            self.check_offered(TERMINALS)
        environment = {**self._env, **(env or {})}
        _check_environment(environment)
        run_request(argv, cwd, environment)
        if sum(len(word.encode(errors="surrogateescape")) + 9 for word in argv) > _MOST_WORDS:
            raise CommandRefused("arguments are too long", "pass the data by a file or standard input", code="E2BIG")
        before = self.counters()
        hijacked = await self._request("run", "1" if stdin else "", inside(cwd), *argv, env=environment, stdin=stdin)
        process = ExecProcess(self, hijacked, before)
        try:
            await self._begin(hijacked)
            if not hijacked.spawned:
                raise await self._refusal(hijacked, cwd, argv[0])
        except BaseException:
            await process.aclose()
            raise
        return process

    async def _begin(self, hijacked: Hijacked) -> None:
        with anyio.move_on_after(ANSWER_SECONDS):
            await hijacked.begun.wait()
        if not hijacked.begun.is_set():
            hijacked.close()
            raise _silent()

    async def _refusal(self, hijacked: Hijacked, folder: str, what: str) -> SandboxError:
        """Why a request did nothing. One that ended without a last word is the engine's failure, whose own words are
        on its standard output then."""
        word, _, detail = hijacked.word.partition(" ")
        if word in ("errno", "file", "signal"):
            return refused(Ended(word, detail=detail), folder if word == "file" else what)
        await self.look()
        if hijacked.refused is not None:
            return hijacked.refused
        said = bytearray()
        for stream in (hijacked.stdout, hijacked.stderr):
            with contextlib.suppress(anyio.EndOfStream):
                said += await stream.receive(4096)
        text = said.decode(errors="replace").strip()
        if any(words in text for words in _NO_PROCESS):
            return refused(Ended("pids"), what)
        if "argument list too long" in text:
            return CommandRefused("arguments are too long", "pass the data by a file or standard input", code="E2BIG")
        return SandboxUnavailable(f"the engine's exec ended without an answer: {text[:200] or 'no word'}")

    async def kill_call(self, call_id: str) -> None:
        """Kill what a call runs, and whatever lost its parents."""
        async with self._operation("kill", call_id) as hijacked:
            await self._done(hijacked, "kill")

    async def sweep(self) -> None:
        """Kill whatever lost its parents."""
        with anyio.move_on_after(KILL_SECONDS, shield=True), contextlib.suppress(SandboxUnavailable, CommandRefused):
            await self.kill_call("none")

    # files

    async def read(
        self, path: str, start: int = 0, end: int | None = None, *, follow: bool = True
    ) -> AsyncGenerator[bytes, None]:
        first, last = str(max(start, 0)), "" if end is None else str(max(end, 0))
        async with self._operation("read", inside(path), first, last, "1" if follow else "0") as hijacked:
            async with aclosing(_received(hijacked)) as chunks:
                async for chunk in chunks:
                    yield chunk
            await self._done(hijacked, path)

    async def write(self, path: str, chunks: AsyncIterable[bytes] | bytes, *, mode: int = 0o644) -> int:
        async with self._operation("write", inside(path), f"{mode & 0o777:04o}", stdin=True) as hijacked:
            with contextlib.suppress(anyio.BrokenResourceError):  # why is in its last word
                if isinstance(chunks, bytes):
                    await hijacked.send(chunks)
                else:
                    async for chunk in chunks:
                        await hijacked.send(chunk)
                await hijacked.send(hijacked.call_id.encode())
            await hijacked.stdin.aclose()
            return (await self._done(hijacked, path))[0]

    async def list(self, path: str = WORKSPACE, *, recursive: bool = False, max_entries: int = 100_000) -> Listing:
        data, complete = bytearray(), 0
        async with self._operation("list", inside(path), "1" if recursive else "0", str(max_entries)) as hijacked:
            with anyio.move_on_after(LIST_SECONDS):
                async with aclosing(_received(hijacked)) as chunks:
                    async for chunk in chunks:
                        data += chunk
                        if len(data) > _LISTING_BYTES:
                            raise FileRefused(f"{path}: the listing has no end", code="sandbox_helper_failed")
                _, complete = await self._done(hijacked, path)
        entries = sorted(_entries(bytes(data), path), key=lambda entry: os.fsencode(entry.path).split(b"/"))
        return Listing(tuple(entries[:max_entries]), complete == 1 and len(entries) <= max_entries)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        async with self._operation("remove", inside(path), "1" if recursive else "0") as hijacked:
            await self._done(hijacked, path)

    # requests

    async def _request(self, operation: str, *arguments: str, env: Mapping[str, str], stdin: bool = False) -> Hijacked:
        self.check()
        if any(map(_is_no_text, arguments)):
            operation, arguments = f"%{operation}", tuple(map(_written, arguments))
        call_id = secrets.token_hex(16)
        argv = [*HELPER, call_id, self._helper, operation, *arguments]
        try:
            hijacked = await self._execs.start(argv, env, call_id, stdin=stdin)
        except SandboxUnavailable:
            await self.look()
            raise
        self._running.add(hijacked)
        if self._lost is not None:
            self.forget(hijacked)
            self.check()
        return hijacked

    def forget(self, hijacked: Hijacked) -> None:
        self._running.discard(hijacked)
        hijacked.close()

    @asynccontextmanager
    async def _operation(self, operation: str, *arguments: str, stdin: bool = False) -> AsyncIterator[Hijacked]:
        """A request that is left with its end: one that is not over then is killed."""
        hijacked = await self._request(operation, *arguments, env=BASE_ENV, stdin=stdin)
        try:
            yield hijacked
        finally:
            if operation != "kill" and not hijacked.over.is_set() and self.alive:
                with anyio.move_on_after(KILL_SECONDS, shield=True), contextlib.suppress(SandboxError):
                    await self.kill_call(hijacked.call_id)
                    await hijacked.over.wait()
            self.forget(hijacked)

    async def _done(self, hijacked: Hijacked, what: str) -> tuple[int, int]:
        """The two numbers of a request that was done; raises what its last word means."""
        with anyio.move_on_after(ANSWER_SECONDS):
            await hijacked.over.wait()
        if not hijacked.over.is_set():
            raise _silent()
        if match := _DONE.fullmatch(hijacked.word):
            return int(match[1]), int(match[2])
        if hijacked.word == "stuck":
            raise self.lose("what a program left behind could not be ended")
        raise await self._refusal(hijacked, what, what)


async def _received(hijacked: Hijacked) -> AsyncGenerator[bytes, None]:
    """What a request writes; each piece in time."""
    while True:
        chunk = b""
        with anyio.move_on_after(ANSWER_SECONDS), contextlib.suppress(anyio.EndOfStream):
            chunk = await hijacked.stdout.receive()
        if not chunk and not hijacked.over.is_set():
            raise _silent()
        if not chunk:
            return
        yield chunk


def _silent() -> SandboxUnavailable:
    return SandboxUnavailable("the Docker engine does not answer", "see its log; restart it if it hangs")


def _check_environment(env: Mapping[str, str]) -> None:
    """A shell stands between: it takes only names that are its own, and the engine only text."""
    for name, value in env.items():
        if not _NAME.fullmatch(name) or _is_no_text(value):
            raise CommandRefused(f"not a variable of a shell: {name[:100]!r}", "name it as one", code="EINVAL")


def _is_no_text(word: str) -> bool:
    """Whether it holds bytes that are not UTF-8, as surrogates."""
    return any("\udc80" <= letter <= "\udcff" for letter in word)


def _written(word: str) -> str:
    """For `printf %b`."""
    data = os.fsencode(word.replace("\\", "\\\\"))
    return "".join(chr(byte) if byte < 0x80 else f"\\0{byte:03o}" for byte in data)


def _entries(data: bytes, path: str) -> Iterator[Entry]:
    """A listing: again and again a number, so many names, and as many lines with mode, size and time."""
    at = 0

    def taken(end: bytes) -> bytes:
        nonlocal at
        start, at = at, data.index(end, at) + 1
        return data[start : at - 1]

    try:
        while at < len(data):
            names = [taken(b"\0") for _ in range(int(taken(b"\0")))]
            for name in names:
                mode, size, modified = taken(b"\n").split()
                bits = int(mode, 16)
                kind = _KINDS.get(stat.S_IFMT(bits), "other")
                yield Entry(relative(name), kind, int(size), stat.S_IMODE(bits), float(modified))
    except ValueError as error:
        raise FileRefused(f"{path}: the listing makes no sense", code="sandbox_helper_failed") from error
