"""What a workspace starts with and what is taken from it at the end, with hostile workspaces and broken targets."""

import base64
import hashlib
import json
import os
import sqlite3
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from gateway.gateway import Gateway
from gateway.models import CloseReport
from gateway.sessions import Session
from gateway.workspace_hooks import collect
from sandboxes import FileRefused, SandboxContext, SandboxHook
from sandboxes.direct import DirectSandbox
from tests.gateway.conftest import Served, called, opened, running, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def files_of(manifest: dict[str, Any]) -> dict[str, str]:
    return {one["path"]: one["sha256"] for one in manifest["files"]}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def into(folder: Path, match: str = "**", **more: Any) -> dict[str, Any]:
    """Profiles with one that collects into a folder."""
    return {"default": {"collect": ({"match": match, "to": str(folder)},), **more}}


async def closed(gateway: Gateway, session: Session) -> CloseReport:
    return await gateway.close_session(session)


async def ran(gateway: Gateway, session: Session, command: str) -> str:
    result = await called(gateway, session, "bash", command=command)
    assert result.status == "ok", result
    return result.text


async def python(gateway: Gateway, session: Session, code: str) -> None:
    result = await called(gateway, session, "python", code=code)
    assert result.status == "ok", result


def left_of(state_dir: Path) -> list[str]:
    """Workspaces of sessions that are there; a probe may be under way."""
    return sorted(path.name for path in state_dir.glob("workspaces/*") if path.name != "_probe")


def states(state_dir: Path) -> list[tuple[str, int]]:
    """Each session of the journal: its state, and whether its end is noted."""
    with sqlite3.connect(state_dir / "sandgate.db") as database:
        found = database.execute("SELECT state, ended IS NOT NULL FROM sessions ORDER BY created").fetchall()
    database.close()
    return found


# seeds


async def test_inline_files_are_there_at_the_start(server: Served) -> None:
    """Text, bytes, folders and modes of a request's own seed."""
    seed = [
        {"path": "a.txt", "text": "grüße\n"},
        {"path": "d/b.bin", "base64": base64.b64encode(b"\0\xff").decode()},
        {"path": "run", "text": "#!/bin/sh\necho ran\n", "mode": 0o755},
    ]
    session = await server.session(seed=seed)
    result = await server.call(session, "bash", command="cat a.txt; ./run; od -An -tx1 d/b.bin; stat -c %a run a.txt")
    assert result["content"][0]["text"] == "grüße\nran\n 00 ff\n755\n644\n"


@pytest.mark.parametrize(("kind", "mode"), [("folder", ""), ("tar", "w"), ("tar.gz", "w:gz"), ("file", "")])
async def test_a_profile_seeds_from_the_host(tmp_path: Path, state_dir: Path, kind: str, mode: str) -> None:
    """A32: a folder, a tar or a file of the operator's, below `to`; set-uid bits are dropped, links left out."""
    folder = tmp_path / "seed"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f.txt").write_text("from the host\n")
    (folder / "sub" / "f.txt").chmod(0o4755)
    source = folder
    if kind == "folder":
        (folder / "link").symlink_to("/etc/passwd")
        os.mkfifo(folder / "fifo")
    elif kind == "file":
        source = folder / "sub" / "f.txt"
    else:
        source = tmp_path / f"seed.{kind}"
        with tarfile.open(source, mode) as tar:  # type: ignore[call-overload]
            tar.add(folder / "sub", "sub")
    to = "in/sub/f.txt" if kind == "file" else "in"
    async with running(
        state_dir,
        tmp_path,
        profiles={"default": {"seed": ({"from": source.name if kind != "file" else "seed/sub/f.txt", "to": to},)}},
    ) as gateway:
        session = await opened(gateway)
        assert (
            await ran(gateway, session, "find in -type f -o -type l; cat in/sub/f.txt; stat -c %a in/sub/f.txt")
            == "in/sub/f.txt\nfrom the host\n755"
        )


class BrokenSeed(SandboxHook):
    """Writes, starts something, and fails."""

    async def on_create(self, ctx: SandboxContext) -> None:
        await ctx.sandbox.write("half", b"half")
        process = await ctx.sandbox.start(["sleep", "4711.5"])
        assert process is not None
        raise RuntimeError("the seed broke")


