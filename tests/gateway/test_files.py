"""Files of a workspace over HTTP: exact names, archives in and out, and what a hostile workspace or client tries."""

import base64
import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes, urlsplit

import anyio
import anyio.to_thread
import httpx2
import pytest

from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

TAR = "application/x-tar"


async def opened(server: Served, **request: Any) -> str:
    """A session's base URL."""
    return f"/v1/sessions/{(await server.session(**request))['id']}"


async def bash(server: Served, base: str, command: str) -> str:
    answer = await server.agent.post(f"{base}/calls", json={"tool": "bash", "arguments": {"command": command}})
    result = answer.json()
    assert result["status"] == "ok", result
    return "".join(block["text"] for block in result["content"])


async def python(server: Served, base: str, code: str) -> str:
    answer = await server.agent.post(f"{base}/calls", json={"tool": "python", "arguments": {"code": code}})
    result = answer.json()
    assert result["status"] == "ok", result
    return "".join(block["text"] for block in result["content"])


async def put(
    server: Served, base: str, path: str, content: bytes | AsyncIterator[bytes], kind: str = ""
) -> httpx2.Response:
    headers = {"content-type": kind} if kind else {}
    return await server.agent.put(f"{base}/files/{path}", content=content, headers=headers)


def workspace(server: Served, base: str) -> Path:
    return server.state_dir / "workspaces" / base.rpartition("/")[2] / "workspace"


def tree(server: Served, base: str) -> list[str]:
    folder = workspace(server, base)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def an_archive(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content) or member.size
            tar.addfile(member, io.BytesIO(content) if content else None)
    return out.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


async def test_a_file_goes_in_and_comes_out(server: Served) -> None:
    """PUT answers what it wrote, GET gives the exact bytes as an attachment, DELETE removes; then it is absent."""
    base, content = await opened(server), os.urandom(300_000)
    written = await put(server, base, "a/b/c.bin", content)
    read = await server.agent.get(f"{base}/files/a/b/c.bin")
    removed = await server.agent.delete(f"{base}/files/a/b/c.bin")
    again = await server.agent.delete(f"{base}/files/a/b/c.bin")
    assert (written.status_code, written.json()) == (201, {"files": 1, "bytes": 300_000})
    assert (read.content == content, read.headers["content-type"]) == (True, "application/octet-stream")
    assert (read.headers["content-disposition"], read.headers["x-content-type-options"]) == ("attachment", "nosniff")
    assert (removed.status_code, again.status_code, again.json()["code"]) == (204, 404, "missing_file")
    assert (await server.agent.get(f"{base}/files/a/b/c.bin")).status_code == 404


async def test_an_empty_file_is_a_file(server: Served) -> None:
    """Nothing in, nothing out, and it is listed."""
    base = await opened(server)
    assert (await put(server, base, "empty", b"")).json() == {"files": 1, "bytes": 0}
    read = await server.agent.get(f"{base}/files/empty")
    assert (read.status_code, read.content) == (200, b"")


async def test_a_folder_is_listed_one_level_or_whole(server: Served) -> None:
    """Kinds, sizes and hrefs that lead to the files; a full folder goes only with `recursive`."""
    base = await opened(server)
    await put(server, base, "d/e/f.txt", b"12345")
    flat, whole = [(await server.agent.get(f"{base}/files{query}")).json() for query in ("", "?recursive=true")]
    assert [(one["path"], one["kind"]) for one in flat["entries"]] == [("d", "directory")]
    assert [(one["path"], one["href"], one["kind"]) for one in whole["entries"]] == [
        ("d", "d", "directory"),
        ("d/e", "d/e", "directory"),
        ("d/e/f.txt", "d/e/f.txt", "file"),
    ]
    assert whole["entries"][2]["size"] == 5
    below = (await server.agent.get(f"{base}/files/d/e")).json()
    assert [(one["path"], one["href"]) for one in below["entries"]] == [("d/e/f.txt", "d/e/f.txt")]
    assert (await server.agent.delete(f"{base}/files/d")).status_code == 422
    assert (await server.agent.delete(f"{base}/files/d?recursive=true")).status_code == 204
    assert (await server.agent.get(f"{base}/files")).json() == {"entries": [], "complete": True}


