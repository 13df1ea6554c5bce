# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-backend[server,remote]>=0.2.37"]
# ///
"""Time pydantic-ai-backend's sandboxd: a service of its own, asked over HTTP, which asks the engine's exec."""

import os
import secrets
import socket
import subprocess
import sys
import time

import httpx
from peer_timing import IMAGE, calls_wanted, check_hi, report, time_calls
from pydantic_ai_backends.remote.wire import TOKEN_HEADER

SECONDS = 60.0


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    settings = {"TOKEN": token, "RUNTIMES": f"ours={IMAGE}", "HOST": "127.0.0.1", "PORT": str(port)}
    server = subprocess.Popen(
        [sys.executable, "-m", "pydantic_ai_backends.remote.server"],
        env={**os.environ, **{f"SANDBOXD_{name}": value for name, value in settings.items()}},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={TOKEN_HEADER: token}, timeout=SECONDS, trust_env=False
        ) as client:
            _wait(client)
            _measure(client)
    finally:
        server.terminate()
        server.wait(SECONDS)


def _wait(client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            client.get("/healthz").raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _measure(client: httpx.Client) -> None:
    session = client.post("/sessions", json={}).raise_for_status().json()["session"]["session_id"]
    try:

        def run() -> None:
            body = {"argv": ["sh", "-c", "echo hi"], "run_id": secrets.token_hex(16)}
            done = client.post(f"/sessions/{session}/run", json=body).raise_for_status().json()
            check_hi(done["exit_code"], done["stdout"])

        calls = calls_wanted()
        report("pydantic-ai-backend's sandboxd, over HTTP", "pydantic-ai-backend", time_calls(run, calls), calls)
    finally:
        client.delete(f"/sessions/{session}").raise_for_status()


if __name__ == "__main__":
    main()
