"""The typed client of a gateway over HTTP: sessions, calls, streams, files, results. The base install is enough for it.

    ClientError
    +-- GatewayUnreachable      nobody answers at the URL, or something that is no gateway
    +-- ConnectionLost          the connection broke before the answer: whether a call ran is not known
    |   +-- StreamInterrupted   a stream broke and could not be taken up again: how its call ends is not known
    +-- ArchiveRefused          a folder on its way here held something that is no plain file below it
    +-- Refused                 the gateway said no: status, code, message, remedy, retry_after
        +-- Unauthorized 401    Forbidden 403    NotFound 404    Gone 410    TooMany 429

What a program did is never an error: a call's end is a `ToolResult`, whatever its status.
"""

import base64
import json
import os
import re
import secrets
import shutil
import ssl
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Literal, Self, TypeVar
from urllib.parse import quote, unquote_to_bytes

import anyio
import anyio.to_thread
import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_jsonable_python

from gateway.models import CallRecord, CloseReport, OpenedSession, Reference, SessionRecord, Stream, ToolResult

DEFAULT_URL: Final = "http://127.0.0.1:8710"
CHUNK_BYTES: Final = 256 * 1024
CLOSE_SECONDS: Final = 75.0
"""How long leaving a session waits for its close report: collecting may take 60 s."""
CANCEL_SECONDS: Final = 5.0
RECONNECT_DELAYS: Final = (0.05, 0.1, 0.2, 0.4, 1.0, 2.0, 3.0, 3.0)
"""Seconds between attempts to take up a stream; in sum about as long as the gateway waits for a reader."""

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_QUICK: Final = httpx2.Timeout(60, connect=10, pool=None)
_LONG: Final = httpx2.Timeout(60, connect=10, pool=None, read=None)  # the gateway bounds how long a call may take
_STREAM: Final = httpx2.Timeout(60, connect=10, pool=None, read=45)  # a stream says something every 15 s
_EVENTS: Final = "text/event-stream"
_JSON: Final = "application/json"
_TAR: Final = "application/x-tar"
_REFERENCE: Final = re.compile(r"sandgate://([^/]+)/results/(.+)")

Model = TypeVar("Model", bound=BaseModel)


# errors, and the one place where foreign ones become ours


class ClientError(Exception):
    """Base of all; `remedy` says what to do next, or is empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class GatewayUnreachable(ClientError):
    """Nothing was done: nobody answers at the URL, or what answers does not speak as a gateway does."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"no gateway at {url}: {why}",
                         "Start one with `sandgate serve`, or say where it is in SANDGATE_URL.")


class ConnectionLost(ClientError):
    """The connection broke, or was silent too long. A call without an idempotency key is cancelled by the gateway; one
    with a key runs on, and asking again with the same key gives its answer."""


class StreamInterrupted(ConnectionLost):
    """A stream could not be taken up again; `call_id` is the call's id in its session (`call_record` may know its end),
    empty where not even that arrived."""

    def __init__(self, call_id: str, why: str) -> None:
        super().__init__(f"the stream of call {call_id or '(not known)'} was interrupted: {why}",
                         "Its record may say how it ended; nothing else is known.")
        self.call_id = call_id


class ArchiveRefused(ClientError):
    """Nothing of the archive was written."""


class Refused(ClientError):
    """The gateway's problem details; `retry_after` is in seconds, or None. `code` is stable and meant for programs."""

    for_status: ClassVar[int | None] = None

    def __init__(self, status: int, code: str, message: str, remedy: str = "",
                 retry_after: float | None = None) -> None:
        super().__init__(message, remedy)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Unauthorized(Refused):
    """No token, or one that nobody holds."""

    for_status = 401


class Forbidden(Refused):
    """The token is known and may not do this."""

    for_status = 403


class NotFound(Refused):
    """Absent, or another's."""

    for_status = 404


class Gone(Refused):
    """The caller's own result, ended by retention or deletion."""

    for_status = 410


class TooMany(Refused):
    """A limit of the whole gateway is reached; try again after `retry_after` seconds."""

    for_status = 429


class _Problem(BaseModel):
    detail: str = ""
    code: str = "unknown"
    remedy: str = ""


