"""The Python client against a real gateway, and against wires that break and peers that answer nonsense."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import SocketAttribute, SocketStream

from gateway.client import (
    ArchiveRefused,
    Client,
    ClientError,
    ConnectionLost,
    FileEntry,
    FileList,
    Forbidden,
    GatewayUnreachable,
    Gone,
    NotFound,
    Refused,
    Session,
    StreamInterrupted,
    TooMany,
    Unauthorized,
    errors,
    stream,
)
from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


def token_of(server: Served) -> str:
    return server.agent.headers["authorization"].removeprefix("Bearer ")


@pytest.fixture
async def client(server: Served) -> AsyncIterator[Client]:
    async with Client(server.url, token_of(server)) as one:
        yield one


@pytest.fixture
async def session(client: Client) -> AsyncIterator[Session]:
    async with client.session() as one:
        yield one


@dataclass
class Wire:
    """A way to a gateway that can be cut, and then either mended or dead."""

    port: int
    url: str = ""
    dead: bool = False
    connections: int = 0
    carried: set[anyio.CancelScope] = field(default_factory=set)

    def cut(self) -> None:
        for scope in list(self.carried):
            scope.cancel()

    async def carry(self, near: SocketStream) -> None:
        self.connections += 1
        async with near:
            if self.dead:
                return
            async with await anyio.connect_tcp("127.0.0.1", self.port) as far, anyio.create_task_group() as tasks:
                self.carried.add(tasks.cancel_scope)
                tasks.start_soon(pump, near, far, tasks.cancel_scope)
                tasks.start_soon(pump, far, near, tasks.cancel_scope)
            self.carried.discard(tasks.cancel_scope)


async def pump(source: SocketStream, target: SocketStream, scope: anyio.CancelScope) -> None:
    try:
        async for data in source:
            await target.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    scope.cancel()


@asynccontextmanager
async def listening(serve: Callable[[SocketStream], Any]) -> AsyncIterator[str]:
    """Serve connections on a free loopback port; gives its URL."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@pytest.fixture
async def wire(server: Served) -> AsyncIterator[Wire]:
    one = Wire(int(server.url.rpartition(":")[2]))
    async with listening(one.carry) as one.url:
        yield one


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[Client]:
    """A client of something that gives one answer per connection, the last one again and again."""
    left = list(answers)

    async def serve(connection: SocketStream) -> None:
        async with connection:
            await connection.receive()
            await connection.send(left.pop(0) if len(left) > 1 else left[0])

    async with listening(serve) as url, Client(url, "token") as client:
        yield client


def answer(body: bytes, media_type: str, status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n"
        f"connection: close\r\n\r\n".encode()
        + body
    )


def events(*named: tuple[str, dict[str, Any]]) -> bytes:
    """A stream of events that ends in good order."""
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in named)
    return answer(body.encode(), "text/event-stream")


ACCEPTED = ("accepted", {"id": "c-0001", "call_id": None, "tool": "bash"})
NO_STREAM = answer(b'{"detail": "no such stream", "code": "not_found"}', "application/problem+json", "404 Not Found")


# sessions and calls


async def test_leaving_a_session_closes_it_and_keeps_the_report(client: Client) -> None:
    async with client.session(labels={"for": "test"}) as session:
        assert (await session.record()).labels == {"for": "test"}
    assert session.close_report is not None
    assert (session.close_report.id, session.close_report.state) == (session.id, "closed")


async def test_session_is_closed_when_its_block_raises(client: Client) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        async with client.session() as session:
            raise RuntimeError("mine")
    assert (await session.record()).state == "closed"


async def test_session_is_closed_when_its_block_is_cancelled(client: Client) -> None:
    with anyio.CancelScope() as scope:
        async with client.session() as session:
            scope.cancel()
            await anyio.sleep_forever()
    assert (await session.record()).state == "closed"


