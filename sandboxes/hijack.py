"""A program that the engine's exec has started, as streams: one connection for each, which the engine turns into the
program's own after an HTTP request; output comes in frames of a type, a length and bytes.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
from typing import Final, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from sandboxes.errors import SandboxUnavailable
from sandboxes.sandbox import CHUNK_BYTES

_FRAME: Final = struct.Struct("!BxxxI")
_STDOUT, _STDERR = 1, 2
_HEAD_BYTES: Final = 16 * 1024
_WORD_BYTES: Final = 512
_MOST_BUFFERED: Final = 1 << 20
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")


class Hijacked(asyncio.Protocol):
    """The connection of one exec. `word` is the helper's last word on the program's standard error, empty where it said
    none; `begun` is set when it said that the program runs, or at the end; `over` at the end."""

    def __init__(self, exec_id: str, call_id: str, version: str) -> None:
        self.stdout, self.stderr, self.stdin = _Output(self), _Output(self), _Input(self)
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.spawned = False
        self.word = ""
        self.refused: SandboxUnavailable | None = None
        self.call_id = call_id
        self._exec_id = exec_id
        self._version = version
        self._mark = b"\0" + call_id.encode() + b" "
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._in_frames = False
        self._held = bytearray()
        self._answered = asyncio.Event()
        self._sending: socket.socket | None = None
        self._sends = 0

    # the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        # a descriptor of its own: a program that reads no more ends the writing, and not the reading
        self._sending = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._sending.setblocking(False)
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        head = (
            f"POST /v{self._version}/exec/{self._exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._in_frames and not self._read_head():
            return
        self._read_frames()
        if self.buffered > _MOST_BUFFERED and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stop_sending()
        if self._held.startswith(self._mark):
            self.word = self._held[len(self._mark) :].decode("utf-8", "replace").strip()
        else:
            self.stderr.feed(self._held)
        self.stdout.end()
        self.stderr.end()
        self._answered.set()
        self.begun.set()
        self.over.set()

    def close(self) -> None:
        self._stop_sending()
        if self._transport is not None:
            self._transport.abort()

    def _stop_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            with contextlib.suppress(OSError):
                sending.shutdown(socket.SHUT_RDWR)
            if not self._sends:
                sending.close()  # else who sends is woken, and closes it

    # what it brings

    @property
    def buffered(self) -> int:
        return self.stdout.buffered + self.stderr.buffered

    def taken(self) -> None:
        """Some output was taken: go on reading where there is room again."""
        if self._transport is not None and self.buffered <= _MOST_BUFFERED // 2:
            self._transport.resume_reading()

    def _read_head(self) -> bool:
        head, end, rest = bytes(self._data).partition(b"\r\n\r\n")
        status = _STATUS.match(head)
        if (end and status is None) or len(head) > _HEAD_BYTES:
            self._refuse("its answer to an exec makes no sense")
        elif end and status is not None and status[1] not in (b"101", b"200"):
            self._refuse(rest.decode("utf-8", "replace").strip() or f"status {status[1].decode()}")
        elif end:
            self._data = bytearray(rest)
            self._in_frames = True
            self._answered.set()
        return self._in_frames

    def _refuse(self, why: str) -> None:
        self.refused = SandboxUnavailable(f"the Docker engine refused: {why[:500]}")
        self.close()

    def _read_frames(self) -> None:
        at = 0
        while len(self._data) - at >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._data, at)
            if len(self._data) - at < _FRAME.size + size:
                break
            at += _FRAME.size
            body = memoryview(self._data)[at : at + size]
            if kind == _STDOUT:
                self.stdout.feed(body)
            elif kind == _STDERR:
                self._hear(bytes(body))
            body.release()
            at += size
        del self._data[:at]

    def _hear(self, data: bytes) -> None:
        """Pass on what the program writes on standard error, and take out what the helper says there. A program can
        say it too, of itself: the helper's is the last."""
        self._held += data
        while (at := self._held.find(self._mark)) >= 0:
            self.stderr.feed(self._held[:at])
            del self._held[:at]
            end = self._held.find(b"\n")
            if end < 0 and len(self._held) <= _WORD_BYTES:
                return
            if not 0 <= end <= _WORD_BYTES:
                self.stderr.feed(self._held[:1])
                del self._held[:1]
                continue
            self._said(self._held[len(self._mark) : end].decode("utf-8", "replace").strip())
            del self._held[: end + 1]
        rest = max(0, len(self._held) - len(self._mark) + 1)
        self.stderr.feed(self._held[:rest])
        del self._held[:rest]

    def _said(self, word: str) -> None:
        if word == "spawned":
            self.spawned = True
            self.begun.set()
        else:
            self.word = word
            self._end_input()

    # what it takes

    async def send(self, data: bytes) -> None:
        """Write to its input, not before the engine's answer: it drops what comes with the request."""
        await self._answered.wait()
        sending = self._sending
        if sending is None:
            raise anyio.BrokenResourceError
        self._sends += 1
        try:
            await asyncio.get_running_loop().sock_sendall(sending, data)
        except OSError:
            raise anyio.BrokenResourceError from None
        finally:
            self._sends -= 1
            if self._sending is None and not self._sends:
                sending.close()

    async def end_input(self) -> None:
        await self._answered.wait()
        self._end_input()

    def _end_input(self) -> None:
        if self._sending is not None:
            with contextlib.suppress(OSError):
                self._sending.shutdown(socket.SHUT_WR)


class _Output(ByteReceiveStream):
    """One of the two outputs."""

    def __init__(self, hijacked: Hijacked) -> None:
        self._hijacked = hijacked
        self._data = bytearray()
        self._news = asyncio.Event()
        self._ended = False
        self._closed = False

    @property
    def buffered(self) -> int:
        return len(self._data)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closed and len(data):
            self._data += data
            self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def receive(self, max_bytes: int = CHUNK_BYTES) -> bytes:
        while not self._data:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._ended:
                raise anyio.EndOfStream
            self._news.clear()
            await self._news.wait()
        chunk = bytes(self._data[:max_bytes])
        del self._data[:max_bytes]
        self._hijacked.taken()
        return chunk

    async def aclose(self) -> None:
        self._closed = True
        self._data.clear()
        self._news.set()
        self._hijacked.taken()


class _Input(ByteSendStream):
    """Standard input. Closing it is its end for the program."""

    def __init__(self, hijacked: Hijacked) -> None:
        self._hijacked = hijacked
        self._closed = False

    async def send(self, item: bytes) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        await self._hijacked.send(item)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._hijacked.end_input()