@pytest.mark.parametrize(
    "seed",
    [
        [{"path": "ok", "text": "1"}, {"path": "../out", "text": "1"}],
        [{"path": "ok", "text": "1"}, {"path": "/etc/x", "text": ""}],
        [{"path": "a", "text": "1"}, {"path": "a/b", "text": "1"}],
        [{"path": "a", "text": "1", "base64": "MQ=="}],
        [{"path": "a", "base64": "***"}],
        [{"path": "a"}],
        [{"path": "big", "text": "x" * 3_000_000}],
    ],
)
async def test_a_seed_that_fails_opens_nothing(server: Served, seed: list[dict[str, Any]]) -> None:
    """A37, A33: no session, no workspace, no sandbox, and the journal has no open one; the next session is fine."""
    before = server.gateway.places.taken
    answer = await server.agent.post("/v1/sessions", json={"seed": seed, "limits": {"workspace_size": 1 << 20}})
    assert answer.status_code == 422
    assert (await server.agent.get("/v1/sessions")).json() == {"sessions": []}
    assert (left_of(server.state_dir), server.gateway.places.taken) == ([], before)
    assert {state for state, _ in states(server.state_dir)} <= {"closed"}
    assert (await server.session(seed=[{"path": "a", "text": "1"}]))["session"]["state"] == "open"


async def test_a_missing_seed_folder_opens_nothing(tmp_path: Path, state_dir: Path) -> None:
    """The operator's mistake is told with a status that says so; nothing is half-created."""
    (tmp_path / "nowhere").mkdir()
    async with served(state_dir, tmp_path, profiles={"default": {"seed": ({"from": "nowhere"},)}}) as server:
        (tmp_path / "nowhere").rmdir()  # at the start it was there
        answer = await server.agent.post("/v1/sessions", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "sandbox_hook_failed")
        assert (left_of(state_dir), server.gateway.places.taken) == ([], 0)
    assert states(state_dir) == [("closed", 1)]


