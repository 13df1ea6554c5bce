"""ActiveCall: a call from its acceptance until nobody can ask for its stream any more."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import anyio

from gateway.models import STREAMS, Stream, ToolCall, ToolResult
from gateway.spool import Spools
from gateway.text import whole_characters


@dataclass(slots=True)
class ActiveCall:
    """One running (or just ended) call. `shows_output` is False where output may not leave before post hooks."""

    call: ToolCall
    spools: Spools
    shows_output: bool
    keyed: bool
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    result: ToolResult | None = None
    reason: str = ""
    streamed: bool = False
    readers: int = 0
    left: float | None = None
    replaced: list[Spools] = field(default_factory=list)
    listeners: list[Callable[[str], None]] = field(default_factory=list)

    def cancel(self, reason: str) -> None:
        """Ask it to end; it still gets its terminal record, and `result` says `cancelled` and why."""
        self.reason = self.reason or reason
        self.scope.cancel()

    async def wait(self) -> ToolResult:
        """The result, once its terminal record is written."""
        await self.done.wait()
        assert self.result is not None  # set before the event
        return self.result

    def tell(self, message: str) -> None:
        """Say how far the tool is, to whoever listens now."""
        for listener in self.listeners:
            listener(message)

    def finish(self, result: ToolResult) -> None:
        self.result = result
        for spools in (self.spools, *self.replaced):
            for spool in spools.values():
                spool.end()
        self.done.set()

    def replace_spools(self, spools: Spools) -> None:
        """Put other content in their place; who reads the old ones already goes on reading those."""
        self.replaced.append(self.spools)
        self.spools = spools

    def discard(self) -> None:
        """Forget all output."""
        for spools in (self.spools, *self.replaced):
            for spool in spools.values():
                spool.discard()

    async def __aenter__(self) -> "ActiveCall":
        self.streamed = True
        self.readers += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.readers -= 1
        if not self.readers:
            self.left = anyio.current_time()


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """Bytes `offset..offset+len(data)` of one stream; `offsets` is where each stream stands after it."""

    stream: Stream
    offset: int
    data: bytes
    offsets: Mapping[Stream, int]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How many bytes each stream has had, where the bytes themselves may not be shown yet."""

    bytes: Mapping[Stream, int]


EVENT_BYTES = 64 * 1024


async def output_events(
    active: ActiveCall, start: Mapping[Stream, int], keepalive_seconds: float
) -> AsyncIterator[OutputEvent | ProgressEvent | None]:
    """Everything from `start` on until the call is done; None now and then, where there is nothing to say.

    Events never cut a UTF-8 character in two, where the bytes are UTF-8.
    """
    if not active.shows_output:
        async for progress in _progress(active, keepalive_seconds):
            yield progress
        return
    offsets: dict[Stream, int] = {stream: start.get(stream, 0) for stream in STREAMS}
    spools = active.spools
    while True:
        ended, sent = active.done.is_set(), False
        seen = {stream: spools[stream].kept for stream in STREAMS}
        for stream in STREAMS:
            data = await spools[stream].read(offsets[stream], offsets[stream] + EVENT_BYTES)
            last = ended and offsets[stream] + len(data) >= spools[stream].kept
            data = data if last else whole_characters(data)
            if data:
                offset, offsets[stream] = offsets[stream], offsets[stream] + len(data)
                yield OutputEvent(stream, offset, data, dict(offsets))
                sent = True
        if ended and not sent:
            return
        if not sent and not await _changed(spools, seen, keepalive_seconds):
            yield None


async def _progress(active: ActiveCall, seconds: float) -> AsyncIterator[ProgressEvent]:
    while not active.done.is_set():
        with anyio.move_on_after(min(seconds, 1.0)):
            await active.done.wait()
        yield ProgressEvent({stream: active.spools[stream].total for stream in STREAMS})


async def _changed(spools: Spools, seen: Mapping[Stream, int], seconds: float) -> bool:
    """Wait until a stream has more than was seen, or has ended; False after `seconds` without either."""

    async def watch(stream: Stream) -> None:
        await spools[stream].more(seen[stream])
        tasks.cancel_scope.cancel()

    with anyio.move_on_after(seconds) as limit:
        async with anyio.create_task_group() as tasks:
            for stream in STREAMS:
                tasks.start_soon(watch, stream)
    return not limit.cancelled_caught
