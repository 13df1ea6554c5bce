"""RedactSecrets: credentials leave neither in output, however it is cut, nor in previews, streams and the record."""

import base64
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import SettingsError
from gateway.hooks.hook import Hook, HookContext, Skip, TurnContext
from gateway.hooks.redact import LINE_BYTES, PATTERNS, RedactSecrets
from gateway.models import TurnRequest
from tests.gateway.conftest import Served, served

pytestmark = pytest.mark.anyio

VALUE = 'very "secret" / value'
LINES = "first line of it\nsecond line\r\nthird one"
GITHUB = b"ghp_" + b"a1B2" * 9
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\n%s\n-----END OPENSSH PRIVATE KEY-----" % b"\n".join(
    base64.b64encode(bytes(range(48))) for _ in range(20)
)
REDACT = "gateway.hooks.redact:RedactSecrets"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variables of the gateway's that hold secrets."""
    monkeypatch.setenv("TICKETS_TOKEN", VALUE)
    monkeypatch.setenv("SIGNING_KEY", LINES)


def redact(**options: Any) -> RedactSecrets:
    return RedactSecrets(values_from_env=("TICKETS_TOKEN", "SIGNING_KEY"), **options)


async def through(hook: RedactSecrets, chunks: Iterable[bytes]) -> list[bytes]:
    """What the filter gives for these chunks; the context is of no interest to it."""
    context: HookContext = None  # type: ignore[assignment]

    async def given() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [chunk async for chunk in hook.filter_output(context, "stdout", given())]


SECRETS = [
    pytest.param(VALUE.encode(), b"[redacted: TICKETS_TOKEN]", id="value"),
    pytest.param(json.dumps(VALUE).encode(), b'"[redacted: TICKETS_TOKEN]"', id="value-in-json"),
    pytest.param(b"very%20%22secret%22%20%2F%20value", b"[redacted: TICKETS_TOKEN]", id="value-in-url"),
    pytest.param(LINES.encode(), b"[redacted: SIGNING_KEY]", id="value-with-lines"),
    pytest.param(GITHUB, b"[redacted: github-token]", id="pattern"),
    pytest.param(KEY, b"[redacted: private-key]", id="private-key"),
    pytest.param(KEY.replace(b"\n", b"\\n"), b"[redacted: private-key]", id="private-key-in-json"),
    pytest.param(KEY[:525], b"[redacted: private-key]", id="private-key-cut-off"),
    pytest.param(b"https://me:pass-word@host/x", b"https://[redacted: password-in-url]@host/x", id="url"),
]


@pytest.mark.parametrize(("secret", "marker"), SECRETS)
async def test_a_secret_is_found_wherever_the_output_is_cut(secret: bytes, marker: bytes) -> None:
    """design 3: also across the borders of chunks: at each byte in two, and byte by byte; what is around it stays."""
    output = b"before it\nin a line " + secret + b"\nafter it \xff\x00\n" + bytes(range(32, 127))
    expected = output.replace(secret, marker)
    hook = redact()
    for at in range(len(output)):
        assert b"".join(await through(hook, [output[:at], output[at:]])) == expected
    assert b"".join(await through(hook, [bytes([byte]) for byte in output])) == expected