async def test_a_hook_that_breaks_undoes_those_before_it(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """design 3: hooks that had created are undone, no process and no workspace is left."""
    undone: list[str] = []

    class First(SandboxHook):
        async def on_destroy(self, ctx: SandboxContext) -> None:
            undone.append("first")

    async with running(state_dir) as gateway:
        profile_session = gateway.profiles.session

        def with_hooks(*arguments: Any) -> Session:
            session = profile_session(*arguments)
            session.sandbox_hooks = (First(), BrokenSeed())
            return session

        monkeypatch.setattr(gateway.profiles, "session", with_hooks)
        with pytest.raises(Exception, match="the seed broke"):
            await opened(gateway)
        assert (undone, left_of(state_dir), gateway.places.taken) == (["first"], [], 0)
        assert [one for one in psutil.process_iter(["cmdline"]) if "4711.5" in (one.info["cmdline"] or [])] == []
    assert states(state_dir) == [("closed", 1)]


async def test_a_restored_workspace_is_not_seeded_again(state_dir: Path) -> None:
    """design 5: after a restart what the agent made of a seeded file stays."""
    async with served(state_dir) as server:
        session = await server.session(seed=[{"path": "a", "text": "seed"}])
        await server.call(session, "bash", command="echo -n changed > a")
    async with served(state_dir) as server:
        again = await server.call(session, "bash", command="cat a")
    assert again["content"][0]["text"] == "changed"


# collecting


async def test_what_matches_is_collected_into_a_folder(tmp_path: Path, state_dir: Path) -> None:
    """The exact bytes, a manifest with digests, complete; the workspace is gone."""
    async with running(state_dir, profiles=into(tmp_path / "out", "out/**")) as gateway:
        session = await opened(gateway)
        await ran(
            gateway,
            session,
            "mkdir -p out/d; echo one > out/1.txt; head -c 300000 /dev/zero > out/d/z; "
            "echo no > not; chmod 4755 out/1.txt",
        )
        report = await closed(gateway, session)
        folder = tmp_path / "out" / session.id
        manifest = manifest_of(folder)
        assert report.failed == ()
        assert [(one.files, one.bytes, one.complete) for one in report.collected] == [(2, 300_004, True)]
        assert files_of(manifest) == {"out/1.txt": sha256(b"one\n"), "out/d/z": sha256(bytes(300_000))}
        assert [one["mode"] for one in manifest["files"]] == ["0o755", "0o644"]
        for one in manifest["files"]:
            content = (folder / one["key"]).read_bytes()
            assert (sha256(content), len(content)) == (one["sha256"], one["bytes"])
            assert (folder / one["key"]).stat().st_mode & 0o7777 == 0o600
        assert (manifest["complete"], manifest["skipped"], left_of(state_dir)) == (True, [], [])


async def test_a_file_uri_is_a_target(tmp_path: Path, state_dir: Path) -> None:
    """A URI, as the operator would write it."""
    profiles = {"default": {"collect": ({"match": "*", "to": f"file://{tmp_path}/out"},)}}
    async with running(state_dir, profiles=profiles) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
        report = await closed(gateway, session)
    assert report.collected[0].manifest == f"file://{tmp_path}/out/{session.id}/manifest.json"
    assert files_of(manifest_of(tmp_path / "out" / session.id)) == {"f": sha256(b"one\n")}


async def test_a_session_collects_to_its_own_results(server: Served) -> None:
    """design 7: globs of the request's own; read with the session's token after closing, listed with their digests."""
    session = await server.session(collect=["out/*", "*.log"])
    await server.call(
        session, "bash", command="mkdir out; seq 50000 > out/seq; echo log > a.log; echo 'a b' > 'out/a b'"
    )
    report = (await server.agent.delete(f"/v1/sessions/{session['id']}")).json()
    told = [(one["files"], one["complete"], one["error"]) for one in report["collected"]]
    assert told == [(3, True, None)]
    async with server.client(session["token"]) as owner:
        listed = (await owner.get(f"/v1/sessions/{session['id']}/results")).json()["results"]
        contents = {}
        for one in listed:
            answer = await owner.get(one["reference"].replace("sandgate://", "/v1/sessions/"))
            assert (answer.status_code, sha256(answer.content)) == (200, one["sha256"])
            contents[one["reference"]] = answer.content
    manifest = json.loads(contents[report["collected"][0]["manifest"]])
    prefix = f"sandgate://{session['id']}/results/collected"
    assert {one["path"]: contents[f"{prefix}/{one['key']}"] for one in manifest["files"]} == {
        "out/seq": b"".join(b"%d\n" % number for number in range(1, 50_001)),
        "out/a b": b"a b\n",
        "a.log": b"log\n",
    }


async def test_hostile_workspaces_are_collected_safely(tmp_path: Path, state_dir: Path) -> None:
    """A27, A28, K09: links, FIFO, socket and closed files are left out and named, nothing of the host comes along, and
    it does not take long."""
    (tmp_path / "canary").write_text("canary of the host")
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await python(
            gateway,
            session,
            "import os, socket\n"
            f"os.symlink('/etc/passwd', 'absolute'); os.symlink({str(tmp_path / 'canary')!r}, 'host')\n"
            "os.symlink('absolute', 'chained'); os.symlink('/', 'root'); os.symlink('loop', 'loop')\n"
            "os.symlink('plain', 'inside'); os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket')\n"
            "open('plain', 'w').write('plain')\n"
            "open('closed', 'w').write('x'); os.chmod('closed', 0); os.mkdir('shut'); os.chmod('shut', 0)",
        )
        started = time.monotonic()
        report = await closed(gateway, session)
    assert time.monotonic() - started < 15
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert files_of(manifest) == {"plain": sha256(b"plain")}
    skipped = {one["path"] for one in manifest["skipped"]}
    assert skipped == {"absolute", "host", "chained", "root", "loop", "inside", "fifo", "socket", "closed", "*"}
    assert (manifest["complete"], report.collected[0].complete, report.failed) == (False, False, ())
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"canary of the host" not in everything
    assert b"root:x:0" not in everything


async def test_a_huge_sparse_file_is_skipped_by_size(tmp_path: Path, state_dir: Path) -> None:
    """A18: 1 TB of holes: not read, named, and the rest is taken."""
    async with running(state_dir, profiles=into(tmp_path / "out", limits={"workspace_size": 2 << 40})) as gateway:
        session = await opened(gateway, limits={"workspace_size": 1 << 40})
        await ran(gateway, session, "truncate -s 1000G a-hole; truncate -s 1000G b-hole; echo one > c")
        session.sandbox_hooks[0]._max_bytes = 1 << 20  # type: ignore[attr-defined]
        started = time.monotonic()
        await closed(gateway, session)
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert time.monotonic() - started < 5
    assert files_of(manifest) == {"c": sha256(b"one\n")}
    assert [(one["path"], one["reason"].partition(":")[0]) for one in manifest["skipped"]] == [
        ("a-hole", "too large"),
        ("b-hole", "too large"),
    ]


Read = Callable[..., AsyncIterator[bytes]]
ReadMany = Callable[..., AsyncIterator[bytes | FileRefused]]


def before_each_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Pause the collector between its listing and each read."""
    read: Read = DirectSandbox.read
    read_many: ReadMany = DirectSandbox.read_many

    async def paused(self: DirectSandbox, path: str, *arguments: Any, **more: Any) -> AsyncIterator[bytes]:
        await act(path)
        async for chunk in read(self, path, *arguments, **more):
            yield chunk

    async def all_paused(
        self: DirectSandbox, paths: Sequence[str], max_bytes: int
    ) -> AsyncIterator[bytes | FileRefused]:
        for path in paths:
            await act(path)
            async for content in read_many(self, [path], max_bytes):
                yield content

    monkeypatch.setattr(DirectSandbox, "read", paused)
    monkeypatch.setattr(DirectSandbox, "read_many", all_paused)


@pytest.mark.parametrize(
    ("swap", "reason"),
    [
        ("f.symlink_to('/etc/passwd')", "invalid path"),
        ("f.symlink_to('other')", "invalid path"),
        ("os.mkfifo(f)", "invalid path"),
        ("f.mkdir()", "invalid path"),
        ("None", "missing file"),
        ("f.write_bytes(b'x' * 100)", "changed while it was read"),
        ("f.write_bytes(b'')", None),
    ],
)
async def test_a_swap_between_list_and_read_takes_nothing_else(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, swap: str, reason: str | None
) -> None:
    """A29: a file replaced after it was listed is left out (or is what it is now), never followed, never waited for."""
    async with running(state_dir, profiles=into(tmp_path / "out", "f")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo old > f; echo canary > other")
        place = state_dir / "workspaces" / session.id / "workspace" / "f"

        async def act(path: str) -> None:
            if path == "f":
                place.unlink()
                eval(swap, {"f": place, "os": os})

        before_each_read(monkeypatch, act)
        with anyio.fail_after(15):
            await closed(gateway, session)
    manifest = manifest_of(tmp_path / "out" / session.id)
    if reason is None:
        assert files_of(manifest) == {"f": sha256(b"")}
        return
    assert files_of(manifest) == {}
    assert [one["path"] for one in manifest["skipped"]] == ["f"]
    assert reason in manifest["skipped"][0]["reason"]
    assert not list((tmp_path / "out" / session.id).glob("files/*"))


async def test_a_program_that_swaps_all_the_time_gets_nothing_out(tmp_path: Path, state_dir: Path) -> None:
    """A29: links and files exchanged in a loop by a process inside, while collecting runs (the close ends the call
    first; a process that survived it would be seen here)."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        code = (
            "import os\nopen('a', 'w').write('plain')\nos.symlink('/etc/passwd', 'b')\n"
            "while True:\n  os.rename('a', 'c'); os.rename('b', 'a'); os.rename('c', 'b')"
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(called_quietly, gateway, session, code)
            await anyio.sleep(0.5)
            await closed(gateway, session)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert b"root:x:0" not in everything


async def called_quietly(gateway: Gateway, session: Session, code: str) -> None:
    await called(gateway, session, "python", code=code)


NAMES = [
    b"new\nline",
    b"-rf",
    b"a 'b' \"c\"",
    b"$(touch owned)",
    b"\xff\xfe",
    "bidi \u202e".encode(),
    "\u00e9".encode(),
    b"\x1b[31m",
    b"CON",
    b"n" * 255,
    b"manifest.json",
    b"back\\slash",
    b"*",
    b"\xed\xa0\x80",
    b"%2e%2e",
    b"...",
]


async def test_hostile_names_are_collected_exactly(tmp_path: Path, state_dir: Path) -> None:
    """A30: the manifest is valid JSON and maps a safe key to each exact name; no name is a path on the host."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await python(gateway, session, f"import os\nfor name in {NAMES!r}: open(name, 'wb').write(name)")
        await closed(gateway, session)
    folder = tmp_path / "out" / session.id
    manifest = manifest_of(folder)
    exact = {
        base64.b64decode(one["path_base64"]) if one["path_base64"] else one["path"].encode(): one
        for one in manifest["files"]
    }
    assert set(exact) == set(NAMES)
    assert {name: (folder / one["key"]).read_bytes() for name, one in exact.items()} == {name: name for name in NAMES}
    assert manifest["complete"]
    assert not set("".join(one["path"] for one in manifest["files"])) & set("\n\x1b\u202e")


async def test_a_deep_workspace_is_collected_or_marked(tmp_path: Path, state_dir: Path) -> None:
    """A31: depth 100 comes whole; depth 1,000 is bounded, and said to be incomplete."""
    for depth, whole in ((100, True), (1000, False)):
        async with running(state_dir / str(depth), profiles=into(tmp_path / "out")) as gateway:
            session = await opened(gateway)
            await python(
                gateway,
                session,
                f"import os\nfor _ in range({depth}): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').write('deep')",
            )
            started = time.monotonic()
            report = await closed(gateway, session)
            assert time.monotonic() - started < 10
            assert (report.failed, report.collected[0].complete) == ((), whole)
            assert len(manifest_of(tmp_path / "out" / session.id)["files"]) == whole
            assert left_of(state_dir / str(depth)) == []


async def test_a_collection_out_of_time_has_a_manifest(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A31: what was taken until then is whole and listed; the rest is said to be left out."""
    monkeypatch.setattr(collect, "COLLECT_SECONDS", 1.0)

    async def act(path: str) -> None:
        await anyio.sleep(0.1)

    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "for n in $(seq 100 200); do echo one > $n; done")
        before_each_read(monkeypatch, act)
        report = await closed(gateway, session)
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert (report.failed, report.collected[0].complete, manifest["complete"]) == ((), False, False)
    assert 0 < len(manifest["files"]) < 50
    assert set(files_of(manifest).values()) == {sha256(b"one\n")}
    assert "over 1 s" in manifest["skipped"][0]["reason"]


