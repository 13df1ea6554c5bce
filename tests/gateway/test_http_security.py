"""Attacks on the HTTP side: paths, references, headers, bodies, tokens, and what must never leak."""

import json
import logging
import re
import subprocess
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import anyio
import fsspec
import pytest
from fsspec import AbstractFileSystem

from gateway.errors import SettingsError
from gateway.principals import digest
from gateway.settings import Server
from gateway.transports.http import guard
from gateway.transports.http import serving as http_serving
from gateway.transports.http.serving import listen
from tests.gateway.conftest import Served, running, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


async def raw(url: str, *pieces: bytes, seconds: float = 10) -> bytes:
    """Send bytes as they are, and read one answer, or to the end of the connection."""
    place = urlsplit(url)
    answer = b""
    async with await anyio.connect_tcp(str(place.hostname), place.port or 80) as stream:
        with anyio.move_on_after(seconds):
            with suppress(anyio.BrokenResourceError):  # it may refuse before it has heard all
                for piece in pieces:
                    await stream.send(piece)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while not whole(answer):
                    answer += await stream.receive()
    return answer


def whole(answer: bytes) -> bool:
    start, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", start)
    return bool(end and length and len(body) >= int(length[1]))


def head(
    server: Served,
    method: str,
    target: bytes | str,
    *headers: bytes,
    host: bytes = b"127.0.0.1",
    token: str | None = None,
) -> bytes:
    """A request head with the agent's token, which no client has made proper."""
    target = target.encode() if isinstance(target, str) else target
    authorization = (token or server.agent.headers["authorization"]).encode()
    lines = [
        method.encode() + b" " + target + b" HTTP/1.1",
        b"Host: " + host,
        b"Authorization: " + authorization,
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def post(server: Served, path: str, body: bytes) -> bytes:
    return await raw(
        server.url,
        head(server, "POST", path, b"Content-Type: application/json", b"Content-Length: %d" % len(body)) + body,
    )


HOSTILE_PATHS = {
    "up": b"/files/../../../../etc/passwd",
    "up-inside": b"/files/a/../../etc/passwd",
    "escaped": b"/files/%2e%2e/%2e%2e/etc/passwd",
    "escaped-slash": b"/files/..%2f..%2f..%2fetc%2fpasswd",
    "twice": b"/files/%252e%252e%252f%252e%252e%252fetc%252fpasswd",
    "overlong": b"/files/%c0%ae%c0%ae/%c0%ae%c0%ae/etc/passwd",
    "backslash": b"/files/..%5c..%5cetc%5cpasswd",
    "raw-backslash": b"/files/..\\..\\etc\\passwd",
    "nul": b"/files/a%00/../../etc/passwd",
    "nul-alone": b"/files/etc%00",
    "double-slash": b"/files//etc/passwd",
    "dot": b"/files/./etc",
    "long-name": b"/files/" + b"a" * 300,
    "long-path": b"/files/" + b"/".join([b"d" * 250] * 20),
    "just-fits": b"/files/" + b"/".join([b"d" * 250] * 16),
    "very-long": b"/files/" + b"a" * 60_000,
    "escaped-route": b"/%66iles/etc/passwd",
    "two-routes": b"/%66iles/x/files/../../etc/passwd",
    "route-as-name": b"/files%2f..%2f..%2fetc%2fpasswd",
    "raw-bytes": b"/files/\xff\xfe/etc",
    "semicolon": b"/files;/../etc/passwd",
    "result-up": b"/results/../../../../etc/passwd",
    "result-nul": b"/results/a%00",
    "call-up": b"/calls/..%2f..%2f",
}


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_a_path_that_leaves_the_workspace_is_refused(server: Served, method: str) -> None:
    """A36: whatever the spelling, 400, 404, 405 or 422; nothing outside is read, written or removed."""
    session = await server.session()
    before = Path("/etc/passwd").stat().st_mtime_ns
    seen = {}
    for name, path in HOSTILE_PATHS.items():
        body = b"owned" if method == "PUT" else b""
        answer = await raw(
            server.url,
            head(server, method, f"/v1/sessions/{session['id']}".encode() + path, b"Content-Length: %d" % len(body))
            + body,
        )
        seen[name] = status_of(answer)
        assert b"root:x:0" not in answer
    allowed = {"PUT": {400, 404, 405, 415, 422}}.get(method, {400, 404, 405})
    harmless = ("twice", "overlong", "backslash", "raw-backslash", "just-fits") if method == "PUT" else ()
    assert {name: code for name, code in seen.items() if code not in allowed} == dict.fromkeys(harmless, 201)
    assert Path("/etc/passwd").stat().st_mtime_ns == before
    assert sorted(path.name for path in server.state_dir.iterdir() if path.name in ("etc", "passwd")) == []


async def test_an_absolute_request_target_names_no_other_host(server: Served) -> None:
    """A36, A47: `GET http://evil/...` is judged by its Host header and its path, and stays in the session."""
    session = await server.session()
    target = f"http://evil.example/v1/sessions/{session['id']}/files/../../etc/passwd"
    assert status_of(await raw(server.url, head(server, "GET", target))) in (400, 404)


async def stored(server: Served, session: dict[str, Any]) -> str:
    """A stored result's reference."""
    result = await server.call(session, "bash", command="seq 1 20000")
    reference: str = result["references"][0]["reference"]
    return reference


async def test_a_foreign_reference_looks_like_a_forged_one(server: Served) -> None:
    """A39, R76: another session's result, over the route and over read_result, is the same answer as one that never
    was."""
    owner, other = await server.session(), await server.session()
    reference = await stored(server, owner)
    key = reference.rpartition("/")[2]
    forged = f"sandgate://s-{'0' * 32}/results/{key}"
    async with server.client(other["token"]) as stranger:
        real = await stranger.get(f"/v1/sessions/{owner['id']}/results/{key}")
        absent = await stranger.get(f"/v1/sessions/s-{'0' * 32}/results/{key}")
        own = [
            await stranger.post(
                f"/v1/sessions/{other['id']}/calls", json={"tool": "read_result", "arguments": {"reference": one}}
            )
            for one in (reference, forged)
        ]
    assert (real.status_code, real.text) == (absent.status_code, absent.text) == (404, real.text)
    answers = [{**one.json(), "id": "", "duration_ms": 0} for one in own]
    assert answers[0] == answers[1]
    assert answers[0]["status"] == "failed"
    assert answers[0]["error"]["code"] == "not_found"


async def test_an_own_expired_result_is_410(state_dir: Path) -> None:
    """A39: the owner is told that it was there, on both ways; a stranger still is not."""
    async with served(state_dir, store={"retention_hours": 1 / 3600}) as server:
        owner, other = await server.session(), await server.session()
        reference = await stored(server, owner)
        path = f"/v1/sessions/{owner['id']}/results/{reference.rpartition('/')[2]}"
        await anyio.sleep(1.5)
        mine = await server.agent.get(path)
        async with server.client(other["token"]) as stranger:
            theirs = await stranger.get(path)
        again = await server.call(owner, "read_result", reference=reference)
    assert (mine.status_code, mine.json()["code"], theirs.status_code) == (410, "expired", 404)
    assert again["error"]["code"] == "expired"


FORGED = [
    "file:///etc/passwd",
    "/etc/passwd",
    "../../etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "s3://other-bucket/key",
    "memory://x",
    "simplecache::file:///etc/passwd",
    "sandgate://../results/x",
    "sandgate://{id}/results/../../x",
    "sandgate://{id}/results/",
    "sandgate://{id}/files/x",
    "SANDGATE://{id}/results/{key}",
    "sandgate://{id}/results/{key}?x",
    "sandgate://{id}/results/{key}\n",
    " sandgate://{id}/results/{key}",
    "0001-bash-stderr",
    "data:text/plain,x",
    "\x00",
    "a" * 100_000,
]


async def test_a_forged_reference_reads_nothing(server: Served) -> None:
    """A40: schemes, paths, buckets and guesses are absent, in read_result and on the route."""
    session = await server.session()
    key = (await stored(server, session)).rpartition("/")[2]
    seen, routes = set(), set()
    for reference in FORGED:
        forged = reference.replace("{id}", session["id"]).replace("{key}", key)
        result = await server.call(session, "read_result", reference=forged)
        seen.add((result["status"], (result["error"] or {}).get("code"), inside_text(result)))
        target = f"/v1/sessions/{session['id']}/results/{quote(forged, safe='/:.')}"
        routes.add(status_of(await raw(server.url, head(server, "GET", target))))
    assert seen == {("failed", "not_found", "")}
    assert routes <= {400, 404, 431}


async def test_two_gateways_with_memory_stores_share_nothing(tmp_path: Path) -> None:
    """A41: same process, same address, same scope and key: two objects."""
    store = {"uri": "memory://results"}
    async with running(tmp_path / "one", store=store) as one, running(tmp_path / "two", store=store) as two:
        for gateway, content in ((one, b"of one"), (two, b"of two")):
            await gateway.results.put("s-same", "key", content, "text/plain")
        read = [b"".join([chunk async for chunk in gateway.results.read("s-same", "key")]) for gateway in (one, two)]
    assert read == [b"of one", b"of two"]


@pytest.mark.needs("root")
async def test_another_user_of_the_host_reads_no_results(tmp_path: Path) -> None:
    """A42: results, journal and tokens are closed to another uid, by the folder and by each file's own mode."""
    opened_up = tmp_path / "open"
    opened_up.mkdir()
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    async with served(opened_up / "state") as server:
        session = await server.session()
        await stored(server, session)
        files = [
            path
            for place in ("results", "tokens", "sandgate.db")
            for path in [server.state_dir / place, *(server.state_dir / place).rglob("*")]
            if path.is_file()
        ]
        assert any("results" in path.parts for path in files)
        readable = await anyio.to_thread.run_sync(_opens_as_nobody, [server.state_dir, *files])
        modes = {oct(path.stat().st_mode & 0o077) for path in [server.state_dir, *files]}
    assert (readable, modes) == (["/etc/passwd"], {"0o0"})


def _opens_as_nobody(paths: Iterable[Path]) -> list[str]:
    script = 'for path; do { ls "$path" >/dev/null && cat "$path"; } >/dev/null 2>&1 && echo "$path"; done; true'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", "/etc/passwd", *map(str, paths)],
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return done.stdout.split()


FOREIGN_HOSTS = [
    b"evil.example",
    b"127.0.0.1.evil.example",
    b"evil-127.0.0.1",
    b"localhost.evil.example",
    b"xlocalhost",
    b"localhost.",
    b"127.0.0.1:x",
    b"127.0.0.1:8710:80",
    b"127.0.0.1:80@evil.example",
    b"user@127.0.0.1",
    b"evil.example:8710",
    b"0.0.0.0",
    b"127.0.0.2",
    b"[::1",
    b"::1",
    b"2130706433",
    b"127.0.0.1:\xb2",
    b"127.0.0.1 evil.example",
    b"127.0.0.1,evil.example",
    b"",
]


async def test_a_foreign_host_is_misdirected(server: Served) -> None:
    """A47: rebinding ends at 421, with a good token, also on the open routes."""
    seen = {
        (host, target): status_of(await raw(server.url, head(server, "GET", target, host=host)))
        for host in FOREIGN_HOSTS
        for target in ("/v1/sessions", "/healthz")
    }
    assert {one: code for one, code in seen.items() if code not in (400, 421)} == {}
    assert seen[b"evil.example", "/healthz"] == 421


async def test_a_loopback_host_is_ours(server: Served) -> None:
    """A47: the names of the loopback, in any case and with any port."""
    codes = [
        status_of(await raw(server.url, head(server, "GET", "/v1/sessions", host=host)))
        for host in (b"127.0.0.1", b"localhost:8710", b"LOCALHOST", b"[::1]:1")
    ]
    assert codes == [200] * 4


async def test_a_named_host_is_ours_and_its_neighbours_are_not(state_dir: Path) -> None:
    """A47: `allowed_hosts` is exact."""
    async with served(state_dir, server={"allowed_hosts": ("Gate.internal",)}) as server:
        codes = [
            status_of(await raw(server.url, head(server, "GET", "/healthz", host=host)))
            for host in (b"gate.internal", b"gate.internal:443", b"x.gate.internal", b"gate.internal.evil")
        ]
    assert codes == [200, 200, 421, 421]


async def test_a_header_that_decides_comes_once(server: Served) -> None:
    """A47: two Hosts (or Origins, tokens, types) are no request, whichever of them is right."""
    doubled: list[list[bytes]] = [
        [b"Host: evil.example"],
        [b"host: 127.0.0.1"],
        [b"Origin: http://127.0.0.1", b"Origin: http://evil.example"],
        [b"Authorization: Bearer x"],
        [b"Content-Type: application/json", b"Content-Type: text/plain"],
    ]
    codes = [status_of(await raw(server.url, head(server, "GET", "/v1/sessions", *one))) for one in doubled]
    assert codes == [400] * 5


FOREIGN_ORIGINS = [
    "null",
    "http://evil.example",
    "http://127.0.0.1.evil.example",
    "http://evil-localhost",
    "https://127.0.0.1:{port}",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    "http://127.0.0.1:{port}.evil.example",
    "http://127.0.0.1:{port}/",
    "file://",
    "",
    "http://127.0.0.1:{port} http://evil.example",
]


async def test_a_foreign_origin_is_forbidden(server: Served) -> None:
    """A47, A48: a page of another origin gets 403 even with a good token, and nothing happens."""
    for origin in FOREIGN_ORIGINS:
        own = origin.replace("{port}", str(urlsplit(server.url).port))
        answer = await server.agent.post("/v1/sessions", json={}, headers={"origin": own})
        assert (origin, answer.status_code, answer.json()["code"]) == (origin, 403, "foreign_origin")
    assert (await server.agent.get("/v1/sessions")).json() == {"sessions": []}


async def test_the_own_origin_may_call_and_is_given_no_cors_headers(server: Served) -> None:
    """A47: exact equality with scheme and port; no CORS by default."""
    answer = await server.agent.get("/v1/sessions", headers={"origin": server.url})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert (await server.agent.options("/v1/sessions", headers={"origin": server.url})).status_code == 405


async def test_what_a_form_can_send_has_no_effect(server: Served) -> None:
    """A48: 415 for every type but JSON, whatever the body holds, also for a POST without one."""
    session = await server.session()
    base = f"/v1/sessions/{session['id']}"
    form = "application/x-www-form-urlencoded"
    for kind in (
        form,
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/json-patch",
        "text/json",
        "",
        "application/jsonx",
    ):
        for path in ("/v1/sessions", f"{base}/calls"):
            answer = await server.agent.post(
                path, content=b'{"tool": "bash", "arguments": {"command": "touch x"}}', headers={"content-type": kind}
            )
            assert (kind, answer.status_code) == (kind, 415)
    empty = await server.agent.post(f"{base}/calls/c-0001/cancel", content=b"", headers={"content-type": form})
    assert empty.status_code == 415
    assert len((await server.agent.get("/v1/sessions")).json()["sessions"]) == 1
    assert (await server.agent.get(f"{base}/calls")).json() == {"calls": []}


async def test_get_has_no_effect(server: Served) -> None:
    """A48: what changes something has no GET."""
    session = await server.session()
    base = f"/v1/sessions/{session['id']}"
    for path in (f"{base}/calls?tool=bash", f"{base}?close=1"):
        assert (await server.agent.get(path)).status_code == 200
    assert (await server.agent.get(f"{base}/calls/c-0001/cancel")).status_code == 405
    assert (await server.agent.get(f"{base}/calls")).json() == {"calls": []}
    assert (await server.agent.get(base)).json()["state"] == "open"


async def test_a_wrong_method_is_405(server: Served) -> None:
    """A48: as a problem, with the methods that there are."""
    answer = await server.agent.put("/v1/sessions", json={})
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


ESCAPES = "\x1b]52;c;b3duZWQ=\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\r\n"


async def test_problems_hold_no_escape_sequence(server: Served) -> None:
    """A53: names of the caller's choice come back as visible escapes, never as what a terminal obeys."""
    texts = [
        (await server.agent.post("/v1/sessions", json=request)).json()
        for request in (
            {"env": {ESCAPES: "x"}},
            {"tools": [ESCAPES]},
            {ESCAPES: 1},
            {"inputs": {ESCAPES: 1}},
            {"seed": [{"path": f"/etc/{ESCAPES}", "text": ""}]},
            {"seed": [{"path": ESCAPES}]},
        )
    ]
    assert [one["status"] for one in texts] == [422] * 6
    shown = "".join(one["detail"] + one["remedy"] + one["title"] for one in texts)
    assert not set(shown) & set(ESCAPES) - set("]52;cb3duZWQ=[2J1mgnp.exe")
    assert "\\x1b" in shown


async def test_a_hostile_name_forges_no_log_line(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A54: newline and JSON in the names of tool, call and turn stay one value in the answer and in the journal, and no
    log record begins with them."""
    caplog.set_level(logging.DEBUG)
    session = await server.session()
    name = 'bash"}\n{"level": "ERROR", "message": "forged"}\r\n'
    answer = await server.agent.post(
        f"/v1/sessions/{session['id']}/calls", json={"tool": name, "call_id": name, "turn_id": name}
    )
    records = (await server.agent.get(f"/v1/sessions/{session['id']}/calls")).json()["calls"]
    assert (answer.status_code, answer.json()["status"], answer.json()["tool"]) == (200, "invalid", name)
    assert [(one["requested_tool"], one["call_id"], one["turn_id"]) for one in records] == [(name, name, name)]
    logged = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert not any(line.startswith('{"level"') for line in logged)


class LeakyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose every error quotes its credentials, as some client libraries do."""

    protocol = "leaky"

    def __init__(self, key: str, secret: str, **more: Any) -> None:
        super().__init__(**more)
        self.credentials = f"{key}:{secret}"

    def _refuse(self, path: str, *_: Any, **__: Any) -> Any:
        raise OSError(f"403 for {self.credentials} at {path}")

    ls = info = exists = _open = mkdir = makedirs = rm_file = pipe_file = put_file = _refuse


async def test_secrets_leak_nowhere(
    state_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A55, R67, A06: tokens, env values and store keys are in no log, problem, health answer, record, journal file or
    sandbox but the one that the operator gave the value to."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SANDGATE_OPERATOR_TOKEN", "canary-operator-0123456789")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-aws-0123456789")
    profiles = {"default": {"env": {"GIVEN": "canary-env-0123456789"}, "env_from_caller": ("CALLER",)}, "other": {}}
    fsspec.register_implementation("leaky", LeakyFileSystem, clobber=True)
    store = {
        "uri": "leaky://canary-user:canary-password@x",
        "options": {"key": "canary-key", "secret": "canary-secret"},
    }
    async with served(state_dir, profiles=profiles, store=store) as server:
        session = await server.session(env={"CALLER": "canary-caller-0123456789"})
        token = session["token"]
        inside = await server.call(
            session,
            "bash",
            command="env; cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/*/cmdline | tr '\\0' ' '; seq 1 20000",
        )
        texts = [inside_text(inside)]
        assert inside["references"] == []
        answers = [
            await server.anonymous.get("/readyz"),
            await server.anonymous.get("/healthz"),
            await server.agent.get("/v1/sessions"),
            await server.agent.get(f"/v1/sessions/{session['id']}"),
            await server.agent.get(f"/v1/sessions/{session['id']}/calls"),
            await server.agent.get("/openapi.json"),
            await server.agent.get(f"/v1/sessions/{session['id']}/results/x"),
            await server.agent.get("/nothing"),
            await server.anonymous.get("/v1/sessions", headers={"authorization": f"Bearer {token}x"}),
            await server.agent.post("/v1/sessions", json={"env": {"CALLER": 1}}),
            await server.agent.delete(f"/v1/sessions/{session['id']}"),
        ]
        texts += [one.text + str(one.headers) for one in answers]
        tokens = [token, *((server.state_dir / "tokens" / role).read_text().strip() for role in ("operator", "agent"))]
    texts.append(caplog.text)
    journal = b"".join(path.read_bytes() for path in state_dir.glob("sandgate.db*")).decode("latin-1")
    outside = "\n".join(texts[1:]) + journal
    canaries = [
        *tokens,
        "canary-operator",
        "canary-aws",
        "canary-env",
        "canary-key",
        "canary-secret",
        "canary-password",
    ]
    assert [one for one in canaries if one in outside] == []
    assert "canary-caller" not in "\n".join(texts[1:])  # the journal keeps it: the session must go on after a restart
    assert [one for one in canaries if one in texts[0]] == ["canary-env"]


def inside_text(result: dict[str, Any]) -> str:
    return "".join(block["text"] for block in result["content"])


async def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Served) -> None:
    """A56: 100 MB announced: 413 after the head, and the rest is not waited for."""
    started = time.monotonic()
    answer = await raw(
        server.url,
        head(server, "POST", "/v1/sessions", b"Content-Type: application/json", b"Content-Length: 104857600"),
    )
    assert (status_of(answer), body_of(answer)["code"]) == (413, "too_large")
    assert time.monotonic() - started < 5


async def test_a_body_without_length_is_counted(server: Served) -> None:
    """A56: chunks over the limit are 413 too; memory does not follow them."""
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = await raw(
        server.url,
        head(server, "POST", "/v1/sessions", b"Content-Type: application/json", b"Transfer-Encoding: chunked"),
        *[piece] * 100,
        b"0\r\n\r\n",
    )
    assert (status_of(answer), body_of(answer)["code"]) == (413, "too_large")


async def test_who_goes_on_sending_after_the_answer_is_cut_off(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A56: the answer is there, the connection is not for ever."""
    monkeypatch.setattr(http_serving, "LINGER_SECONDS", 0.5)
    start = head(server, "POST", "/v1/sessions", b"Content-Type: application/json", b"Content-Length: 104857600")
    place, sent, started = urlsplit(server.url), 0, time.monotonic()
    async with await anyio.connect_tcp("127.0.0.1", place.port or 80) as stream:
        await stream.send(start)
        assert status_of(await stream.receive()) == 413
        with anyio.move_on_after(10), suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b" " * 1000)
                sent += 1000
                await anyio.sleep(0.05)
    assert time.monotonic() - started < 5
    assert sent < 1_000_000


async def test_a_million_headers_are_refused_early(server: Served) -> None:
    """A56: 431 once the head is over its bound; other clients are served meanwhile."""
    lines = b"".join(b"X-%d: y\r\n" % number for number in range(1000))
    start = head(server, "GET", "/v1/sessions")[:-2]
    answer = await raw(server.url, start, *[lines] * 1000, b"\r\n")
    assert answer == b"" or status_of(answer) in (400, 431)
    assert (await server.anonymous.get("/healthz")).status_code == 200


async def test_deep_json_is_answered(server: Served) -> None:
    """A56: nested arguments are taken or 422 (or too large), never 500, closed or not."""
    session = await server.session()
    for depth in (100, 250, 500, 10_000, 1_000_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for end in (closing * depth, ""):
                text = f'{{"tool": "bash", "arguments": {{"command": "true", "x": {opening * depth}1{end}}}}}'
                answer = await post(server, f"/v1/sessions/{session['id']}/calls", text.encode())
                expected = 200 if end and depth <= 250 else 413 if len(text) > 4 << 20 else 422
                assert (depth, end[:1], status_of(answer)) == (depth, end[:1], expected)


async def test_odd_json_opens_no_session_and_is_no_500(server: Served) -> None:
    """A56: lone surrogates, numbers that are none, bytes that are no text."""
    bodies = [
        b'{"seed": [{"path": "a", "text": "\\ud800"}]}',
        b'{"labels": {"\\ud800": "a"}}',
        b'{"hook_context": {"a": "\\ud800"}}',
        b'{"ttl_seconds": NaN}',
        b'{"ttl_seconds": 1e999}',
        b'{"ttl_seconds": -1}',
        b'{"limits": {"memory": 1e30}}',
        b'{"limits": {"cpus": NaN}}',
        b'{"profile": "a\\u0000"}',
        b"\xff\xfe",
        b'"x"',
        b"null",
        b"[]",
        b"{",
        b"1" * 5000,
        b'{"ttl_seconds": 1' + b"0" * 5000 + b"}",
    ]
    codes = {body[:40]: status_of(await post(server, "/v1/sessions", body)) for body in bodies}
    assert {body: code for body, code in codes.items() if code not in (404, 422)} == {}
    assert (await server.agent.get("/v1/sessions")).json() == {"sessions": []}


async def test_an_odd_query_is_no_500(server: Served) -> None:
    """A56: numbers beyond their bounds are named and refused."""
    session = await server.session()
    for query in (
        "calls?after=99999999999999999999",
        "calls?after=-1",
        "calls?limit=0",
        "calls?limit=1001",
        "calls?after=x",
        "tools?format=x",
    ):
        assert (query, (await server.agent.get(f"/v1/sessions/{session['id']}/{query}")).status_code) == (query, 422)


async def test_a_slow_body_is_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A56: a body that drips is 408 after its time, however regularly it drips."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    start = head(server, "POST", "/v1/sessions", b"Content-Type: application/json", b"Content-Length: 1000")
    started = time.monotonic()
    answer = await dripped(server, start, b" ")
    assert (status_of(answer), body_of(answer)["code"]) == (408, "slow_body")
    assert time.monotonic() - started < 5


async def test_a_slow_head_is_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A56: so is a head that drips, and a connection that says nothing."""
    monkeypatch.setattr(http_serving, "HEAD_SECONDS", 0.5)
    started = time.monotonic()
    dripping = await dripped(server, b"GET /healthz HTTP/1.1\r\n", b"X: y\r\n")
    silent = await raw(server.url)
    assert (status_of(dripping), silent) == (408, b"")
    assert time.monotonic() - started < 5


async def dripped(server: Served, start: bytes, drop: bytes) -> bytes:
    async with await anyio.connect_tcp("127.0.0.1", urlsplit(server.url).port or 80) as stream:
        await stream.send(start)
        with anyio.fail_after(8):
            while True:
                with anyio.move_on_after(0.1):
                    return await stream.receive()
                await stream.send(drop)


async def test_idle_connections_starve_nobody(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A56, C.2 row 8: more silent connections than are served at a time are gone after their time."""
    monkeypatch.setattr(http_serving, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_serving, "MAX_CONNECTIONS", 50)
    async with served(state_dir) as server, AsyncExitStack() as silent:
        for _ in range(60):
            await silent.enter_async_context(await anyio.connect_tcp("127.0.0.1", urlsplit(server.url).port or 80))
        assert (await server.anonymous.get("/healthz")).status_code == 503
        await anyio.sleep(1)
        assert (await server.anonymous.get("/healthz")).status_code == 200


async def test_a_long_call_outlives_the_time_for_a_head(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A56, the other direction: bytes of a next request, sent early, do not end the call that is running."""
    monkeypatch.setattr(http_serving, "HEAD_SECONDS", 0.3)
    session = await server.session()
    body = b'{"tool": "bash", "arguments": {"command": "sleep 1; echo done"}}'
    start = head(
        server,
        "POST",
        f"/v1/sessions/{session['id']}/calls",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    )
    answer = await raw(server.url, start + body, b"\r\n")
    assert (status_of(answer), body_of(answer)["status"]) == (200, "ok")


async def test_a_call_without_a_limit_has_the_default_one(state_dir: Path) -> None:
    """R09: and the program is dead then."""
    async with served(state_dir, profiles={"default": {"limits": {"call_seconds": 1}}}) as server:
        session = await server.session()
        started = time.monotonic()
        result = await server.call(session, "bash", command="echo before; sleep 60")
    assert (result["status"], inside_text(result)) == ("timeout", "before\n")
    assert time.monotonic() - started < 10


async def test_an_unsupported_option_is_refused(server: Served) -> None:
    """R65, A11: what cannot be given is refused, naming the field; nothing is ignored in silence."""
    requests: list[dict[str, Any]] = [
        {"network": "open"},
        {"network": ["example.org"]},
        {"image": "debian"},
        {"mounts": ["/"]},
        {"limits": {"memory": 2 << 40}},
        {"limits": {"gpus": 1}},
        {"env": {"PATH": "/x"}},
        {"ttl_seconds": 1e9},
        {"permission": "none"},
        {"inputs": {"x": 1}},
        {"tools": ["no-such"]},
        {"seed": "s3://bucket"},
        {"seed": [{"path": "a", "uri": "file:///etc/passwd"}]},
        {"kind": "none"},
    ]
    for request in requests:
        answer = await server.agent.post("/v1/sessions", json=request)
        assert (request, answer.status_code) == (request, 422)
        assert next(iter(request)) in answer.json()["detail"]
    assert (await server.agent.get("/v1/sessions")).json() == {"sessions": []}


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "example.org"])
async def test_a_reachable_address_needs_a_list_of_hosts(host: str) -> None:
    """A51, R66: refused before anything listens, saying what to do."""
    with pytest.raises(SettingsError, match="reached from the network") as refused:
        listen(Server(host=host, port=0))
    assert "allowed_hosts" in refused.value.remedy


async def test_a_wrong_token_is_401(server: Served) -> None:
    """A46: nobody, whatever looks like a token; the scheme must be the one, and a kept digest opens nothing."""
    token = server.agent.headers["authorization"].removeprefix("Bearer ")
    for value in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic {token}",
        "{token}",
        "Token {token}",
        "Bearer {token} x",
        "Bearer {token}x",
        "Bearer x{token}",
        "Bearer {digest}",
        "Bearer \xff",
    ):
        given = value.replace("{token}", token).replace("{digest}", digest(token))
        answer = await raw(
            server.url,
            b"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Authorization: " + given.encode("latin-1") + b"\r\n\r\n",
        )
        assert (value, status_of(answer), body_of(answer)["code"]) == (value, 401, "unauthorized")
        assert b"www-authenticate: Bearer" in answer