async def test_a_secret_in_a_line_without_an_end_is_found(request: pytest.FixtureRequest) -> None:
    """Around the length at which such a line is passed on, in chunks of a usual size."""
    hook, expected = redact(), b"[redacted: github-token]"
    for before in range(LINE_BYTES - 100, LINE_BYTES + 100, 7):
        output = b"x " * (before // 2) + GITHUB + b" y" * 20_000
        chunks = [output[at : at + 4096] for at in range(0, len(output), 4096)]
        joined = b"".join(await through(hook, chunks))
        assert (joined.count(expected), GITHUB in joined, len(joined)) == (1, False, len(output) - 40 + len(expected))


async def test_whole_lines_are_passed_on_at_once() -> None:
    """A stream stays one: what can hold no beginning of a secret does not wait; carriage returns end a line too."""
    chunks = [b"one\n", b"two", b" and a half\r", b"-----BEGIN PRIVATE", b" KEYS-----\n", b"prompt> "]
    assert await through(redact(), chunks) == [
        b"one\n",
        b"two and a half\r",
        b"-----BEGIN PRIVATE KEYS-----\n",
        b"prompt> ",
    ]


async def test_what_is_no_secret_stays() -> None:
    """Names and addresses that look a little like one."""
    text = b"sk-estimator-doc-link, ghp_short, AKIA, user@host:22, http://host:80/@x, eyJ.a.b, scheme://host:port/a@b\n"
    assert b"".join(await through(redact(), [text])) == text


@pytest.mark.parametrize("name", PATTERNS)
def test_each_built_in_pattern_finds_its_kind(name: str) -> None:
    """As its makers document it."""
    examples = {
        "aws-access-key": "AKIAIOSFODNN7EXAMPLE",
        "github-token": "github_pat_" + "11ABCDEFG0" * 8,
        "gitlab-token": "glpat-" + "x1" * 10,
        "google-api-key": "AIza" + "Sy_-9" * 7,
        "huggingface-token": "hf_" + "aB" * 17,
        "json-web-token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN",
        "model-api-key": "sk-ant-api03-" + "Ab-_1" * 10,
        "npm-token": "npm_" + "a1" * 18,
        "password-in-url": "postgres://user:hunter22@db",
        "private-key": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----",
        "pypi-token": "pypi-" + "AgEIcHlwaS5vcmc" * 5,
        "slack-token": "xoxb-123456789012-abcdefghijkl",
        "stripe-key": "sk_live_" + "a1B2" * 6,
    }
    assert f"[redacted: {name}]" in str(RedactSecrets().value(f"x {examples[name]} y"))


def test_own_patterns_come_beside_the_built_in_ones() -> None:
    hook = redact(patterns={"ticket": r"TCK-\d{6}"})
    assert hook.value({"TCK-123456": ["ok", 1, None, f"{GITHUB.decode()}!"]}) == {
        "[redacted: ticket]": ["ok", 1, None, "[redacted: github-token]!"]
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"values_from_env": ["NOT_SET"]}, "NOT_SET is not set"),
        ({"values_from_env": ["SHORT"]}, "SHORT has fewer than 8"),
        ({"patterns": {"mine": "("}}, "mine: not a pattern of RE2"),
        ({"patterns": {"mine": r"(?=x)"}}, "mine: not a pattern of RE2"),
        ({"patterns": {"mine": "a*"}}, "matches nothing at all"),
        ({"patterns": {"mine": "a" * 2000}}, "over 1000 characters"),
    ],
)
def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str) -> None:
    """The start says which, and what to do."""
    monkeypatch.setenv("SHORT", "1234567")
    with pytest.raises(SettingsError, match=says):
        RedactSecrets(**options)