def _refusal(response: httpx2.Response) -> Refused:
    """What a read answer without success means; a proxy's page in the place of problem details is survived."""
    try:
        problem = _Problem.model_validate_json(response.content)
    except ValidationError:
        problem = _Problem()
    after = response.headers.get("retry-after", "")
    kind = next((one for one in Refused.__subclasses__() if one.for_status == response.status_code), Refused)
    return kind(response.status_code, problem.code, problem.detail or f"HTTP status {response.status_code}",
                problem.remedy, float(after) if after.isdecimal() else None)


_NOTHING_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.UnsupportedProtocol,
                        httpx2.LocalProtocolError, httpx2.InvalidURL, httpx2.SSEError)


@contextmanager
def _mapped(url: str) -> Iterator[None]:
    """httpx2's errors become ours. Their texts stay out of the message: they may quote a header."""
    try:
        yield
    except _NOTHING_SENT as error:
        raise GatewayUnreachable(url, type(error).__name__) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise ConnectionLost(f"the connection to {url} broke: {type(error).__name__}") from error


# values


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `offset..offset+len(data)` of one stream of a running call; `text` never cuts a character in two."""

    stream: Stream
    offset: int
    text: str
    data: bytes = field(repr=False)


class FileEntry(BaseModel):
    """One entry of a workspace; `path` is its exact name from the workspace on, as `read_file` takes it."""

    model_config = ConfigDict(frozen=True)

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified: float


class FileList(BaseModel):
    """A folder; `complete` is False where it has more than is listed."""

    model_config = ConfigDict(frozen=True)

    entries: tuple[FileEntry, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class ResultInfo:
    """A stored result without its bytes; `created` is in seconds since 1970, None where the gateway does not say."""

    key: str
    bytes: int
    media_type: str
    sha256: str
    created: float | None


class _Sessions(BaseModel):
    sessions: tuple[SessionRecord, ...]


class _Tools(BaseModel):
    tools: list[dict[str, Any]]


class _Calls(BaseModel):
    calls: tuple[CallRecord, ...]


class _Results(BaseModel):
    results: tuple[Reference, ...]


class _Written(BaseModel):
    files: int


class _Cancelled(BaseModel):
    cancelled: bool


class _Accepted(BaseModel):
    id: str


class _Output(BaseModel):
    stream: Stream
    offset: int
    text: str
    base64: str | None = None


# the client


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway is and who we are to it."""

    url: str
    token: str | None = field(repr=False)


def endpoint(url: str | None = None, token: str | None = None) -> Endpoint:
    """What is given, else `SANDGATE_URL` and `SANDGATE_TOKEN`, else the gateway of this machine without a token."""
    token = token or os.environ.get("SANDGATE_TOKEN", "").strip()
    return Endpoint((url or os.environ.get("SANDGATE_URL") or DEFAULT_URL).rstrip("/"), token or None)


class Client:
    """One gateway, as one token sees it. Close it, or use it as an async context manager. GatewayUnreachable for a URL
    that is none.

    The number of connections is not limited: a call holds one, and a limit would let `cancel` wait behind calls.
    A gateway on loopback is never asked through a proxy.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        where = endpoint(url, token)
        self.url = where.url
        headers = {"authorization": f"Bearer {where.token}"} if where.token else {}
        base = _http_url(self.url)
        # loading the machine's certificates takes 150 ms, and plain HTTP has no use for them
        verify = True if base.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._http = httpx2.AsyncClient(
            base_url=base, headers=headers, timeout=_QUICK, trust_env=base.host not in _LOOPBACK, verify=verify,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; what was called without an idempotency key and still runs is cancelled."""
        with anyio.CancelScope(shield=True):
            await self._http.aclose()

    @asynccontextmanager
    async def session(self, profile: str = "default", **request: Any) -> AsyncIterator["Session"]:
        """Open a session, and close it on leaving, also by an error; `close_report` then says what was collected.

        `request` is what `POST /v1/sessions` takes (`limits`, `tools`, `env`, `seed`, ...); the gateway checks it.
        """
        session = await self.open_session(profile, **request)
        try:
            yield session
        except BaseException:
            with suppress(ClientError):  # the error that is on its way is the one to see
                await session.close()
            raise
        await session.close()

    async def open_session(self, profile: str = "default", **request: Any) -> "Session":
        """Open a session that stays open until `close()`, its idle time or its lifetime ends."""
        opened = await self._ask(OpenedSession, "POST", "/v1/sessions", body={"profile": profile, **request},
                                 timeout=_LONG)
        return Session(self, opened.id, opened.token)

    async def attach(self, session_id: str) -> "Session":
        """A session that is there already, open or ended; NotFound where this token sees none."""
        session = Session(self, session_id)
        await session.record()
        return session

    async def sessions(self) -> tuple[SessionRecord, ...]:
        """All that this token may see, the oldest first."""
        return (await self._ask(_Sessions, "GET", "/v1/sessions")).sessions

    @asynccontextmanager
    async def _open(self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None,
                    **request: Any) -> AsyncIterator[httpx2.Response]:
        """An answer whose body is not yet read; anything but success is raised."""
        headers = dict(headers or {})
        if body is not None:  # escaped to ASCII: what a model gives may hold lone surrogates
            headers["content-type"] = _JSON
            request["content"] = json.dumps(body, default=to_jsonable_python, allow_nan=False).encode()
        with _mapped(self.url):
            async with self._http.stream(method, path, headers=headers, **request) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                yield response

    async def _ask(self, model: type[Model], method: str, path: str, **request: Any) -> Model:
        async with self._open(method, path, **request) as response:
            return self._parsed(model, await response.aread())

    def _parsed(self, model: type[Model], data: bytes | str) -> Model:
        """Fields that this version does not know are passed over: the gateway may be newer."""
        try:
            return model.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            raise GatewayUnreachable(self.url, f"its answer is no {model.__name__.removeprefix('_')}") from error