@pytest.mark.slow
async def test_ten_thousand_small_files_are_collected_in_time(tmp_path: Path, state_dir: Path) -> None:
    """A31, R59: within the caps and in time, or incomplete and said so."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await python(gateway, session, "for n in range(10_000): open(f'f{n}', 'w').write(str(n))")
        started = time.monotonic()
        report = await closed(gateway, session)
    seconds = time.monotonic() - started
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert (len(manifest["files"]) == 10_000) == report.collected[0].complete == manifest["complete"]
    assert (report.failed, seconds < 60) == ((), True)  # 3 s on a machine of its own


async def test_over_the_caps_is_incomplete_and_named(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A31: too many files, and more bytes than the workspace may have."""
    monkeypatch.setattr(collect, "MAX_FILES", 3)
    async with running(state_dir, profiles=into(tmp_path / "out", limits={"workspace_size": 10_000})) as gateway:
        session = await opened(gateway)
        await ran(
            gateway,
            session,
            "for n in 1 2; do head -c 4000 /dev/zero > $n; done; head -c 4000 /dev/zero > 3; "
            "echo > 4; echo > 5; echo > 6",
        )
        report = await closed(gateway, session)
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert sorted(files_of(manifest)) == ["1", "2", "4"]
    assert [(one["path"], one["reason"].partition(" ")[0]) for one in manifest["skipped"]] == [
        ("3", "too"),
        ("5", "over"),
        ("6", "over"),
    ]
    assert (manifest["complete"], report.collected[0].complete) == (False, False)