async def test_a_hostile_folder_is_in_the_path_of_its_files(server: Served) -> None:
    """`path`, `path_base64` and `href` are of the whole way from the workspace on, also in a folder's own listing."""
    base = await opened(server)
    await put(server, base, "a%0Ab/%FF", b"x")
    [entry] = (await server.agent.get(f"{base}/files/a%0Ab")).json()["entries"]
    assert (base64.b64decode(entry["path_base64"]), entry["href"]) == (b"a\nb/\xff", "a%0Ab/%FF")
    assert entry["path"].startswith("a\\")


async def test_the_workspace_itself_stays(server: Served) -> None:
    """Neither removed nor replaced by a file."""
    base = await opened(server)
    codes = [
        (await server.agent.delete(f"{base}/files/?recursive=true")).status_code,
        (await server.agent.delete(f"{base}/files?recursive=true")).status_code,
        (await put(server, base, "", b"x")).status_code,
    ]
    assert codes == [422, 405, 422]
    assert workspace(server, base).is_dir()


HOSTILE_NAMES = [
    b"new\nline",
    b"-rf",
    b"--help",
    b"a 'b' \"c\"",
    b"$(touch owned)",
    b"`id`",
    b"a;b|c&d",
    b"back\\slash",
    b"tab\t",
    b"\x1b[31mred",
    b"\xff\xfe not utf-8",
    "bidi \u202egnp.exe".encode(),
    "e\u0301 and é".encode(),
    "\U0001f4a9".encode(),
    b"%2e%2e",
    b"%00",
    b"a?b#c",
    b"*",
    b"~",
    b"...",
    b" ",
    b".hidden",
    b"n" * 255,
    b"CON",
    b"a:b",
    "\ufeffbom".encode(),
    b"\x7f",
    b"\xed\xa0\x80",
]


async def test_a_hostile_name_makes_an_exact_round_trip(server: Served) -> None:
    """A30: put under its percent-encoded name, found on disk as those bytes, listed as valid JSON, read and removed by
    its href."""
    base = await opened(server)
    for number, name in enumerate(HOSTILE_NAMES):
        answer = await put(server, base, f"d%20{number}/{quote_from_bytes(name, safe='')}", b"%d" % number)
        assert (name, answer.status_code) == (name, 201)
    on_disk = {os.fsencode(path.name) for path in workspace(server, base).glob("d *") for path in path.iterdir()}
    listing = json.loads((await server.agent.get(f"{base}/files?recursive=true")).content)
    files = [one for one in listing["entries"] if one["kind"] == "file"]
    assert on_disk == set(HOSTILE_NAMES)
    assert len(files) == len(HOSTILE_NAMES)
    for one in files:
        number = int(one["href"].partition("/")[0].removeprefix("d%20"))
        assert (await server.agent.get(f"{base}/files/{one['href']}")).content == b"%d" % number
        exact = base64.b64decode(one["path_base64"]) if one["path_base64"] else one["path"].encode()
        assert exact.rpartition(b"/")[2] == HOSTILE_NAMES[number]
        assert not set(one["path"]) & set("\n\x1b\x7f\u202e\ufeff\t")
        assert (await server.agent.delete(f"{base}/files/{one['href']}")).status_code == 204
    assert not (workspace(server, base) / "owned").exists()