class Session:
    """One session: what runs in it, its files, its results. Made by a client, which must stay open.

    `token` lets its holder use this one session; it is known only where the session was opened. Paths are relative
    to the workspace; the gateway refuses what leaves it.
    """

    def __init__(self, client: Client, session_id: str, token: str | None = None) -> None:
        self.id = session_id
        self.token = token
        self.close_report: CloseReport | None = None
        self._client = client
        self._path = f"/v1/sessions/{_segment(session_id)}"

    async def record(self) -> SessionRecord:
        """The session as the gateway sees it now."""
        return await self._client._ask(SessionRecord, "GET", self._path)

    async def close(self) -> CloseReport:
        """Collect, then remove sandbox and workspace, even where our caller is cancelled; again: the same report.

        Stored results can be read until their retention ends.
        """
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
            self.close_report = await self._client._ask(CloseReport, "DELETE", self._path, timeout=_LONG)
            return self.close_report
        raise ConnectionLost(f"no close report within {CLOSE_SECONDS:g} s")

    # calls

    async def call(self, tool: str, arguments: Mapping[str, Any] | None = None, *, call_id: str | None = None,
                   turn_id: str | None = None, idempotency_key: str | None = None) -> ToolResult:
        """Run a tool to its end. Cancelling this cancels the call, unless it has an idempotency key.

        Raises Refused for what never became a call, ConnectionLost where the answer did not arrive.
        """
        return await self._client._ask(
            ToolResult, "POST", f"{self._path}/calls", body=_call_body(tool, arguments, call_id, turn_id),
            headers=_key_header(idempotency_key), timeout=_LONG)

    def stream(self, tool: str, arguments: Mapping[str, Any] | None = None, *, call_id: str | None = None,
               turn_id: str | None = None, idempotency_key: str | None = None) -> "StreamedCall":
        """The same, with its output as it comes: enter it, iterate it, then look at its `result`."""
        return StreamedCall(self._client, f"{self._path}/calls", _call_body(tool, arguments, call_id, turn_id),
                            _key_header(idempotency_key))

    async def tools(self, format: Literal["mcp", "openai", "anthropic"] = "mcp") -> list[dict[str, Any]]:
        """What this session may call, in the shape that a model's API takes."""
        return (await self._client._ask(_Tools, "GET", f"{self._path}/tools", params={"format": format})).tools

    async def dispatch(self, tool_call: object) -> dict[str, Any]:
        """Run what a model asked for, and give what its API wants back.

        Takes OpenAI's `function_call` item (Responses) or tool call (Chat Completions) or Anthropic's `tool_use`
        block, as dictionary or object; TypeError for anything else. Arguments that are no JSON object are told to the
        model, and nothing runs.
        """
        wanted = _model_call(tool_call)
        if wanted.arguments is None:
            return wanted.answer("invalid: the arguments are not a JSON object", is_error=True)
        result = await self.call(wanted.name, wanted.arguments, call_id=wanted.id)
        return wanted.answer(result.text, is_error=result.is_error)

    async def calls(self, *, after: int = 0, limit: int = 1000) -> tuple[CallRecord, ...]:
        """Records in order, at most 1000; ask again with `after` = the last `sequence` for more."""
        return (await self._client._ask(_Calls, "GET", f"{self._path}/calls",
                                        params={"after": after, "limit": limit})).calls

    async def call_record(self, call_id: str) -> CallRecord:
        """One call's record; `call_id` is the gateway's (`ToolResult.id`)."""
        return await self._client._ask(CallRecord, "GET", f"{self._path}/calls/{_segment(call_id)}")

    async def cancel(self, call_id: str) -> bool:
        """Ask a call to end (it does within 2 seconds); False where it had ended. `call_id` is the gateway's."""
        path = f"{self._path}/calls/{_segment(call_id)}/cancel"
        return (await self._client._ask(_Cancelled, "POST", path)).cancelled

    # files

    async def upload(self, local_path: str | os.PathLike[str], remote: str) -> int:
        """Send a file to the name `remote`, or what is in a folder into the folder `remote`; streamed.

        Returns how many files were written. Of a folder regular files go; links, other things and empty folders stay.
        """
        local = Path(local_path)
        if not await anyio.to_thread.run_sync(local.is_dir):
            with await anyio.to_thread.run_sync(local.open, "rb") as file:
                return await self._put(remote, _chunks(file))
        async with aclosing(_packed(local)) as archive:
            return await self._put(remote, archive, {"content-type": _TAR})

    async def download(self, remote: str, local_path: str | os.PathLike[str]) -> None:
        """Fetch a file to the name `local_path` (or into that folder, where it is one), or what is in a folder into
        the folder `local_path`; streamed. A file appears whole or not at all, and replaces one of its name.

        An archive with anything but regular files below its folder is ArchiveRefused; of their modes only
        "executable" arrives.
        """
        local = Path(local_path)
        async with self._client._open("GET", self._files(remote), headers={"accept": _TAR},
                                      timeout=_LONG) as response:
            if _type(response) == _TAR:
                await _unpack(response, local)
                return
            if await anyio.to_thread.run_sync(local.is_dir):
                local = local / remote.rpartition("/")[2]
            await _save(response, local)

    async def read_file(self, path: str) -> bytes:
        """A file's bytes, all in memory."""
        async with self._client._open("GET", self._files(path), timeout=_LONG) as response:
            if _type(response) == _JSON:  # a file is always an octet stream
                raise Refused(422, "invalid_path", f"{path}: a folder", "List it with files().")
            return await response.aread()

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Write a file, whole or not at all; folders on the way are made. Text is written as UTF-8."""
        await self._put(path, content.encode() if isinstance(content, str) else content)

    async def files(self, path: str = ".", *, recursive: bool = False) -> FileList:
        """What is in a folder, or below it."""
        async with self._client._open("GET", self._files(path), params={"recursive": recursive},
                                      timeout=_LONG) as response:
            if _type(response) != _JSON:
                raise Refused(422, "invalid_path", f"{path}: not a folder", "Read it with read_file().")
            listed = self._client._parsed(_Listing, await response.aread())
        return FileList(entries=tuple(one.entry() for one in listed.entries), complete=listed.complete)

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a folder (a full one only with `recursive`)."""
        async with self._client._open("DELETE", self._files(path), params={"recursive": recursive}, timeout=_LONG):
            pass

    async def _put(self, path: str, content: bytes | AsyncIterator[bytes], headers: Mapping[str, str] | None = None
                   ) -> int:
        written = await self._client._ask(_Written, "PUT", self._files(path), content=content, headers=headers,
                                          timeout=_LONG)
        return written.files

    def _files(self, path: str) -> str:
        return f"{self._path}/files" if path in ("", ".") else f"{self._path}/files/{_quoted(path)}"

    # results

    async def results(self) -> tuple[Reference, ...]:
        """What is stored of this session and not yet expired."""
        return (await self._client._ask(_Results, "GET", f"{self._path}/results")).results

    async def read_result(self, reference: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes `start..end` of a stored result, fewer where there are fewer, all in memory.

        `reference` is a whole one, also of another session that this token sees, or a key of this one. Raises
        NotFound (also for what is no reference: nothing is asked then), or Gone after its retention.
        """
        path, headers = self._result(reference), {}
        if start < 0 or (end is not None and end < 0):
            raise ValueError("a range of a result is counted from its beginning")
        if end is not None and end <= start:
            return b""
        if start or end is not None:
            headers["range"] = f"bytes={start}-{'' if end is None else end - 1}"
        try:
            async with self._client._open("GET", path, headers=headers) as response:
                return await response.aread()
        except Refused as error:
            if error.status == 416:
                return b""
            raise

    async def save_result(self, reference: str, local_path: str | os.PathLike[str]) -> None:
        """Stream a stored result into a file, which appears whole or not at all."""
        async with self._client._open("GET", self._result(reference)) as response:
            await _save(response, Path(local_path))

    async def result_info(self, reference: str) -> ResultInfo:
        """What a stored result is, without its bytes. Raises as `read_result` does."""
        path = self._result(reference)
        try:
            async with self._client._open("GET", path, headers={"range": "bytes=0-0"}) as response:
                return _result_info(path, response)
        except Refused as error:
            if error.status != 416:
                raise
        async with self._client._open("GET", path) as response:  # an empty result has no first byte
            return _result_info(path, response)

    def _result(self, reference: str) -> str:
        whole = _REFERENCE.fullmatch(reference)
        if whole is None and ("://" in reference or not reference):
            raise NotFound(404, "not_found", "no such result",
                           "Give a reference as it stands in a result: sandgate://...")
        path = f"/v1/sessions/{_segment(whole[1])}" if whole else self._path
        return f"{path}/results/{_quoted(whole[2] if whole else reference)}"


class StreamedCall:
    """A call whose output is read as it comes: an async context manager, and inside it an async iterator of chunks.

    A broken connection is taken up again where it broke, or StreamInterrupted says that this was not possible; no
    output is lost or given twice, and only the gateway's own answer ends the iteration. Leaving before that end
    cancels the call. Where a hook must see the output first there are no chunks, only the result.
    """

    def __init__(self, client: Client, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.id = ""
        self._client = client
        self._path = path
        self._body = body
        self._headers = headers
        self._stack = AsyncExitStack()
        self._events: AsyncIterator[httpx2.ServerSentEvent] | None = None
        self._last_event_id: str | None = None
        self._offsets: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._result: ToolResult | None = None
        self._interrupted = False

    @property
    def result(self) -> ToolResult:
        """How the call ended; RuntimeError before all of it was iterated."""
        if self._result is None:
            raise RuntimeError("a streamed call has its result when its iteration has ended")
        return self._result

    async def __aenter__(self) -> Self:
        """Return when the call is accepted, with `id` the gateway's name for it. Raises as `Session.call` does."""
        await self._connect("POST", self._path, self._headers, body=self._body)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(CANCEL_SECONDS, shield=True):
            with suppress(ClientError):
                await self._stack.aclose()
            if self._result is None and not self._interrupted:
                with suppress(ClientError):
                    await self._client._ask(_Cancelled, "POST", f"{self._path}/{_segment(self.id)}/cancel")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while self._result is None:
            try:
                event = await self._event()
            except ConnectionLost as lost:
                await self._take_up(lost)
                continue
            if event.event == "output":
                return self._chunk(event)
            if event.event == "result":
                self._result = self._client._parsed(ToolResult, event.data)
        raise StopAsyncIteration

    async def _connect(self, method: str, path: str, headers: Mapping[str, str], **request: Any) -> None:
        """Open a stream and read its first event, which names the call."""
        async with AsyncExitStack() as stack:
            response = await stack.enter_async_context(self._client._open(
                method, path, headers={**headers, "accept": _EVENTS}, timeout=_STREAM, **request))
            self._events = await stack.enter_async_context(aclosing(_server_events(response)))
            self.id = self._client._parsed(_Accepted, (await self._event()).data).id
            self._stack = stack.pop_all()

    async def _event(self) -> httpx2.ServerSentEvent:
        """The next event. A stream that just ends is as broken as any other."""
        if self._events is None:
            raise RuntimeError("a streamed call is entered before it is iterated")
        with _mapped(self._client.url):
            event = await anext(self._events, None)
        if event is None:
            raise ConnectionLost("the stream ended without a result")
        return event

    def _chunk(self, event: httpx2.ServerSentEvent) -> Chunk:
        output = self._client._parsed(_Output, event.data)
        if output.offset != self._offsets[output.stream]:
            raise self._interruption("a part of its output is missing")
        data = output.text.encode() if output.base64 is None else base64.b64decode(output.base64)
        self._offsets[output.stream] += len(data)
        self._last_event_id = event.id
        return Chunk(output.stream, output.offset, output.text, data)

    async def _take_up(self, cause: ClientError) -> None:
        """Connect again to the same call, after the last event that arrived."""
        await self._stack.aclose()
        headers = {} if self._last_event_id is None else {"last-event-id": self._last_event_id}
        for seconds in RECONNECT_DELAYS:
            await anyio.sleep(seconds)
            try:
                await self._connect("GET", f"{self._path}/{_segment(self.id)}", headers)
                return
            except (GatewayUnreachable, ConnectionLost) as error:
                cause = error
            except Refused as error:
                if error.status not in (429, 503):
                    raise self._interruption(error.message) from error
                cause = error
        raise self._interruption(cause.message) from cause

    def _interruption(self, why: str) -> StreamInterrupted:
        self._interrupted = True
        return StreamInterrupted(self.id, why)


def _http_url(url: str) -> httpx2.URL:
    with _mapped(url):
        parsed = httpx2.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise GatewayUnreachable(url, "that is no http:// or https:// URL")
    return parsed


def _call_body(tool: str, arguments: Mapping[str, Any] | None, call_id: str | None,
               turn_id: str | None) -> dict[str, Any]:
    return {"tool": tool, "arguments": dict(arguments or {}), "call_id": call_id, "turn_id": turn_id}


def _key_header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"idempotency-key": key}


