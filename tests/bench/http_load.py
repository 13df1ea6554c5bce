"""A lean HTTP client for the benchmarks: one keep-alive connection, no parsing beyond what is needed.

Run as a program it calls a gateway over some connections at once and prints the times as JSON.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass


@dataclass
class Connection:
    """One connection to a gateway, and the bytes of the one request that it repeats."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    request: bytes

    async def call(self) -> bytes:
        self.writer.write(self.request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await self.reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200") or b'"status":"ok"' not in body:
            raise RuntimeError(f"unexpected answer: {head!r} {body!r}")
        return body


async def connect(host: str, port: int, token: str, session: str, command: str) -> Connection:
    body = json.dumps({"tool": "bash", "arguments": {"command": command}}).encode()
    head = (
        f"POST /v1/sessions/{session}/calls HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    return Connection(reader, writer, head + body)


async def load(host: str, port: int, token: str, sessions: list[str], calls: int) -> dict[str, object]:
    """`calls` calls of `echo hi` on each connection, one connection a session; times in ms."""
    connections = [await connect(host, port, token, session, "echo hi") for session in sessions]
    times: list[float] = []

    async def run(connection: Connection) -> None:
        for _ in range(calls):
            started = time.perf_counter()
            await connection.call()
            times.append((time.perf_counter() - started) * 1000)

    for connection in connections:
        await connection.call()
    started = time.perf_counter()
    await asyncio.gather(*(run(one) for one in connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.writer.close()
    return {"times": times, "seconds": seconds}


if __name__ == "__main__":
    host, port, token, sessions, calls = sys.argv[1:]
    print(json.dumps(asyncio.run(load(host, int(port), token, sessions.split(","), int(calls)))))