async def test_a_token_in_the_query_or_a_cookie_is_none(server: Served) -> None:
    """A46: only the header counts, so that no link and no page carries a token."""
    token = server.agent.headers["authorization"].removeprefix("Bearer ")
    cookie = {"cookie": f"token={token}; authorization=Bearer {token}"}
    answers = [
        await server.anonymous.get(f"/v1/sessions?access_token={token}&token={token}"),
        await server.anonymous.get("/v1/sessions", headers=cookie),
    ]
    assert [one.status_code for one in answers] == [401, 401]


async def test_the_agent_does_not_see_the_operators_sessions(server: Served) -> None:
    """A50: absent for it in the list and by id; the operator sees both."""
    theirs = (await server.operator.post("/v1/sessions", json={})).json()
    ours = await server.session()
    lists = [
        [one["id"] for one in (await client.get("/v1/sessions")).json()["sessions"]]
        for client in (server.agent, server.operator)
    ]
    assert lists == [[ours["id"]], [theirs["id"], ours["id"]]]
    assert (await server.agent.get(f"/v1/sessions/{theirs['id']}")).status_code == 404
    assert (await server.agent.delete(f"/v1/sessions/{theirs['id']}")).status_code == 404
    assert (await server.operator.get(f"/v1/sessions/{ours['id']}")).status_code == 200


