"""Background jobs over a direct channel: all of a job is in its slot inside, the gateway's end only asks."""

import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NoReturn

import anyio

from sandboxes.channel import Channel, Ended, reading, refuse
from sandboxes.errors import CommandRefused, JobNotFound, SandboxError, TooManyJobs
from sandboxes.request import run_request
from sandboxes.sandbox import CHUNK_BYTES, MOST_JOBS, WORKSPACE, Exit, Job, JobOutput, Jobs

_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,32}")
_HOW: Final = re.compile(rb"(running|exit|signal) (\d{1,3}) (\d{1,9})")
_NUMBER: Final = re.compile(rb"\d{1,20}")
_TITLE_BYTES: Final = 200
_STATE_BYTES: Final = 1024
_START_TRIES: Final = 3
_NO_PROCESS: Final = (("pids", ""), ("errno", "EAGAIN"))
_LOST_SLOT: Final = "the slot of this job was killed or stopped, and its output is lost"


class DirectJobs(Jobs):
    """One request at a time, so that none waits in a slot behind another; each takes about a millisecond."""

    def __init__(self, link: Channel, env: Mapping[str, str]) -> None:
        self._link = link
        self._env = env
        self._lock = anyio.Lock()

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        title: str = "",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError("the name of a job is 1 to 32 letters, digits and dashes")
        shown = title.encode(errors="replace").replace(b"\0", b"?")[:_TITLE_BYTES]
        body = run_request(argv, cwd, {**self._env, **(env or {})}, operation=b"start\0" + shown)
        async with self._lock:
            if len(await self._names()) >= MOST_JOBS and not await self._forget_oldest():
                raise TooManyJobs(f"{MOST_JOBS} background jobs run here", "Stop one of them first.")
            for _ in range(_START_TRIES + MOST_JOBS):
                ended, accepted, _ = await self._ask(body, b"n" + name.encode())
                if ended.word == "done":
                    return
                if (ended.word, ended.detail) in _NO_PROCESS and await self._forget_oldest():
                    continue
                if ended.word != "gone":
                    refuse(ended, cwd if ended.word == "file" else argv[0])
                if accepted:
                    break
        raise CommandRefused(f"cannot start {argv[0]}: its slots are killed", "end what runs here", code="EAGAIN")

    async def list(self) -> tuple[Job, ...]:
        async with self._lock:
            return tuple([job async for job in self._jobs()])

    async def read(self, name: str, offset: int = 0, max_bytes: int = CHUNK_BYTES) -> JobOutput:
        async with self._lock:
            return await self._look(name, offset, max_bytes)

    async def write(self, name: str, data: bytes, *, close: bool = False) -> int:
        async with self._lock:
            ended, _ = await self._tell(name, b"feed\0%d\0%s" % (close, data))
        if not ended.count:
            raise anyio.BrokenResourceError
        return min(ended.number, len(data))

    async def stop(self, name: str) -> Job:
        async with self._lock:
            await self._tell(name, b"stop")
            return (await self._look(name, 0, 0)).job

    async def _forget_oldest(self) -> bool:
        """Forget the oldest that has ended, and its process with it; False where all run."""
        async for job in self._jobs():
            if job.exit is not None:
                await self._tell(job.name, b"forget")
                return True
        return False

    async def _jobs(self) -> AsyncIterator[Job]:
        """All of them, the oldest first; one whose slot is lost meanwhile is left out."""
        for name in await self._names():
            with contextlib.suppress(JobNotFound):
                yield (await self._look(name, 0, 0)).job

    async def _names(self) -> tuple[str, ...]:
        _, _, data = await self._ask(b"list", b"l", max_bytes=MOST_JOBS * 64)
        names = tuple(data.decode("ascii", "replace").split())
        if not all(map(_NAME.fullmatch, names)):
            self._nonsense()
        return names

    async def _look(self, name: str, offset: int, max_bytes: int) -> JobOutput:
        _, data = await self._tell(name, b"look\0%d\0%d" % (offset, max_bytes), max_bytes)
        how, *numbers, title, output = _fields(data) or self._nonsense()
        if how == b"stuck":
            self._link.lose("what a job left behind could not be ended")
            self._link.check()
        found = _HOW.fullmatch(how)
        if found is None or len(output) > max_bytes or not all(map(_NUMBER.fullmatch, numbers)):
            self._nonsense()
        started, ended, start, first, total = map(int, numbers)
        word = found[1].decode()
        end = None if word == "running" else Exit("exit" if word == "exit" else "signal", int(found[2]), int(found[3]))
        job = Job(
            name, title.decode(errors="replace"), end, started / 1e9, ended / 1e9 if ended else None, first, total
        )
        return JobOutput(job, start, output)

    async def _tell(self, name: str, body: bytes, max_bytes: int = 0) -> tuple[Ended, bytes]:
        """Ask a job's own slot."""
        if not _NAME.fullmatch(name):
            raise _no_such(name)
        ended, accepted, data = await self._ask(body, b"j" + name.encode(), max_bytes)
        if ended.word == "gone" and accepted:
            raise JobNotFound(f"job {name}: {_LOST_SLOT}", "Start it again.")
        if ended.word in ("nojob", "gone"):
            raise _no_such(name)
        if ended.word != "done":
            raise SandboxError(f"job {name} cannot be asked: {ended.detail or ended.word}")
        return ended, data

    async def _ask(self, body: bytes, to: bytes, max_bytes: int = 0) -> tuple[Ended, bool, bytes]:
        """The last word, whether a slot had begun, and what it wrote: never more than asked and a little."""
        data = bytearray()
        async with reading(self._link, body, to) as (call, pipe):
            async for chunk in pipe:
                data += chunk
                if len(data) > max_bytes + _STATE_BYTES:
                    self._nonsense()
            return await call.over(), call.accepted, bytes(data)

    def _nonsense(self) -> NoReturn:
        self._link.lose("the sandbox said what it must not")
        self._link.check()
        raise AssertionError  # a lost channel raises


def _fields(data: bytes) -> list[bytes] | None:
    """How it is, five numbers, the title, and then the output, which may hold anything."""
    fields = data.split(b"\0", 7)
    return fields if len(fields) == 8 else None


def _no_such(name: str) -> JobNotFound:
    return JobNotFound(
        f"no background job {name[:64]!r} here",
        "job_list shows them; jobs end with their sandbox, and the oldest ended one makes room for a new one.",
    )