async def test_attached_session_stays_open(client: Client, session: Session) -> None:
    attached = await client.attach(session.id)
    assert (await attached.call("bash", {"command": "echo hi"})).text == "hi"
    assert [one.id for one in await client.sessions()] == [session.id]


async def test_session_token_opens_only_its_session(server: Served, client: Client, session: Session) -> None:
    async with client.session() as other, Client(server.url, session.token) as narrow:
        assert (await narrow.attach(session.id)).id == session.id
        with pytest.raises(NotFound):
            await narrow.attach(other.id)
        with pytest.raises(Forbidden):
            await narrow.open_session()


async def test_nonzero_exit_is_a_result(session: Session) -> None:
    result = await session.call("bash", {"command": "echo out; exit 3"}, call_id="mine", turn_id="turn")
    assert (result.status, result.exit_code, result.text) == ("exit", 3, "out\nexit code 3")
    assert [(one.id, one.call_id, one.turn_id) for one in await session.calls()] == [(result.id, "mine", "turn")]
    assert (await session.call_record(result.id)).status == "exit"


async def test_refused_arguments_are_a_result(session: Session) -> None:
    assert (await session.call("bash", {"cmd": "true"})).status == "invalid"


async def test_lone_surrogate_of_a_model_is_answered(session: Session) -> None:
    """What JSON can say, a model will say: the gateway decides about it, the client does not break."""
    assert (await session.call("bash", {"command": "echo \ud800"})).is_error


async def test_key_gives_the_same_answer_again(session: Session) -> None:
    first = await session.call("bash", {"command": "date +%N"}, idempotency_key="k")
    assert await session.call("bash", {"command": "date +%N"}, idempotency_key="k") == first


async def test_cancelling_the_caller_cancels_the_call(session: Session) -> None:
    with anyio.move_on_after(0.5):
        await session.call("bash", {"command": "sleep 60"})
    assert await ended(session, "c-0001") == "cancelled"


async def test_call_is_cancelled_by_id(session: Session) -> None:
    async with session.stream("bash", {"command": "sleep 60"}) as call:
        assert await session.cancel(call.id)
        assert [chunk async for chunk in call] == []
        assert call.result.status == "cancelled"
        assert not await session.cancel(call.id)


async def test_tools_come_in_the_shape_of_the_models_api(session: Session) -> None:
    assert {"name", "inputSchema"} <= set((await session.tools())[0])
    assert {"type", "function"} & set((await session.tools("openai"))[0])
    assert {"name", "input_schema"} <= set((await session.tools("anthropic"))[0])


async def ended(session: Session, call_id: str) -> str | None:
    """A call's status, once it has one."""
    with anyio.fail_after(5):
        while (status := (await session.call_record(call_id)).status) is None:
            await anyio.sleep(0.02)
    return status


# streams


async def test_stream_gives_output_as_it_comes_and_then_the_result(session: Session) -> None:
    async with session.stream("bash", {"command": "printf one; sleep 0.3; printf two; printf err >&2"}) as call:
        with pytest.raises(RuntimeError, match="iteration"):
            _ = call.result
        chunks = [chunk async for chunk in call]
    assert [(one.offset, one.text, one.data) for one in chunks if one.stream == "stdout"] == [
        (0, "one", b"one"),
        (3, "two", b"two"),
    ]
    assert [one.text for one in chunks if one.stream == "stderr"] == ["err"]
    assert (call.result.status, call.result.exit_code) == ("ok", 0)


async def test_stream_gives_exact_bytes(session: Session) -> None:
    """R21: bytes that are no text are kept, and shown with replacement characters."""
    async with session.stream("bash", {"command": r"printf 'a\377b'"}) as call:
        chunks = [chunk async for chunk in call]
    assert b"".join(one.data for one in chunks) == b"a\xffb"
    assert "".join(one.text for one in chunks) == "a\N{REPLACEMENT CHARACTER}b"


async def test_leaving_a_stream_early_cancels_its_call(session: Session) -> None:
    async with session.stream("bash", {"command": "echo hi; sleep 60"}, idempotency_key="k") as call:
        async for _ in call:
            break
    assert await ended(session, call.id) == "cancelled"


