"""Files of a workspace over HTTP: one file, a listing, or a tar, streamed both ways, through the sandbox."""

import base64
import os
import tempfile
from email.utils import formatdate
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response, StreamingResponse

from gateway.errors import NotFound, Problem, Unprocessable
from gateway.sessions import Session
from gateway.text import printable
from gateway.transports.http.app import TheSession
from gateway.transports.http.downloads import SAFE, byte_range, streamed
from gateway.wire import FileEntry, FileList, Written
from sandboxes import Entry, FileRefused, Sandbox, pack, unpack


class ExactPath(PathConvertor):
    """Starlette's `path` stops at a newline, which a file's name may hold."""

    regex = r"[\s\S]*"


register_url_convertor("exact", ExactPath())
router = APIRouter(prefix="/v1/sessions/{session_id}/files", tags=["files"])

TAR: Final = "application/x-tar"
MAX_PATH: Final = 4096


@router.get("", response_model=None)
@router.get("/{path:exact}", response_model=None)
async def get_file(request: Request, session: TheSession, recursive: bool = False) -> Response | FileList:
    """A file's bytes (with `Range`), or a folder's listing; a folder as a tar with `Accept: application/x-tar`."""
    path = _path(request)
    sandbox = await _sandbox(session)
    if not path or (entry := await _entry(sandbox, path)).kind == "directory":
        return await _folder(sandbox, path or ".", request, recursive=recursive)
    if entry.kind != "file":
        raise Unprocessable("not a regular file", code="invalid_path")
    wanted = byte_range(request.headers.get("range"), entry.size)
    headers = {
        **SAFE,
        "content-disposition": "attachment",
        "cache-control": "no-store",
        "last-modified": formatdate(entry.modified, usegmt=True),
    }
    chunks = sandbox.read(path, wanted.start, wanted.end, follow=False)
    return await streamed(chunks, wanted, headers, "application/octet-stream")


@router.put("", status_code=201)
@router.put("/{path:exact}", status_code=201)
async def put_file(request: Request, session: TheSession) -> Written:
    """Write a file, whole or not at all; `Content-Type: application/x-tar` unpacks an archive into the folder."""
    path = _path(request, missing=Unprocessable("the path is not one of the workspace", code="invalid_path"))
    sandbox = await _sandbox(session)
    if request.headers.get("content-type", "").partition(";")[0].strip() == TAR:
        return await _put_tar(request, session, sandbox, path or ".")
    if not path:
        raise Unprocessable("a file needs a name", "PUT .../files/<path>.", code="invalid_path")
    return Written(files=1, bytes=await sandbox.write(path, request.stream()))


@router.delete("/{path:exact}", status_code=204)
async def delete_file(request: Request, session: TheSession, recursive: bool = False) -> None:
    """Remove a file, a link itself, or a folder (a full one only with `recursive`)."""
    path = _path(request)
    if not path:
        raise Unprocessable("the workspace itself stays", code="invalid_path")
    await (await _sandbox(session)).remove(path, recursive=recursive)


def _path(request: Request, missing: Problem | None = None) -> str:
    """The exact path below the workspace, from the bytes of the request line; whatever leaves it is absent, and so is
    a route that is itself spelled with escapes."""
    raw: bytes = request.scope["raw_path"]
    route = f"/v1/sessions/{request.path_params['session_id']}/files".encode()
    if not raw.startswith(route):
        raise missing or NotFound("no such file", code="missing_file")
    exact = unquote_to_bytes(raw[len(route) :].partition(b"?")[0].removeprefix(b"/"))
    parts = exact.split(b"/") if exact else []
    if b"\0" in exact or len(exact) > MAX_PATH or any(part in (b"", b".", b"..") or len(part) > 255 for part in parts):
        raise missing or NotFound("no such file", code="missing_file")
    return os.fsdecode(exact)


async def _sandbox(session: Session) -> Sandbox:
    session.check_open()
    return await session.sandbox()


async def _entry(sandbox: Sandbox, path: str) -> Entry:
    folder, _, name = path.rpartition("/")
    listing = await sandbox.list(path, max_entries=1)
    if listing.entries and listing.entries[0].path == ".":
        return listing.entries[0]
    return Entry(name or folder, "directory", 0, 0o755, 0.0)


async def _folder(sandbox: Sandbox, path: str, request: Request, *, recursive: bool) -> Response | FileList:
    if TAR in request.headers.get("accept", ""):
        return await _get_tar(sandbox, path, int(request.app.state.upload_bytes))
    listing = await sandbox.list(path, recursive=recursive, max_entries=10_000)
    prefix = "" if path == "." else f"{path}/"
    return FileList(entries=tuple(_shown(entry, prefix) for entry in listing.entries), complete=listing.complete)


def _shown(entry: Entry, prefix: str) -> FileEntry:
    exact = os.fsencode(prefix + entry.path)
    plain = printable(prefix + entry.path)
    return FileEntry(
        path=plain,
        href=quote(exact),
        kind=entry.kind,
        size=entry.size,
        mode=f"{entry.mode & 0o7777:04o}",
        modified=entry.modified,
        path_base64=None if os.fsencode(plain) == exact else base64.b64encode(exact).decode(),
    )


async def _get_tar(sandbox: Sandbox, path: str, limit: int) -> Response:
    listing = await sandbox.list(path, recursive=True)
    size = sum(entry.size for entry in listing.entries if entry.kind == "file")
    if not listing.complete or size > limit:
        raise FileRefused(
            f"the folder has over {limit:,} bytes or too many entries", "Fetch parts of it.", code="content_too_large"
        )
    headers = {"content-disposition": 'attachment; filename="files.tar"', "cache-control": "no-store"}
    return StreamingResponse(pack(sandbox, path, listing), 200, headers, TAR)


async def _put_tar(request: Request, session: Session, sandbox: Sandbox, path: str) -> Written:
    """Spool the archive, check all of it, then unpack it."""
    with tempfile.TemporaryFile() as spool:  # without a name, so that nothing is left of it after a crash
        async for chunk in request.stream():
            await anyio.to_thread.run_sync(spool.write, chunk)
        unpacked = await unpack(sandbox, spool, path, session.spec.limits.workspace_size)
    return Written(files=unpacked.files, bytes=unpacked.bytes)