async def test_a_target_that_fails_is_told_and_removal_goes_on(tmp_path: Path, state_dir: Path) -> None:
    """design 3: the other collection is made, the close answers with what failed, the workspace is gone."""
    (tmp_path / "blocked").write_text("a file, not a folder")
    targets = ("blocked", "out")
    profiles = {"default": {"collect": tuple({"match": "*", "to": str(tmp_path / one)} for one in targets)}}
    async with served(state_dir, profiles=profiles) as server:
        session = await server.session()
        await server.call(session, "bash", command="echo one > f")
        answer = await server.agent.delete(f"/v1/sessions/{session['id']}")
        again = await server.agent.delete(f"/v1/sessions/{session['id']}")
        assert (answer.status_code, again.json()) == (200, answer.json())
        assert left_of(state_dir) == []
    report = answer.json()
    assert len(report["failed"]) == 1
    assert [(one["to"], one["complete"], one["error"] is None) for one in report["collected"]] == [
        (str(tmp_path / "blocked"), False, False),
        (str(tmp_path / "out"), True, True),
    ]
    assert files_of(manifest_of(tmp_path / "out" / session["id"])) == {"f": sha256(b"one\n")}


async def test_collecting_goes_on_after_the_sandbox_died(tmp_path: Path, state_dir: Path) -> None:
    """design 5: from a fresh sandbox over the same workspace."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
        await (await session.sandbox()).aclose()
        report = await closed(gateway, session)
        assert (report.failed, report.collected[0].complete) == ((), True)
        assert (left_of(state_dir), gateway.places.taken) == ([], 0)
    assert files_of(manifest_of(tmp_path / "out" / session.id)) == {"f": sha256(b"one\n")}


async def test_a_workspace_that_is_gone_is_told(tmp_path: Path, state_dir: Path) -> None:
    """design 5: with no workspace the manifest says that it is not complete, and why."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
        await (await session.sandbox()).aclose()
        await session.kind.destroy(session.id)
        report = await closed(gateway, session)
    manifest = manifest_of(tmp_path / "out" / session.id)
    assert (manifest["complete"], report.collected[0].complete, manifest["files"]) == (False, False, [])
    assert "workspace" in manifest["skipped"][0]["reason"]