async def test_stream_that_is_left_after_its_end_cancels_nothing(session: Session) -> None:
    async with session.stream("bash", {"command": "true"}) as call:
        async for _ in call:
            pass
    assert await ended(session, call.id) == "ok"


async def test_stream_must_be_entered(session: Session) -> None:
    with pytest.raises(RuntimeError, match="entered"):
        await anext(session.stream("bash", {"command": "true"}))


async def test_broken_stream_is_taken_up_where_it_broke(server: Served, wire: Wire, session: Session) -> None:
    """R30: the parts before and after a break are the whole, nothing lost or doubled."""
    command = "for i in $(seq 1 60); do printf '%s\\n' $i; sleep 0.02; done"
    async with Client(wire.url, token_of(server)) as client:
        attached = await client.attach(session.id)
        async with attached.stream("bash", {"command": command}) as call:
            parts = []
            async for chunk in call:
                parts.append(chunk.data)
                if len(parts) in (5, 15, 25):
                    wire.cut()
    assert b"".join(parts) == b"".join(b"%d\n" % i for i in range(1, 61))
    assert wire.connections >= 4
    assert call.result.status == "ok"


async def test_stream_of_a_dead_wire_is_interrupted(
    server: Served, wire: Wire, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R28: where the end is not known there is an error, never a code."""
    monkeypatch.setattr(stream, "RECONNECT_DELAYS", (0.0, 0.01))
    async with Client(wire.url, token_of(server)) as client:
        attached = await client.attach(session.id)
        async with attached.stream("bash", {"command": "echo hi; sleep 60"}) as call:
            assert (await anext(call)).text == "hi\n"
            wire.dead = True
            wire.cut()
            with pytest.raises(StreamInterrupted) as interrupted:
                await anext(call)
        assert interrupted.value.call_id == call.id
        with pytest.raises(RuntimeError):
            _ = call.result


async def test_stream_that_just_ends_is_interrupted() -> None:
    """R28: an end in good order, but without a result, is no end."""
    async with answering(events(ACCEPTED), NO_STREAM) as client, Session(client, "s-1").stream("bash") as call:
        with pytest.raises(StreamInterrupted, match="no such stream"):
            await anext(call)


async def test_stream_with_a_gap_is_interrupted() -> None:
    """R28: output that is missing is not passed over."""
    gap = ("output", {"stream": "stdout", "offset": 7, "text": "later"})
    async with answering(events(ACCEPTED, gap), NO_STREAM) as client, Session(client, "s-1").stream("bash") as call:
        with pytest.raises(StreamInterrupted, match="missing"):
            await anext(call)


async def test_stream_without_even_an_acceptance_is_a_lost_connection() -> None:
    async with answering(events()) as client:
        with pytest.raises(ConnectionLost):
            async with Session(client, "s-1").stream("bash"):
                pass


async def test_refused_stream_is_refused(client: Client, session: Session) -> None:
    await session.close()
    with pytest.raises(NotFound) as refused:
        async with session.stream("bash", {"command": "true"}):
            pass
    assert refused.value.code == "session_closed"


# errors


async def test_nobody_at_the_url_is_named_with_the_remedy() -> None:
    async with listening(lambda _: None) as url:
        pass
    async with Client(url) as client:
        with pytest.raises(GatewayUnreachable) as unreachable:
            await client.sessions()
    assert url in str(unreachable.value)
    assert "`sandgate serve`" in str(unreachable.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8710", "nonsense", "ftp://host", "http://127.0.0.1:99999", "http://"])
async def test_url_that_is_none_is_unreachable(url: str) -> None:
    with pytest.raises(GatewayUnreachable, match="no http:// or https:// URL"):
        Client(url)


async def test_unknown_token_is_unauthorized(server: Served) -> None:
    async with Client(server.url, "wrong") as client:
        with pytest.raises(Unauthorized) as refused:
            await client.sessions()
    assert refused.value.message == "this token is not known"
    assert "`sandgate token agent`" in refused.value.remedy


async def test_no_token_is_unauthorized_and_needed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDGATE_TOKEN", raising=False)
    async with Client(server.url) as client:
        with pytest.raises(Unauthorized) as refused:
            await client.sessions()
    assert refused.value.message == "a token is needed"


async def test_wider_session_is_refused_naming_the_field(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        await client.open_session(limits={"processes": 10**6})
    assert (refused.value.status, refused.value.message[:16]) == (422, "limits.processes")


async def test_full_gateway_says_when_to_come_back(state_dir: Path) -> None:
    async with (
        served(state_dir, server={"sessions": 1}) as server,
        Client(server.url, token_of(server)) as client,
        client.session(),
    ):
        with pytest.raises(TooMany) as refused:
            await client.open_session()
    assert refused.value.retry_after == 5


async def test_other_server_at_the_url_is_no_gateway() -> None:
    async with answering(answer(b"<html>", "text/html")) as client:
        with pytest.raises(GatewayUnreachable, match="no ToolResult"):
            await Session(client, "s-1").call("bash")
        with pytest.raises(GatewayUnreachable):
            async with Session(client, "s-1").stream("bash"):
                pass


async def test_page_of_a_proxy_is_a_refusal_by_its_status() -> None:
    async with answering(answer(b"<html>", "text/html", "502 Bad Gateway")) as client:
        with pytest.raises(Refused) as refused:
            await client.sessions()
    assert (refused.value.status, refused.value.code) == (502, "unknown")


async def test_field_of_a_newer_gateway_is_passed_over() -> None:
    body = b'{"id": "c-1", "tool": "bash", "status": "ok", "colour": 1, "error": {"code": "", "message": "", "new": 1}}'
    async with answering(answer(body, "application/json")) as client:
        assert (await Session(client, "s-1").call("bash")).id == "c-1"


async def test_field_of_a_newer_gateway_in_a_list_is_passed_over() -> None:
    body = (
        b'{"entries": [{"path": "a", "href": "a", "kind": "file", "size": 1, "mode": "0644", "modified": 1.5,'
        b' "owner": "me"}], "complete": true, "cursor": null}'
    )
    async with answering(answer(body, "application/json")) as client:
        listed = await Session(client, "s-1").files()
    assert listed == FileList(
        complete=True, entries=(FileEntry(path="a", href="a", kind="file", size=1, mode="0644", modified=1.5),)
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in httpx2.__all__
        if isinstance(kind := getattr(httpx2, name), type)
        and issubclass(kind, (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL))
    ],
)
async def test_every_error_of_the_http_library_becomes_ours(name: str) -> None:
    kind = getattr(httpx2, name)
    error: Exception = kind.__new__(kind, "secret")
    with pytest.raises(ClientError) as mapped, errors.mapped("http://gateway"):
        raise error
    assert mapped.value.__cause__ is error
    assert "secret" not in str(mapped.value)


async def test_environment_says_where_and_who(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDGATE_URL", f"{server.url}/")
    monkeypatch.setenv("SANDGATE_TOKEN", f"{token_of(server)}\n")
    async with Client() as client:
        assert await client.sessions() == ()


async def test_gateway_of_this_machine_is_not_asked_through_a_proxy(
    server: Served, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with Client(server.url, token_of(server)) as client:
        assert [one.id for one in await client.sessions()] == [session.id]


async def test_base_install_is_enough() -> None:
    """Neither module loads a package that only the server has."""
    code = "import sys, gateway.client, gateway.filesystem; print(*{name.partition('.')[0] for name in sys.modules})"
    done = await anyio.run_process([sys.executable, "-c", code], stderr=subprocess.STDOUT)
    of_the_server = {"fastapi", "starlette", "uvicorn", "jsonschema", "pydantic_settings", "re2", "sandboxes", "stores"}
    assert set(done.stdout.decode().split()) & of_the_server == set()


# what models' APIs give and take

COMMAND = '{"command": "echo hi"}'


@pytest.mark.parametrize(
    ("tool_call", "expected"),
    [
        (
            {"type": "function_call", "call_id": "1", "name": "bash", "arguments": COMMAND},
            {"type": "function_call_output", "call_id": "1", "output": "hi"},
        ),
        (
            {"type": "function", "id": "2", "function": {"name": "bash", "arguments": COMMAND}},
            {"role": "tool", "tool_call_id": "2", "content": "hi"},
        ),
        (
            {"type": "tool_use", "id": "3", "name": "bash", "input": {"command": "echo hi"}},
            {"type": "tool_result", "tool_use_id": "3", "content": "hi", "is_error": False},
        ),
        (
            SimpleNamespace(type="function", id="4", function=SimpleNamespace(name="bash", arguments=COMMAND)),
            {"role": "tool", "tool_call_id": "4", "content": "hi"},
        ),
        (
            {"type": "tool_use", "id": "5", "name": "brew", "input": {}},
            {"type": "tool_result", "tool_use_id": "5", "content": "invalid: no such tool: brew.", "is_error": True},
        ),
    ],
)
async def test_dispatch_answers_in_the_shape_of_the_request(
    session: Session, tool_call: object, expected: dict[str, Any]
) -> None:
    got = await session.dispatch(tool_call)
    text = next(name for name in ("output", "content") if name in got)
    assert {**got, text: got[text].partition(" This session has")[0]} == expected
    assert [one.call_id for one in await session.calls()] == [
        got.get("call_id") or next(value for name, value in got.items() if name.endswith("_id"))
    ]


@pytest.mark.parametrize("arguments", ["{", "[]", "[1]", '"text"', "NaN", '{"command": NaN}', "0", "[" * 100_000])
async def test_dispatch_tells_a_model_that_its_arguments_are_none(session: Session, arguments: str) -> None:
    got = await session.dispatch({"type": "function_call", "call_id": "1", "name": "bash", "arguments": arguments})
    assert got["output"] == "invalid: the arguments are not a JSON object"
    assert await session.calls() == ()


@pytest.mark.parametrize("arguments", ["", "{}", None, "null"])
async def test_dispatch_takes_no_arguments_as_empty(session: Session, arguments: str | None) -> None:
    got = await session.dispatch({"type": "function_call", "call_id": "1", "name": "ls", "arguments": arguments})
    assert not got["output"].startswith("invalid")
    assert (await session.calls())[0].original_arguments == {}


@pytest.mark.parametrize(
    "value", [None, {}, "bash", {"type": "function_call", "name": "bash"}, {"type": "message", "content": "hi"}]
)
async def test_dispatch_of_something_else_is_a_type_error(session: Session, value: object) -> None:
    with pytest.raises(TypeError):
        await session.dispatch(value)


# files


async def test_file_goes_there_and_back(session: Session, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(content)
    assert await session.upload(tmp_path / "a", "in/a") == 1
    await session.download("in/a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != "state") == ["a", "b"]


@pytest.mark.parametrize("size", [3 << 20, 30 << 20])
async def test_upload_over_the_limit_is_refused(state_dir: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "big").write_bytes(bytes(size))
    async with (
        served(state_dir, server={"upload": "2MiB"}) as server,
        Client(server.url, token_of(server)) as client,
        client.session() as session,
    ):
        with pytest.raises(Refused) as refused:
            await session.upload(tmp_path / "big", "big")
    assert refused.value.status == 413


async def test_file_is_downloaded_into_a_folder(session: Session, tmp_path: Path) -> None:
    await session.write_file("out/report.html", "<p>")
    await session.download("out/report.html", tmp_path)
    assert (tmp_path / "report.html").read_text() == "<p>"


async def test_folder_goes_there_and_back(session: Session, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "näme with space").write_bytes(b"x" * 700_000)
    (source / "empty").touch()
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    assert await session.upload(source, "data") == 3
    assert (await session.call("bash", {"command": "data/run.sh"})).text == "ran"
    await session.download("data", tmp_path / "back")
    assert below(tmp_path / "back") == {
        "deep/näme with space": b"x" * 700_000,
        "empty": b"",
        "run.sh": b"#!/bin/sh\necho ran\n",
    }
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o7111 == 0o111


async def test_whole_workspace_goes_there_and_back(session: Session, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    assert await session.upload(tmp_path / "in", ".") == 1
    await session.download(".", tmp_path / "out")
    assert below(tmp_path / "out") == {"a": b"a"}


async def test_empty_folder_uploads_nothing(session: Session, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert await session.upload(tmp_path / "in", "data") == 0


async def test_download_replaces_a_link_and_does_not_follow_it(session: Session, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "precious")
    await session.write_file("data/a", "new")
    await session.download("data", tmp_path / "out")
    assert below(tmp_path / "out") == {"a": b"new"}
    assert (tmp_path / "precious").read_text() == "precious"


async def test_links_of_a_workspace_are_not_downloaded(session: Session, tmp_path: Path) -> None:
    await session.call("bash", {"command": "mkdir out; ln -s /etc/passwd out/link; echo a > out/a; chmod 4777 out/a"})
    await session.download("out", tmp_path / "out")
    assert below(tmp_path / "out") == {"a": b"a\n"}
    assert (tmp_path / "out" / "a").stat().st_mode & 0o7022 == 0


def member(name: str, **attributes: Any) -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(one, key, value)
    return one


@pytest.mark.parametrize(
    "hostile",
    [
        member("../out"),
        member("/tmp/out"),
        member("a/../../out"),
        member("./a"),
        member("a//b"),
        member("link", type=tarfile.SYMTYPE, linkname="/etc"),
        member("link", type=tarfile.LNKTYPE, linkname="good"),
        member("device", type=tarfile.CHRTYPE),
        member("pipe", type=tarfile.FIFOTYPE),
        member("huge", size=1 << 50),
    ],
    ids=lambda one: f"{one.name} {one.type.decode()}",
)
async def test_hostile_archive_is_refused_and_nothing_is_written(tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    archive = member("good").tobuf() + hostile.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    async with answering(answer(archive, "application/x-tar")) as client:
        with pytest.raises(ArchiveRefused):
            await Session(client, "s-1").download("data", tmp_path / "out")
    assert below(tmp_path) == {}


@pytest.mark.parametrize("archive", [b"no tar at all" * 100, member("cut", size=2000).tobuf() + b"x" * 512, b""])
async def test_broken_archive_leaves_no_half_file(tmp_path: Path, archive: bytes) -> None:
    async with answering(answer(archive, "application/x-tar")) as client:
        with pytest.raises(ArchiveRefused):
            await Session(client, "s-1").download("data", tmp_path / "out")
    assert below(tmp_path) == {}


async def test_compressed_archive_is_no_archive(tmp_path: Path) -> None:
    """A gateway sends plain tar: what would unfold to more than it is, is refused."""
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w:gz") as archive:
        archive.addfile(member("zeros", size=1 << 20), io.BytesIO(bytes(1 << 20)))
    async with answering(answer(bomb.getvalue(), "application/x-tar")) as client:
        with pytest.raises(ArchiveRefused):
            await Session(client, "s-1").download("data", tmp_path / "out")


async def test_broken_download_leaves_no_half_file(tmp_path: Path) -> None:
    half = answer(b"x" * 100, "application/octet-stream").replace(b"content-length: 100", b"content-length: 200")
    async with answering(half) as client:
        with pytest.raises(ConnectionLost):
            await Session(client, "s-1").download("data", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def below(folder: Path) -> dict[str, bytes]:
    """All files and links below a folder, with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    "name", ["a b", "50%", "a?b", "a#b", "ä", "a+b", "-rf", "a\\b", "x\udcff", "a%2fb", "...", " "]
)
async def test_name_arrives_exactly(session: Session, name: str) -> None:
    await session.write_file(f"names/{name}", "content")
    listed = await session.files("names")
    assert [one.path for one in listed.entries] == [f"names/{name}"]
    assert await session.read_file(listed.entries[0].path) == b"content"


