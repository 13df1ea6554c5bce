"""HttpHook: a real service decides; one that is slow, broken, large or leads elsewhere closes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.build import hook_settings
from gateway.errors import SettingsError
from gateway.hooks.http import HttpHook
from gateway.hooks.registered import Registered
from gateway.models import ToolResult
from tests.gateway.conftest import called, opened, running

pytestmark = pytest.mark.anyio

USE = "gateway.hooks.http:HttpHook"
Asked = dict[str, Any]
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def service(decide: Callable[[Asked], Answer]) -> Iterator[tuple[str, list[Asked]]]:
    """A web service on loopback, and what it was asked, with the headers."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({"headers": dict(self.headers), **body})
            status, headers, content = decide(body)
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/decide", asked
        finally:
            server.shutdown()
            thread.join()


def says(**answer: Any) -> Callable[[Asked], Answer]:
    return lambda _: (200, {}, json.dumps(answer).encode())


def echo(text: str) -> str:
    """Say it."""
    return text


async def asked_once(state_dir: Path, url: str, timeout_seconds: float = 20, **options: Any) -> ToolResult:
    """One call of the function above, with such a hook."""
    entry = {"use": USE, "options": {"url": url, **options}, "timeout_seconds": timeout_seconds}
    tools = [{"use": f"{__name__}:echo"}]
    settings: dict[str, Any] = {"hooks": [entry], "tools": tools, "profiles": {"default": {"kind": "none"}}}
    async with running(state_dir, **settings) as gateway:
        return await called(gateway, await opened(gateway, labels={"who": "test"}), "echo", text="said")


async def test_a_service_is_asked_and_answers(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """seed-facts 10.1: what it gets, with a token from the environment; what it rewrites runs, and is shown."""
    monkeypatch.setenv("POLICY_TOKEN", "t0ken")

    def decide(asked: Asked) -> Answer:
        if asked["point"] == "pre_tool_call":
            return says(decision="continue", arguments={"text": asked["call"]["arguments"]["text"].upper()})(asked)
        block = {"type": "text", "text": asked["result"]["content"][0]["text"] + "!", "stream": "stdout"}
        return says(decision="continue", content=[block])(asked)

    points = ["pre_tool_call", "post_tool_call"]
    with service(decide) as (url, asked):
        result = await asked_once(state_dir, url, points=points, token_env="POLICY_TOKEN")
    assert (result.status, result.text) == ("ok", "SAID!")
    assert [one["headers"]["authorization"] for one in asked] == ["Bearer t0ken", "Bearer t0ken"]
    assert [one["point"] for one in asked] == points
    assert asked[0]["session"]["labels"] == {"who": "test"}
    assert (asked[0]["call"]["tool"], asked[1]["call"]["original_arguments"]) == ("echo", {"text": "said"})


ANSWERS = [
    (says(decision="continue"), "ok", "said"),
    (says(decision="skip", reason="not now"), "skipped", "not now"),
    (says(decision="skip"), "skipped", "gave no reason"),
    (says(decision="continue", arguments={"txt": "x"}), "invalid", "rewrote the arguments"),
    (says(decision="deny"), "hook", ""),
    (says(decision="continue", content=[]), "hook", ""),
    (says(decision="continue", argument={}), "hook", ""),
    (says(), "hook", ""),
    (lambda _: (200, {}, b"null"), "hook", ""),
    (lambda _: (200, {}, b"{"), "hook", ""),
    (lambda _: (204, {}, b""), "hook", ""),
    (lambda _: (500, {}, b'{"decision": "continue"}'), "hook", ""),
    (lambda _: (302, {"location": "/decide"}, b'{"decision": "continue"}'), "hook", ""),
    (lambda _: (200, {}, b'{"decision": "continue", "arguments": {"text": "%s"}}' % (b"x" * 5_000_000)), "hook", ""),
    (lambda _: (200, {"content-length": "100"}, b'{"decision": "continue"}'), "hook", ""),
]


@pytest.mark.parametrize(("decide", "status", "text"), ANSWERS)
async def test_an_answer_decides_or_closes(
    state_dir: Path, decide: Callable[[Asked], Answer], status: str, text: str
) -> None:
    """A58, seed-facts 12 row 2: only 200 with a decision of the point is one; errors, redirects, floods and cut answers
    are none."""
    with service(decide) as (url, _):
        result = await asked_once(state_dir, url, timeout_seconds=5)
    assert (result.status, text in result.text) == (status, True)


@pytest.mark.parametrize(
    "answer", [says(decision="skip"), says(decision="ask"), says(decision="continue", arguments={})]
)
async def test_after_a_tool_it_can_only_continue(state_dir: Path, answer: Callable[[Asked], Answer]) -> None:
    """seed-facts 12 row 2: a decision of the other point closes."""
    with service(answer) as (url, _):
        assert (await asked_once(state_dir, url, points=["post_tool_call"])).status == "hook"


async def test_a_service_that_is_slow_or_gone_closes(state_dir: Path, tmp_path: Path) -> None:
    """A58: the hook's limit holds for the whole answer, also one that comes byte by byte."""
    slow = threading.Event()

    def decide(_: Asked) -> Answer:
        slow.wait(20)
        return says(decision="continue")(_)

    with service(decide) as (url, _):
        started = time.monotonic()
        with anyio.fail_after(15):
            assert (await asked_once(state_dir, url, timeout_seconds=0.5)).status == "hook"
        assert time.monotonic() - started < 10
        slow.set()
    assert (await asked_once(tmp_path / "other", url)).status == "hook"


async def test_asking_asks_a_person(state_dir: Path) -> None:
    """`ask` waits for an approval with the service's question."""
    with service(says(decision="ask", question="sure?")) as (url, _):
        entry = {"use": USE, "options": {"url": url}}
        settings: dict[str, Any] = {
            "hooks": [entry],
            "tools": [{"use": f"{__name__}:echo"}],
            "profiles": {"default": {"kind": "none"}},
            "server": {"approval_wait_seconds": 0.1},
        }
        async with running(state_dir, **settings) as gateway:
            assert (await called(gateway, await opened(gateway), "echo", text="said")).status == "pending"


@pytest.mark.parametrize(
    ("options", "says_what"),
    [
        ({"url": "ftp://x"}, "no http address"),
        ({"url": "http://x", "points": ["pre_llm_call"]}, "points"),
        ({"url": "http://x", "points": []}, "points"),
        ({"url": "http://x", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says_what: str) -> None:
    with pytest.raises(SettingsError, match=says_what):
        HttpHook(**options)


def test_it_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """issue: the whole hook list round-trips; the token is not in it."""
    monkeypatch.setenv("POLICY_TOKEN", "t0ken")
    hook = HttpHook("http://x", points=["post_tool_call"], token_env="POLICY_TOKEN")
    assert hook_settings(Registered(hook)).options == {
        "url": "http://x",
        "points": ["post_tool_call"],
        "token_env": "POLICY_TOKEN",
    }