async def test_collecting_after_a_restart(tmp_path: Path, state_dir: Path) -> None:
    """design 5, R39: a session that no call has touched since."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        report = await closed(gateway, next(iter(gateway.sessions)))
        assert (report.failed, report.collected[0].complete, left_of(state_dir)) == ((), True, [])
    assert files_of(manifest_of(tmp_path / "out" / session.id)) == {"f": sha256(b"one\n")}


@pytest.mark.parametrize("limits", [{"idle_seconds": 2}, {"lifetime_seconds": 4}])
async def test_expiry_collects(tmp_path: Path, state_dir: Path, limits: dict[str, Any]) -> None:
    """R37, design 5: idle time and lifetime end a session like a close does."""
    async with running(state_dir, profiles=into(tmp_path / "out", **limits)) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
        with anyio.fail_after(30):
            await session.closed.wait()
        report = session.close_report
        assert report is not None
        assert (session.state, report.state, report.failed, left_of(state_dir)) == ("expired", "expired", (), [])
    assert files_of(manifest_of(tmp_path / "out" / session.id)) == {"f": sha256(b"one\n")}
    assert states(state_dir) == [("expired", 1)]


async def test_closing_twice_at_once_collects_once(tmp_path: Path, state_dir: Path) -> None:
    """A62: the same report for both, and nothing is stored twice."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "for n in $(seq 200); do echo $n > f$n; done")
        reports: list[CloseReport] = []

        async def close() -> None:
            reports.append(await closed(gateway, session))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(close)
    assert len({id(one) for one in reports}) == 1
    assert (reports[0].failed, reports[0].collected[0].files) == ((), 200)


async def test_closing_cancels_what_runs_and_keeps_what_it_wrote(tmp_path: Path, state_dir: Path) -> None:
    """The call ends `cancelled`, then its files are taken."""
    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        statuses: list[str] = []

        async def work() -> None:
            statuses.append((await called(gateway, session, "bash", command="echo one > f; sleep 60")).status)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            file = state_dir / "workspaces" / session.id / "workspace" / "f"
            with anyio.fail_after(10):
                while not (file.exists() and file.stat().st_size):
                    await anyio.sleep(0.01)
            report = await closed(gateway, session)
    assert (statuses, report.collected[0].complete) == (["cancelled"], True)
    assert files_of(manifest_of(tmp_path / "out" / session.id)) == {"f": sha256(b"one\n")}


async def test_collecting_that_takes_too_long_is_given_up(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """design 3: told in the answer, and the removal goes on."""
    monkeypatch.setattr("gateway.sessions.CLOSE_SECONDS", 0.5)

    async def act(path: str) -> None:
        await anyio.sleep_forever()

    async with running(state_dir, profiles=into(tmp_path / "out")) as gateway:
        session = await opened(gateway)
        await ran(gateway, session, "echo one > f")
        before_each_read(monkeypatch, act)
        with anyio.fail_after(15):
            report = await closed(gateway, session)
        assert left_of(state_dir) == []
    assert any("given up" in one for one in report.failed)
    assert [one.complete for one in report.collected] == [False]


async def test_several_globs_to_one_place_are_one_collection(state_dir: Path, tmp_path: Path) -> None:
    """Two rules of one target have one manifest."""
    rules = tuple({"match": match, "to": str(tmp_path / "out")} for match in ("a*", "b*"))
    async with served(state_dir, profiles={"default": {"collect": rules}}) as server:
        session = await server.session()
        await server.call(session, "bash", command="touch a1 b1 c1")
        report = (await server.agent.delete(f"/v1/sessions/{session['id']}")).json()
    assert [(one["files"], one["complete"]) for one in report["collected"]] == [(2, True)]
    manifest = json.loads((tmp_path / "out" / session["id"] / "manifest.json").read_text())
    assert [one["path"] for one in manifest["files"]] == ["a1", "b1"]