RUN_ID = {"tool": "bash", "arguments": {"command": "id"}}


async def test_a_session_token_has_one_session(server: Served) -> None:
    """A50: it sees only its own, and opens none."""
    mine, other = await server.session(), await server.session()
    async with server.client(mine["token"]) as client:
        seen = [one["id"] for one in (await client.get("/v1/sessions")).json()["sessions"]]
        opening = await client.post("/v1/sessions", json={})
        foreign = await client.get(f"/v1/sessions/{other['id']}")
        own = await client.post(f"/v1/sessions/{mine['id']}/calls", json=RUN_ID)
    assert (seen, opening.status_code, foreign.status_code) == ([mine["id"]], 403, 404)
    assert (own.status_code, own.json()["status"]) == (200, "ok")


async def test_a_profile_that_is_not_granted_does_not_exist(state_dir: Path) -> None:
    """A50: the agent gets the same answer for a profile of the operator's and for one that is not there."""
    async with served(state_dir, profiles={"default": {}, "secret": {}}) as server:
        answers = [await server.agent.post("/v1/sessions", json={"profile": name}) for name in ("secret", "absent")]
        operator = await server.operator.post("/v1/sessions", json={"profile": "secret"})
    assert [one.status_code for one in answers] == [404, 404]
    assert answers[0].text.replace("secret", "absent") == answers[1].text
    assert operator.status_code == 201


