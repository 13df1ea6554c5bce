"""Session: what runs in one session, its files, its results."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes

import anyio
import anyio.to_thread

from gateway.client.archive import TAR, Progress, file_chunks, packed, save, unpack
from gateway.client.connection import JSON, LONG, Connection, media_type, quoted, segment
from gateway.client.errors import ConnectionLost, Refused
from gateway.client.model_calls import model_call
from gateway.client.results import FileInfo, ResultInfo, file_info, result_info, result_path
from gateway.client.stream import StreamedCall
from gateway.client.turn import Turn
from gateway.models import CallRecord, CloseReport, Content, SessionRecord, ToolResult
from gateway.wire import (
    CallList,
    Cancelled,
    FileEntry,
    FileList,
    Page,
    SignedUrl,
    StoredResultEntry,
    StoredResultList,
    TerminalTicket,
    ToolFormat,
    ToolList,
    Written,
)

if TYPE_CHECKING:
    from gateway.client.terminal import Terminal

CLOSE_SECONDS: Final = 75.0
"""How long leaving a session waits for its close report: collecting may take 60 s."""


class Session:
    """One session: what runs in it, its files, its results. Made by a client, which must stay open.

    `token` lets its holder use this one session; it is known only where the session was opened. Paths are relative
    to the workspace; the gateway refuses what leaves it.
    """

    def __init__(self, connection: Connection, session_id: str, token: str | None = None) -> None:
        self.id = session_id
        self.token = token
        self.close_report: CloseReport | None = None
        self._connection = connection
        self._path = f"/v1/sessions/{segment(session_id)}"

    async def record(self) -> SessionRecord:
        """The session as the gateway sees it now."""
        return await self._connection._ask(SessionRecord, "GET", self._path)

    async def close(self) -> CloseReport:
        """Collect, then remove sandbox and workspace, even where our caller is cancelled; again: the same report.

        Stored results can be read until their retention ends.
        """
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
            self.close_report = await self._connection._ask(CloseReport, "DELETE", self._path, timeout=LONG)
            return self.close_report
        raise ConnectionLost(f"no close report within {CLOSE_SECONDS:g} s")

    # calls

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        call_id: str | None = None,
        turn_id: str | None = None,
        hook_context: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        approval_seconds: float = 0,
    ) -> ToolResult:
        """Run a tool to its end. Cancelling this cancels the call, unless it has an idempotency key.

        A call that needs an approval is held for a while, and then is `pending`; within `approval_seconds` it is made
        again. Raises Refused for what never became a call, ConnectionLost where the answer did not arrive.
        """
        give_up = anyio.current_time() + approval_seconds
        while True:
            result = await self._connection._ask(
                ToolResult,
                "POST",
                f"{self._path}/calls",
                body=_call_body(tool, arguments, call_id, turn_id, hook_context),
                headers=_key_header(idempotency_key),
                timeout=LONG,
            )
            if result.status != "pending" or anyio.current_time() >= give_up:
                return result

    def stream(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        call_id: str | None = None,
        turn_id: str | None = None,
        hook_context: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> StreamedCall:
        """The same, with its output as it comes: enter it, iterate it, then look at its `result`."""
        return StreamedCall(
            self._connection,
            f"{self._path}/calls",
            _call_body(tool, arguments, call_id, turn_id, hook_context),
            _key_header(idempotency_key),
        )

    async def tools(self, format: ToolFormat = "mcp") -> list[dict[str, Any]]:
        """What this session may call, in the shape that a model's API takes."""
        listed = await self._connection._ask(ToolList, "GET", f"{self._path}/tools", params={"format": format})
        return list(listed.tools)

    async def dispatch(
        self, tool_call: object, *, turn_id: str | None = None, approval_seconds: float = 0
    ) -> dict[str, Any]:
        """Run what a model asked for, and give what its API wants back.

        Takes OpenAI's `function_call` item (Responses) or tool call (Chat Completions) or Anthropic's `tool_use`
        block, as dictionary or object; TypeError for anything else. Arguments that are no JSON object are told to the
        model, and nothing runs. `turn_id` says of which turn it is; `approval_seconds` is as in `call`.
        """
        wanted = model_call(tool_call)
        if wanted.arguments is None:
            return wanted.answer("invalid: the arguments are not a JSON object", is_error=True)
        result = await self.call(
            wanted.name, wanted.arguments, call_id=wanted.id, turn_id=turn_id, approval_seconds=approval_seconds
        )
        return wanted.answer(result.text, is_error=result.is_error)

    @asynccontextmanager
    async def turn(self, user_content: Content) -> AsyncIterator[Turn]:
        """Begin a turn of the agent: hooks see it at `pre_agent_turn`. See Turn for the loop; nothing is sent on
        leaving, so a turn that did not come to its end stays open in the record."""
        yield await Turn.begin(self, user_content)

    async def calls(self, *, after: int = 0, limit: int = 1000) -> tuple[CallRecord, ...]:
        """Records in order, at most 1000; ask again with `after` = the last `sequence` for more."""
        return (
            await self._connection._ask(CallList, "GET", f"{self._path}/calls", params={"after": after, "limit": limit})
        ).calls

    async def call_record(self, call_id: str) -> CallRecord:
        """One call's record; `call_id` is the gateway's (`ToolResult.id`)."""
        return await self._connection._ask(CallRecord, "GET", f"{self._path}/calls/{segment(call_id)}")

    async def cancel(self, call_id: str) -> bool:
        """Ask a call to end (it does within 2 seconds); False where it had ended. `call_id` is the gateway's."""
        path = f"{self._path}/calls/{segment(call_id)}/cancel"
        return (await self._connection._ask(Cancelled, "POST", path)).cancelled

    # terminal

    def terminal(self, columns: int = 80, rows: int = 24) -> "Terminal":
        """Its terminal, to be entered; a session has one. Refused is raised on entering: for a kind without terminals,
        and for tokens below the operator's where hooks or rules watch over `bash`."""
        from gateway.client.terminal import Terminal  # here, since only who uses it should wait for websockets

        return Terminal(self._connection, f"{self._path}/terminal", columns, rows)

    async def terminal_ticket(self) -> TerminalTicket:
        """What opens that WebSocket once without a token, for a page. Raises as entering does."""
        return await self._connection._ask(TerminalTicket, "POST", f"{self._path}/terminal")

    # files

    async def upload(self, local_path: str | os.PathLike[str], remote: str) -> int:
        """Send a file to the name `remote`, or what is in a folder into the folder `remote`; streamed.

        Returns how many files were written. Of a folder regular files go; links, other things and empty folders stay.
        """
        local = Path(local_path)
        if not await anyio.to_thread.run_sync(local.is_dir):
            with await anyio.to_thread.run_sync(local.open, "rb") as file:
                return await self._put(remote, file_chunks(file))
        async with aclosing(packed(local)) as archive:
            return await self._put(remote, archive, {"content-type": TAR})

    async def download(self, remote: str, local_path: str | os.PathLike[str]) -> None:
        """Fetch a file to the name `local_path` (or into that folder, where it is one), or what is in a folder into
        the folder `local_path`; streamed. A file appears whole or not at all, and replaces one of its name.

        An archive with anything but regular files below its folder is ArchiveRefused; of their modes only
        "executable" arrives.
        """
        local = Path(local_path)
        async with self._connection._open(
            "GET", self._files(remote), headers={"accept": TAR}, timeout=LONG
        ) as response:
            if media_type(response) == TAR:
                await unpack(response, local)
                return
            if await anyio.to_thread.run_sync(local.is_dir):
                local = local / remote.rpartition("/")[2]
            await save(response, local)

    async def read_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes `start..end` of a file, fewer where there are fewer, all in memory."""
        return await self._ranged(self._files(path), start, end, file=path)

    async def file_info(self, path: str) -> FileInfo:
        """What a file is, without its bytes; of a folder only that it is one."""
        try:
            async with self._connection._open("GET", self._files(path), headers={"range": "bytes=0-0"}) as response:
                return file_info(response)
        except Refused as error:
            if error.status != 416:
                raise
        async with self._connection._open("GET", self._files(path)) as response:  # an empty file has no first byte
            return file_info(response)

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Write a file, whole or not at all; folders on the way are made. Text is written as UTF-8."""
        await self._put(path, content.encode() if isinstance(content, str) else content)

    async def files(self, path: str = ".", *, recursive: bool = False) -> FileList:
        """What is in a folder, or below it. The `path` of each entry is its exact one, as `read_file` takes it."""
        async with self._connection._open(
            "GET", self._files(path), params={"recursive": recursive}, timeout=LONG
        ) as response:
            if media_type(response) != JSON:
                raise Refused(422, "invalid_path", f"{path}: not a folder", "Read it with read_file().")
            listed = self._connection._parsed(FileList, await response.aread())
        return listed.model_copy(update={"entries": tuple(_exact(entry) for entry in listed.entries)})

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a folder (a full one only with `recursive`)."""
        async with self._connection._open("DELETE", self._files(path), params={"recursive": recursive}, timeout=LONG):
            pass

    async def _put(
        self, path: str, content: bytes | AsyncIterator[bytes], headers: Mapping[str, str] | None = None
    ) -> int:
        written = await self._connection._ask(
            Written, "PUT", self._files(path), content=content, headers=headers, timeout=LONG
        )
        return written.files

    def _files(self, path: str) -> str:
        return f"{self._path}/files" if path in ("", ".") else f"{self._path}/files/{quoted(path)}"

    # results

    async def results(self) -> tuple[StoredResultEntry, ...]:
        """What is stored of this session and not yet expired."""
        return (await self._connection._ask(StoredResultList, "GET", f"{self._path}/results")).results

    async def read_result(self, reference: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes `start..end` of a stored result, fewer where there are fewer, all in memory.

        `reference` is a whole one, also of another session that this token sees, or a key of this one. Raises
        NotFound (also for what is no reference: nothing is asked then), or Gone after its retention.
        """
        return await self._ranged(result_path(reference, self._path), start, end)

    async def _ranged(self, path: str, start: int, end: int | None, *, file: str | None = None) -> bytes:
        if start < 0 or (end is not None and end < 0):
            raise ValueError("a range is counted from the beginning")
        if end is not None and end <= start:
            return b""
        headers = {"range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        try:
            async with self._connection._open("GET", path, headers=headers, timeout=LONG) as response:
                if file is not None and media_type(response) == JSON:  # a file is always an octet stream
                    raise Refused(422, "invalid_path", f"{file}: a folder", "List it with files().")
                return await response.aread()
        except Refused as error:
            if error.status == 416:
                return b""
            raise

    async def save_result(
        self, reference: str, local_path: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> None:
        """Stream a stored result into a file, which appears whole or not at all, and only if its digest is right.

        `progress` is told how many bytes have come, now and then. Raises ConnectionLost for another digest.
        """
        async with self._connection._open("GET", result_path(reference, self._path)) as response:
            digest = response.headers.get("etag", "").strip('"')
            await save(response, Path(local_path), progress=progress, sha256=digest)

    async def result_lines(self, reference: str, first: int, last: int) -> Page:
        """The lines `first..last` of a stored result (from 1, both included), at most 1 MiB of them."""
        return await self._page(reference, {"lines": f"{first}-{last}"})

    async def grep_result(self, reference: str, pattern: str) -> Page:
        """The lines of a stored result that an RE2 pattern matches, as `number:line`, at most 1 MiB of them."""
        return await self._page(reference, {"grep": pattern})

    async def _page(self, reference: str, params: Mapping[str, str]) -> Page:
        return await self._connection._ask(Page, "GET", result_path(reference, self._path), params=params, timeout=LONG)

    async def delete_result(self, reference: str) -> None:
        """Delete a stored result before its time; asking for it again raises Gone."""
        async with self._connection._open("DELETE", result_path(reference, self._path)):
            pass

    async def signed_url(self, reference: str, *, seconds: float = 3600) -> SignedUrl:
        """A URL that reads one stored result of this session without a token, for a week at most."""
        body = {"reference": reference, "seconds": seconds}
        return await self._connection._ask(SignedUrl, "POST", f"{self._path}/urls", body=body)

    async def revoke_urls(self) -> None:
        """End all signed URLs of this session."""
        async with self._connection._open("DELETE", f"{self._path}/urls"):
            pass

    async def result_info(self, reference: str) -> ResultInfo:
        """What a stored result is, without its bytes. Raises as `read_result` does."""
        path = result_path(reference, self._path)
        try:
            async with self._connection._open("GET", path, headers={"range": "bytes=0-0"}) as response:
                return result_info(path, response)
        except Refused as error:
            if error.status != 416:
                raise
        async with self._connection._open("GET", path) as response:  # an empty result has no first byte
            return result_info(path, response)


def _call_body(
    tool: str,
    arguments: Mapping[str, Any] | None,
    call_id: str | None,
    turn_id: str | None,
    hook_context: Mapping[str, Any] | None,
) -> dict[str, Any]:
    body = {"tool": tool, "arguments": dict(arguments or {}), "call_id": call_id, "turn_id": turn_id}
    return {**body, "hook_context": dict(hook_context)} if hook_context else body


def _key_header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"idempotency-key": key}


def _exact(entry: FileEntry) -> FileEntry:
    path = unquote_to_bytes(entry.href).decode("utf-8", "surrogateescape")
    return entry.model_copy(update={"path": path})
