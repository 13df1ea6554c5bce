"""A session's terminal: one shell, from its start to its end, whose reader may leave and come back."""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from sandboxes import Exit, Process, SandboxLost, TerminalSize

logger = logging.getLogger(__name__)

BACKLOG_BYTES: Final = 64 * 1024
"""How much of what was shown a reader gets who comes later."""
SHELL: Final = ("bash",)
SHELL_ENV: Final = {"TERM": "xterm-256color"}


@dataclass(slots=True)
class Reader:
    """One reader of a terminal: what was shown lately, then what is shown. `replaced` says that another came."""

    backlog: bytes
    send: MemoryObjectSendStream[bytes]
    receive: MemoryObjectReceiveStream[bytes]
    replaced: bool = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Everything, to the terminal's end or until another reader takes its place."""
        if self.backlog:
            yield self.backlog
        with contextlib.suppress(anyio.ClosedResourceError):
            async for chunk in self.receive:
                yield chunk

    def close(self) -> None:
        self.receive.close()
        self.send.close()


@dataclass(slots=True)
class SessionTerminal:
    """A running shell on a terminal. A slow reader slows it; without a reader it runs on, and only the last
    `BACKLOG_BYTES` of what it shows are kept. `exit` is None until it has ended by itself."""

    process: Process
    exit: Exit | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    _reader: Reader | None = None
    _backlog: bytearray = field(default_factory=bytearray)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def attached(self) -> bool:
        return self._reader is not None

    async def run(self) -> None:
        """Show what the shell writes until it ends; its whole tree is dead when this returns."""
        try:
            with self._scope:
                async with self.process:
                    with contextlib.suppress(anyio.EndOfStream):
                        while True:
                            await self._show(await self.process.stdout.receive())
                    with contextlib.suppress(SandboxLost):
                        self.exit = await self.process.wait()
        except Exception:  # nothing that one terminal meets ends the others, or the gateway
            logger.exception("a terminal broke")
        finally:
            self.ended.set()
            if self._reader is not None:
                self._reader.send.close()

    async def _show(self, chunk: bytes) -> None:
        self._backlog += chunk
        surplus = len(self._backlog) - BACKLOG_BYTES
        if surplus > 0:  # from the start of a line on, where there is one: half a control sequence is no good start
            newline = self._backlog.find(b"\n", surplus)
            del self._backlog[: surplus if newline < 0 else newline + 1]
        if self._reader is not None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._reader.send.send(chunk)

    def attach(self) -> Reader:
        """Become its reader, in the place of whoever is; `detach` afterwards."""
        if self._reader is not None:
            self._reader.replaced = True
            self._reader.close()
        send, receive = anyio.create_memory_object_stream[bytes]()
        self._reader = Reader(bytes(self._backlog), send, receive)
        if self.ended.is_set():
            send.close()
        return self._reader

    def detach(self, reader: Reader) -> None:
        reader.close()
        if self._reader is reader:
            self._reader = None

    async def type(self, data: bytes) -> None:
        """Give it what was typed; waits where its program takes nothing. Nothing where it has ended."""
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.process.stdin.send(data)

    def resize(self, size: TerminalSize) -> None:
        self.process.resize(size)

    async def aclose(self) -> None:
        """End it; its tree is dead when this returns."""
        self._scope.cancel()
        await self.ended.wait()