async def test_hostile_names_made_inside_come_out_in_a_tar(server: Served) -> None:
    """A30: names that a program made, bytes for bytes."""
    base = await opened(server)
    await python(server, base, f"import os\nfor name in {HOSTILE_NAMES!r}: open(name, 'wb').write(name)")
    answer = await server.agent.get(f"{base}/files", headers={"accept": TAR})
    with tarfile.open(fileobj=io.BytesIO(answer.content), errors="surrogateescape") as tar:
        found = {os.fsencode(one.name): tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    assert found == {name: name for name in HOSTILE_NAMES}


async def test_a_tar_goes_in_and_comes_out(server: Served) -> None:
    """Plain and gzip, below a folder; contents, modes and names stay."""
    base = await opened(server)
    for kind in ("w", "w:gz"):
        archive = an_archive(
            member("./s/run.sh", b"#!/bin/sh\n", mode=0o755),
            member("s/d", type=tarfile.DIRTYPE),
            member("ü.txt", b"text"),
            member("long/" + "n" * 200, b"long"),
            mode=kind,
        )
        answer = await put(server, base, "in", archive, TAR)
        assert (answer.status_code, answer.json()) == (201, {"files": 3, "bytes": len(b"#!/bin/sh\ntextlong")})
    out = await server.agent.get(f"{base}/files/in", headers={"accept": TAR})
    with tarfile.open(fileobj=io.BytesIO(out.content)) as tar:
        found = {one.name: (oct(one.mode), tar.extractfile(one).read()) for one in tar}  # type: ignore[union-attr]
    assert found == {
        "s/run.sh": ("0o755", b"#!/bin/sh\n"),
        "ü.txt": ("0o644", b"text"),
        "long/" + "n" * 200: ("0o644", b"long"),
    }


def _sparse() -> bytes:
    info = tarfile.TarInfo("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(1 << 40),
        "GNU.sparse.name": "sparse",
    }
    return an_archive((info, b"1\n0\n0\n" + bytes(506)))


def _raw_header(kind: bytes, size: bytes, content: bytes = b"") -> bytes:
    header = bytearray(tarfile.TarInfo("first").tobuf())
    header[124:136] = size
    header[156:157] = kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content


HOSTILE_ARCHIVES: dict[str, Callable[[], bytes]] = {
    "parent": lambda: an_archive(member("ok", b"1"), member("../../out", b"1")),
    "parent-inside": lambda: an_archive(member("ok", b"1"), member("a/../../out", b"1")),
    "absolute": lambda: an_archive(member("ok", b"1"), member("/etc/owned", b"1")),
    "drive": lambda: an_archive(member("ok", b"1"), member("C:\\owned", b"1")),
    "drive-slash": lambda: an_archive(member("ok", b"1"), member("C:/owned", b"1")),
    "backslash": lambda: an_archive(member("ok", b"1"), member("..\\owned", b"1")),
    "link-and-file": lambda: an_archive(
        member("ok", b"1"), member("l", type=tarfile.SYMTYPE, linkname="/tmp"), member("l/owned", b"1")
    ),
    "link-inside": lambda: an_archive(member("ok", b"1"), member("l", type=tarfile.SYMTYPE, linkname="ok")),
    "hard-link": lambda: an_archive(member("ok", b"1"), member("h", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "device": lambda: an_archive(member("ok", b"1"), member("d", type=tarfile.CHRTYPE, devmajor=1, devminor=1)),
    "block": lambda: an_archive(member("ok", b"1"), member("d", type=tarfile.BLKTYPE)),
    "fifo": lambda: an_archive(member("ok", b"1"), member("f", type=tarfile.FIFOTYPE)),
    "sparse": lambda: an_archive(member("ok", b"1"))[:1024] + _sparse(),
    "file-and-folder": lambda: an_archive(member("a", b"1"), member("a/b", b"1")),
    "folder-and-file": lambda: an_archive(member("a/b", b"1"), member("./a", b"1")),
    "folder-is-file": lambda: an_archive(member("a", b"1"), member("a", type=tarfile.DIRTYPE)),
    "no-name": lambda: an_archive(member("ok", b"1"), member(".", b"1")),
    "long-name": lambda: an_archive(member("ok", b"1"), member("n" * 300, b"1")),
    "too-deep": lambda: an_archive(member("ok", b"1"), member("d/" * 200 + "f", b"1")),
    "negative-size": lambda: an_archive(member("ok", b"1"))[:1024] + _raw_header(b"0", b"\xff" * 11 + b"\x00"),
    "huge-header": lambda: an_archive(member("ok", b"1"))[:1024] + _raw_header(b"x", b"77777777777\0"),
    "huge-long-name": lambda: an_archive(member("ok", b"1"))[:1024] + _raw_header(b"L", b"77777777777\0"),
    "bad-header": lambda: an_archive(member("ok", b"1"))[:1024] + _raw_header(b"x", b"00000001000\0", b"9" * 512),
    "bad-number": lambda: an_archive((_pax_size("x"), b"1")),
    "cut": lambda: an_archive(member("ok", b"1" * 5000))[:2000],
    "text": lambda: b"not a tar at all " * 100,
    "half-gzip": lambda: gzip.compress(an_archive(member("ok", os.urandom(5000))))[:3000],
    "gzip-of-noise": lambda: gzip.compress(os.urandom(5000)),
}


def _pax_size(size: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("first")
    info.pax_headers = {"size": size}
    return info


async def test_a_hostile_archive_is_refused_before_its_first_byte(server: Served) -> None:
    """A33, R55: whatever is wrong with it, wherever in it: 413 or 422, and the workspace is as it was."""
    base = await opened(server)
    await put(server, base, "kept", b"kept")
    seen = {}
    for name, archive in HOSTILE_ARCHIVES.items():
        answer = await put(server, base, "", archive(), TAR)
        seen[name] = (answer.status_code, tree(server, base))
    assert {name: one for name, one in seen.items() if one not in ((422, ["kept"]), (413, ["kept"]))} == {}
    assert (workspace(server, base) / "kept").read_bytes() == b"kept"
    assert not Path("/etc/owned").exists()
    assert not Path("/tmp/owned").exists()


async def test_an_archive_drops_dangerous_bits(server: Served) -> None:
    """A32: set-uid, set-gid and sticky do not arrive, nor do the names of owners."""
    base = await opened(server)
    await put(server, base, "", an_archive(member("s", b"1", mode=0o7777, uid=0, gid=0, uname="root")), TAR)
    assert await bash(server, base, "stat -c '%a %U' s") == "777 agent\n"


def bomb(size: int) -> bytes:
    """A gzip tar with one file of zeros, made from repeated compressed blocks."""
    header = tarfile.TarInfo("zeros")
    header.size = size
    piece = gzip.compress(bytes(1 << 20), 9)
    return gzip.compress(header.tobuf()) + piece * (size >> 20)


def many(count: int) -> bytes:
    return gzip.compress(tarfile.TarInfo("f").tobuf() * 10_000) * (count // 10_000)


def header_bomb(size: int) -> bytes:
    piece = gzip.compress(bytes(1 << 20), 9)
    return gzip.compress(_raw_header(b"x", b"%011o\0" % size)) + piece * (size >> 20)


def zeros_after(size: int) -> bytes:
    """Small files, and after them a hole: a member whose content is never asked for."""
    header = tarfile.TarInfo("d")
    header.type, header.size = tarfile.DIRTYPE, size
    return gzip.compress(header.tobuf()) + gzip.compress(bytes(1 << 20), 9) * (size >> 20)


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(lambda: bomb(10 << 30), id="content"),
        pytest.param(lambda: header_bomb(10 << 30), id="header"),
        pytest.param(lambda: zeros_after(10 << 30), id="folder"),
        pytest.param(lambda: many(1_000_000), id="members", marks=pytest.mark.slow),
    ],
)
async def test_an_archive_bomb_stops_at_its_cap(server: Served, archive: Callable[[], bytes]) -> None:
    """A34: 10 MB that unpack to 10 GB, in a file, in a header or as 1 M members: refused soon, with little memory and
    no disk; others are served meanwhile."""
    base, body = await opened(server), archive()
    assert len(body) < 16 << 20
    slowest = 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            started = time.monotonic()
            await server.anonymous.get("/healthz")
            slowest = max(slowest, time.monotonic() - started)
            await anyio.sleep(0.05)

    before, started = _resident(), time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        answer = await put(server, base, "", body, TAR)
        tasks.cancel_scope.cancel()
    assert (answer.status_code, answer.json()["code"]) == (413, "content_too_large")
    assert time.monotonic() - started < 15  # 5 s on a machine of its own
    assert _resident() - before < 300 << 20
    assert slowest < 5
    assert tree(server, base) == []


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_special_files_answer_at_once(server: Served) -> None:
    """A27, A28: links, FIFO, socket and folders that look like files: listed as what they are, never opened."""
    base = await opened(server)
    await python(
        server,
        base,
        "import os, socket\n"
        "os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')\n"
        "os.symlink('/etc/passwd', 'absolute'); os.symlink('../../../etc/passwd', 'relative')\n"
        "os.symlink('absolute', 'chained'); os.symlink('/', 'root'); os.symlink('loop', 'loop')\n"
        "os.symlink('/dev/zero', 'zero'); os.symlink('nothing', 'dangling')\n"
        "os.symlink('/proc/self/environ', 'env')\n"
        "open('plain', 'w').write('plain'); os.symlink('plain', 'inside')",
    )
    names = ("fifo", "socket", "absolute", "relative", "chained", "root", "loop", "zero", "dangling", "env", "inside")
    started = time.monotonic()
    answers = {name: await server.agent.get(f"{base}/files/{name}") for name in names}
    through = await server.agent.get(f"{base}/files/root/etc/passwd")
    archive = await server.agent.get(f"{base}/files", headers={"accept": TAR})
    assert time.monotonic() - started < 10
    assert {answer.json()["code"] for answer in answers.values()} == {"invalid_path"}
    assert through.status_code in (404, 422)
    listing = (await server.agent.get(f"{base}/files")).json()["entries"]
    assert {one["path"]: one["kind"] for one in listing} == {
        **dict.fromkeys(names, "symlink"),
        "fifo": "other",
        "socket": "other",
        "plain": "file",
    }
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert tar.getnames() == ["plain"]


async def test_a_write_over_a_link_replaces_the_link(server: Served) -> None:
    """A37: its target, also one inside, stays as it is."""
    base = await opened(server)
    await bash(server, base, "echo target > target; ln -s target link; ln -s /etc/passwd out")
    codes = [(await put(server, base, name, b"new")).status_code for name in ("link", "out")]
    assert codes == [201, 201]
    now = await bash(server, base, "cat target; cat link out; test -L link || echo replaced")
    assert now == "target\nnewnewreplaced\n"


async def test_a_write_below_a_link_is_refused(server: Served) -> None:
    """A37: `out` leads to /tmp; neither a file nor an archive goes through it, and nothing is written there."""
    base = await opened(server)
    await bash(server, base, "ln -s /tmp out; mkdir real; ln -s real near")
    answers = [
        await put(server, base, "out/x", b"1"),
        await put(server, base, "near/x", b"1"),
        await put(server, base, "out", an_archive(member("x", b"1")), TAR),
        await put(server, base, "", an_archive(member("near/x", b"1")), TAR),
        await server.agent.delete(f"{base}/files/near/x"),
        await server.agent.delete(f"{base}/files/out/x"),
    ]
    assert [one.status_code for one in answers] == [422] * 6
    assert await bash(server, base, "ls real; ls /tmp | grep -c x; true") == "0\n"


async def test_removing_a_link_leaves_its_target(server: Served) -> None:
    """A37: also with `recursive`, and inside a folder that is removed."""
    base = await opened(server)
    await bash(server, base, "mkdir real d; echo 1 > real/x; ln -s ../real d/l; ln -s real l; ln -s /tmp t")
    codes = [(await server.agent.delete(f"{base}/files/{name}?recursive=true")).status_code for name in "ldt"]
    assert codes == [204, 204, 204]
    assert await bash(server, base, "cat real/x; ls") == "1\nreal\n"


async def test_set_uid_bits_do_not_come_out(server: Served) -> None:
    """A32: they are shown in the listing, and dropped in the archive."""
    base = await opened(server)
    await bash(server, base, "echo x > s; chmod 4777 s")
    archive = await server.agent.get(f"{base}/files", headers={"accept": TAR})
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert [(one.name, oct(one.mode)) for one in tar] == [("s", "0o777")]


async def test_a_huge_sparse_file_is_cheap(state_dir: Path) -> None:
    """A18: 1 TB of holes is listed with its size, refused in an archive, and read as a stream, not into memory."""
    big = {"default": {"limits": {"workspace_size": 2 << 40}}}
    async with served(state_dir, profiles=big) as server:
        base = await opened(server)
        await bash(server, base, "truncate -s 1T hole")
        listing = (await server.agent.get(f"{base}/files")).json()["entries"]
        archive = await server.agent.get(f"{base}/files", headers={"accept": TAR})
        before, got = _resident(), 0
        async with server.agent.stream("GET", f"{base}/files/hole") as stream:
            async for chunk in stream.aiter_bytes():
                got += len(chunk)
                if got > 64 << 20:
                    break
        assert (await server.agent.get(f"{base}/files/nothing")).status_code == 404
    assert [one["size"] for one in listing] == [1 << 40]
    assert (archive.status_code, archive.json()["code"]) == (413, "content_too_large")
    assert _resident() - before < 100 << 20


async def test_a_large_upload_is_streamed(server: Served) -> None:
    """R58, F77: 300 MB go through with a memory that does not grow with them."""
    base, piece, before = await opened(server), os.urandom(1 << 20), _resident()
    peak = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal peak
        for _ in range(300):
            yield piece
            peak = max(peak, _resident() - before)

    answer = await put(server, base, "large", pieces())
    assert answer.json() == {"files": 1, "bytes": 300 << 20}
    assert peak < 64 << 20
    assert (workspace(server, base) / "large").stat().st_size == 300 << 20


async def test_an_upload_broken_off_leaves_no_file(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """R58: half of a file, of a chunked file and of an archive: nothing new, the old content stays, no error is logged
    as ours."""
    base = await opened(server)
    await put(server, base, "old", b"old")
    token = server.agent.headers["authorization"]
    for path, extra in (("new", ""), ("old", ""), ("", f"Content-Type: {TAR}\r\n")):
        for length in ("Content-Length: 1000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n10000\r\n"):
            start = f"PUT {base}/files/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n{extra}{length}"
            async with await anyio.connect_tcp("127.0.0.1", urlsplit(server.url).port or 80) as stream:
                await stream.send(start.encode() + b"x" * 50_000)
                await anyio.sleep(0.2)
    with anyio.fail_after(5):
        while tree(server, base) != ["old"]:
            await anyio.sleep(0.05)
    assert (await server.agent.get(f"{base}/files/old")).content == b"old"
    assert await bash(server, base, "ls -A") == "old\n"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_file_over_the_upload_limit_leaves_nothing(state_dir: Path) -> None:
    """A56, R58: refused by its announced length, and when it turns out longer while it comes."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100_000)

    async with served(state_dir, server={"upload": 1_000_000}) as server:
        base = await opened(server)
        announced = await put(server, base, "a", bytes(1_000_001))
        counted = await put(server, base, "b", pieces())
        archive = await put(server, base, "", pieces(), TAR)
        assert [one.status_code for one in (announced, counted, archive)] == [413, 413, 413]
        with anyio.fail_after(5):
            while tree(server, base):
                await anyio.sleep(0.05)
        exact = await put(server, base, "c", bytes(1_000_000))
        assert exact.status_code == 201


async def test_a_file_over_the_workspace_limit_leaves_nothing(server: Served) -> None:
    """A16: what the kernel refuses inside is told as a full disk, and no part of it stays."""
    base = await opened(server, limits={"workspace_size": 1 << 20})
    answer = await put(server, base, "large", bytes(2 << 20))
    assert (answer.status_code, answer.json()["code"]) == (422, "disk_full")
    assert tree(server, base) == []


async def test_a_reader_that_goes_away_holds_nothing(server: Served) -> None:
    """A26: twenty downloads given up in the middle leave no descriptor open, and the session usable."""
    base = await opened(server)
    await bash(server, base, "truncate -s 400M hole")
    await server.agent.get(f"{base}/files")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        async with (
            server.client(server.agent.headers["authorization"].removeprefix("Bearer ")) as client,
            client.stream("GET", f"{base}/files/hole") as stream,
        ):
            await anext(stream.aiter_bytes())
    with anyio.fail_after(10):
        while len(os.listdir("/proc/self/fd")) > before + 10:
            await anyio.sleep(0.05)
    assert await bash(server, base, "echo usable") == "usable\n"


async def test_files_come_and_go_beside_each_other(server: Served) -> None:
    """Twenty uploads and downloads at once do not mix."""
    base = await opened(server)

    async def one(number: int) -> None:
        content = bytes([number]) * 200_000
        assert (await put(server, base, f"f{number}", content)).status_code == 201
        assert (await server.agent.get(f"{base}/files/f{number}")).content == content

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(one, number)


@pytest.mark.slow
async def test_a_folder_with_too_many_entries_says_so(server: Served) -> None:
    """A17: a flood of files is listed up to a bound, marked incomplete, and soon."""
    base = await opened(server)
    await python(server, base, "for n in range(10_050): open(f'f{n:06}', 'w').close()")
    started = time.monotonic()
    listing = (await server.agent.get(f"{base}/files")).json()
    assert (len(listing["entries"]), listing["complete"]) == (10_000, False)
    assert time.monotonic() - started < 10