async def test_path_out_of_the_workspace_reaches_no_other_route(client: Client, session: Session) -> None:
    """An HTTP client resolves `..` by itself, and would close the other session here."""
    async with client.session() as other:
        with pytest.raises(NotFound):
            await session.delete(f"../../{other.id}")
        with pytest.raises(NotFound):
            await client.attach("..")
        with pytest.raises(NotFound):
            await session.cancel("../../..")
        assert (await other.record()).state == "open"


async def test_files_are_listed_and_removed(session: Session) -> None:
    await session.write_file("a/b/c", b"123")
    listed = await session.files(recursive=True)
    assert [(one.path, one.kind, one.size) for one in listed.entries if one.kind == "file"] == [("a/b/c", "file", 3)]
    assert listed.complete
    await session.delete("a", recursive=True)
    with pytest.raises(NotFound) as refused:
        await session.read_file("a/b/c")
    assert refused.value.code == "missing_file"


async def test_folder_is_no_file_and_a_file_no_folder(session: Session) -> None:
    await session.write_file("folder/file", "text")
    with pytest.raises(Refused, match="a folder"):
        await session.read_file("folder")
    with pytest.raises(Refused, match="not a folder"):
        await session.files("folder/file")


async def test_missing_local_file_is_the_callers_error(session: Session, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await session.upload(tmp_path / "missing", "x")


# results

NUMBERS = "".join(f"{i}\n" for i in range(1, 20001)).encode()


async def test_result_is_read_whole_in_part_and_after_closing(client: Client) -> None:
    async with client.session() as session:
        reference = (await session.call("bash", {"command": "seq 1 20000"})).references[0].reference
        [listed] = await session.results()
        assert (listed.reference, round(listed.expires - listed.created)) == (reference, 24 * 3600)
    assert await session.read_result(reference) == NUMBERS
    assert await session.read_result(reference, 10, 20) == NUMBERS[10:20]
    assert await session.read_result(reference, len(NUMBERS) - 5) == NUMBERS[-5:]
    assert await session.read_result(reference, 5, 5) == b""
    assert await session.read_result(reference, len(NUMBERS)) == b""


async def test_result_is_saved(session: Session, tmp_path: Path) -> None:
    reference = (await session.call("bash", {"command": "seq 1 20000"})).references[0].reference
    await session.save_result(reference, tmp_path / "numbers")
    assert (tmp_path / "numbers").read_bytes() == NUMBERS


async def test_result_is_described_without_its_bytes(session: Session) -> None:
    stored = (await session.call("bash", {"command": "seq 1 20000"})).references[0]
    info = await session.result_info(stored.reference)
    assert (info.key, info.bytes, info.sha256) == ("0001-bash-stdout", len(NUMBERS), stored.sha256)
    assert info.created is not None
    assert abs(info.created - (await session.record()).created) < 10


async def test_expired_result_is_gone(server: Served, session: Session) -> None:
    reference = (await session.call("bash", {"command": "seq 1 20000"})).references[0].reference
    server.gateway.journal.mark_deleted(await server.gateway.journal.results(session.id), 1.0)
    with pytest.raises(Gone) as gone:
        await session.read_result(reference)
    assert (gone.value.status, gone.value.code) == (410, "expired")


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1:1/x", "s3://bucket/key", "file:///etc/passwd", "", "sandgate://s-1/files/x"]
)
async def test_other_scheme_is_no_result_and_nothing_is_asked(reference: str) -> None:
    """A40: no request leaves for something else than a reference."""
    async with Client("http://127.0.0.1:1") as client:
        with pytest.raises(NotFound):
            await Session(client, "s-1").read_result(reference)