async def test_after_closing_a_session_token_reads_results_and_nothing_runs(server: Served) -> None:
    """A39: results stay until retention ends; calls and files are gone, for its own token and its opener's."""
    session = await server.session()
    key = (await stored(server, session)).rpartition("/")[2]
    base = f"/v1/sessions/{session['id']}"
    assert (await server.agent.delete(base)).status_code == 200
    async with server.client(session["token"]) as owner:
        for client in (owner, server.agent):
            read = await client.get(f"{base}/results/{key}", headers={"range": "bytes=0-3"})
            codes = [
                (await client.post(f"{base}/calls", json=RUN_ID)).status_code,
                (await client.get(f"{base}/files")).status_code,
                (await client.put(f"{base}/files/x", content=b"x")).status_code,
                (await client.delete(f"{base}/files/x")).status_code,
            ]
            assert (read.status_code, read.content, codes) == (206, b"1\n2\n", [404] * 4)
    assert not (server.state_dir / "workspaces" / session["id"]).exists()


async def test_an_unexpected_error_is_a_problem_without_its_text(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A55: a 500 says that the log has the reason, and nothing of it."""

    async def broken(*_: object) -> None:
        raise RuntimeError("canary in the error")

    monkeypatch.setattr(type(server.gateway.journal), "calls", broken)
    session = await server.session()
    answer = await server.agent.get(f"/v1/sessions/{session['id']}/calls")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "canary" not in answer.text