def _type(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip()


def _segment(name: str) -> str:
    """One part of a path as it is sent: `.` and `..` too arrive as they are, for the gateway to refuse. Plain ones
    would lead the HTTP client to another route."""
    if name in (".", ".."):
        return name.replace(".", "%2E")
    return quote(name.encode("utf-8", "surrogateescape"), safe="")


def _quoted(path: str) -> str:
    return "/".join(map(_segment, path.split("/")))


# what models' APIs give and take


@dataclass(frozen=True, slots=True)
class _ModelCall:
    """What a model asked for; `arguments` is None where they are no JSON object."""

    api: Literal["responses", "chat", "anthropic"]
    id: str
    name: str
    arguments: dict[str, Any] | None

    def answer(self, text: str, *, is_error: bool) -> dict[str, Any]:
        match self.api:
            case "responses":
                return {"type": "function_call_output", "call_id": self.id, "output": text}
            case "chat":
                return {"role": "tool", "tool_call_id": self.id, "content": text}
            case "anthropic":
                return {"type": "tool_result", "tool_use_id": self.id, "content": text, "is_error": is_error}


def _model_call(value: object) -> _ModelCall:
    kind, function = _field(value, "type"), _field(value, "function")
    if kind == "function_call":
        return _ModelCall("responses", _text(value, "call_id"), _text(value, "name"),
                          _object(_field(value, "arguments")))
    if kind == "tool_use":
        return _ModelCall("anthropic", _text(value, "id"), _text(value, "name"), _object(_field(value, "input")))
    if function is not None:
        return _ModelCall("chat", _text(value, "id"), _text(function, "name"), _object(_field(function, "arguments")))
    raise TypeError("not a tool call of OpenAI or Anthropic")


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(value: object, name: str) -> str:
    text = _field(value, name)
    if not isinstance(text, str):
        raise TypeError(f"a tool call without {name}")
    return text


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as a dictionary; for a tool without parameters some models give an empty text, or nothing."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return None
    if not arguments and not isinstance(arguments, (list, int)):
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) else None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# results and files on their way