@pytest.mark.slow
async def test_hostile_output_makes_no_search_slow() -> None:
    """A57: beginnings of secrets by the megabyte, nested as they may be, in time that grows with their length only; the
    loop goes on meanwhile."""
    hook, slowest = redact(), 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            before = time.monotonic()
            await anyio.sleep(0.01)
            slowest = max(slowest, time.monotonic() - before)

    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        for piece in (
            b"eyJaaaaaaaaaaa.",
            b"-----BEGIN A PRIVATE KEY-----\n",
            b"https://u:",
            b"sk-ant-",
            VALUE[:-1].encode(),
        ):
            flood = piece * ((4 << 20) // len(piece))
            await through(hook, [flood[at : at + 262_144] for at in range(0, len(flood), 262_144)])
        tasks.cancel_scope.cancel()
    assert (time.monotonic() - started < 60, slowest < 2) == (True, True)


# in a gateway


HOOKS = [{"use": REDACT, "options": {"values_from_env": ["TICKETS_TOKEN"]}}]
CLEAN = b"[redacted: TICKETS_TOKEN]"


async def everything(server: Served) -> bytes:
    """All that lies in the state folder but workspaces and tokens: stored results, the journal, what is spooled."""
    with sqlite3.connect(server.state_dir / "sandgate.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    files = [path for path in server.state_dir.rglob("*") if path.is_file() and "workspaces" not in path.parts]
    return b"".join(path.read_bytes() for path in files)


def leaks(data: bytes | str) -> bool:
    data = data.encode() if isinstance(data, str) else data
    return VALUE.encode() in data or json.dumps(VALUE)[1:-1].encode() in data


@pytest.mark.needs("local")
async def test_nothing_of_a_secret_leaves_a_call(state_dir: Path) -> None:
    """design 3, A26: not in the answer, the preview, the stored result, the stream, the list of calls or the journal:
    the arguments, too, which held it. The program itself had it."""
    async with served(state_dir, hooks=HOOKS) as server:
        session = await server.session()
        command = f"printf '%s' '{VALUE}' | tee copy; seq 20000; cat copy >&2; wc -c < copy"
        answer = await server.call(session, "bash", command=command)
        assert answer["content"][1]["text"] == CLEAN.decode()
        base = f"/v1/sessions/{session['id']}"
        stored = await server.agent.get(answer["references"][0]["reference"].replace("sandgate://", "/v1/sessions/"))
        assert stored.content.startswith(CLEAN)
        assert stored.content.endswith(b"21\n")
        body = {"tool": "bash", "arguments": {"command": command}}
        streamed = await server.agent.post(f"{base}/calls", json=body, headers={"accept": "text/event-stream"})
        assert "redacted: TICKETS_TOKEN" in streamed.text
        record = await server.agent.get(f"{base}/calls/{answer['id']}")
        assert record.json()["arguments"]["command"].count(CLEAN.decode()) == 1
        for text in (json.dumps(answer), stored.text, streamed.text, record.text):
            assert not leaks(text)
        assert not leaks(await everything(server))


@pytest.mark.needs("local")
async def test_refused_arguments_are_not_kept_with_their_secret(state_dir: Path) -> None:
    """design 9: redaction applies before a row is written, whatever became of the call; a retry gets the same."""
    async with served(state_dir, hooks=[{**HOOKS[0], "tools": ["python"]}]) as server:
        session = await server.session()
        body = {"tool": "bash", "arguments": {"command": 1, VALUE: VALUE}}
        url, key = f"/v1/sessions/{session['id']}/calls", {"idempotency-key": "k"}
        answers = [await server.agent.post(url, json=body, headers=key) for _ in range(2)]
        assert [one.json()["status"] for one in answers] == ["invalid", "invalid"]
        assert answers[0].json() == answers[1].json()
        assert not any(leaks(one.text) for one in answers)
        assert not leaks(await everything(server))


class Stops(Hook):
    """Says more than it should."""

    async def pre_agent_turn(self, ctx: TurnContext, request: TurnRequest) -> Skip:
        return Skip(f"not with {VALUE}")


async def test_what_hooks_say_of_turns_is_not_kept_with_a_secret(state_dir: Path) -> None:
    """design 9: the record of a turn, too."""
    hooks = [*HOOKS, {"use": f"{__name__}:Stops"}]
    async with served(state_dir, hooks=hooks, profiles={"default": {"kind": "none"}}) as server:
        session = await server.session()
        turns = f"/v1/sessions/{session['id']}/turns"
        answer = await server.agent.post(turns, json={"user_content": [{"type": "text", "text": "hello"}]})
        assert answer.status_code in (200, 201), answer.text
        assert "not with" in answer.text
        assert not leaks(await everything(server))