class _ListedFile(BaseModel):
    href: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified: float

    def entry(self) -> FileEntry:
        path = unquote_to_bytes(self.href).decode("utf-8", "surrogateescape")
        return FileEntry(path=path, kind=self.kind, size=self.size, mode=self.mode, modified=self.modified)


class _Listing(BaseModel):
    entries: tuple[_ListedFile, ...]
    complete: bool


def _result_info(path: str, response: httpx2.Response) -> ResultInfo:
    headers = response.headers
    whole = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "0")
    modified = headers.get("last-modified")
    return ResultInfo(key=path.partition("/results/")[2], bytes=int(whole), media_type=headers.get("content-type", ""),
                      sha256=headers.get("etag", "").strip('"'),
                      created=parsedate_to_datetime(modified).timestamp() if modified else None)


async def _server_events(response: httpx2.Response) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
    # the result is one event, and how large it may be is the gateway's to say
    async for event in httpx2.EventSource(response, max_event_size=None):
        yield event


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


async def _packed(folder: Path) -> AsyncGenerator[bytes, None]:
    """A tar of the regular files in a folder, made as it is read. A file that shrinks meanwhile ends it by OSError."""
    for path in await anyio.to_thread.run_sync(_regular_files, folder):
        with await anyio.to_thread.run_sync(path.open, "rb") as file:
            info = os.fstat(file.fileno())
            yield _tar_header(path.relative_to(folder).as_posix(), info)
            left = info.st_size
            while left:
                chunk = await anyio.to_thread.run_sync(file.read, min(left, CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{path} became shorter while it was sent")
                left -= len(chunk)
                yield chunk
            yield bytes(-info.st_size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _regular_files(folder: Path) -> list[Path]:
    paths = [Path(at, name) for at, _, names in os.walk(folder, onerror=_raise) for name in names]
    return sorted(path for path in paths if stat.S_ISREG(path.lstat().st_mode))


def _raise(error: OSError) -> None:
    raise error


def _tar_header(name: str, info: os.stat_result) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = info.st_size, info.st_mode & 0o777, int(info.st_mtime)
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


async def _save(response: httpx2.Response, target: Path) -> None:
    """Stream a body into a file, which appears whole or not at all."""
    part = _part_of(target)
    try:
        async with await anyio.open_file(part, "xb") as file:
            async for chunk in response.aiter_bytes(CHUNK_BYTES):
                await file.write(chunk)
        await anyio.to_thread.run_sync(part.replace, target)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove, part)


def _part_of(target: Path) -> Path:
    return target.with_name(f".{secrets.token_hex(8)}.part")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _unpack(response: httpx2.Response, folder: Path) -> None:
    """Spool an archive, check all of it, then write it."""
    with tempfile.TemporaryFile(prefix="sandgate-") as spool:
        async for chunk in response.aiter_bytes(CHUNK_BYTES):
            await anyio.to_thread.run_sync(spool.write, chunk)
        await anyio.to_thread.run_sync(_extract, spool, folder)


def _extract(spool: IO[bytes], folder: Path) -> None:
    most = spool.tell() // tarfile.BLOCKSIZE  # every member has a header: a number beyond this is a trick
    spool.seek(0)
    try:
        with tarfile.open(fileobj=spool, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            members = [_checked(member, count, most) for count, member in enumerate(archive, start=1)]
            folder.mkdir(parents=True, exist_ok=True)
            for member in members:
                _extract_member(archive, member, folder.joinpath(*member.name.split("/")))
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ArchiveRefused(f"the archive of the folder cannot be read: {error}") from error


def _checked(member: tarfile.TarInfo, count: int, most: int) -> tarfile.TarInfo:
    """The member itself, or ArchiveRefused. The names come from a sandbox, where anybody may have made them."""
    parts = member.name.split("/")
    if count > most or member.size < 0 or member.size > most * tarfile.BLOCKSIZE:
        raise ArchiveRefused("the archive of the folder claims more than it holds")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ArchiveRefused(f"the archive of the folder holds {member.name[:200]!r}, which is no plain file or folder")
    if {"", ".", ".."} & set(parts) or any(one in member.name for one in ("\0", *_NOT_IN_A_NAME)):
        raise ArchiveRefused(f"the archive of the folder holds {member.name[:200]!r}, which does not stay below it")
    return member


_NOT_IN_A_NAME: Final = ("\\", ":") if os.name == "nt" else ()


def _extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part, mode = _part_of(target), 0o755 if member.mode & stat.S_IXUSR else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(part, flags, mode), "wb") as file, tarfile.ExFileObject(archive, member) as source:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
        part.replace(target)
    finally:
        _remove(part)
