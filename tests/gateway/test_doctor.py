"""Doctor: what it finds, what it calls broken, and that looking leaves nothing behind."""

import fcntl
import json
import os
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import fsspec
import pytest

from gateway.doctor import examine, held, remedy_of_gap
from sandboxes import Probe, Sandbox, SandboxKind, SandboxSpec
from tests.gateway.commandline import sandgate
from tests.gateway.conftest import settings_of

pytestmark = pytest.mark.anyio


class Broken(SandboxKind):
    """A stranger's kind that works nowhere."""

    name = "broken"

    def __init__(self, state_dir: Path, *, instance: str) -> None:
        super().__init__()

    async def _probe(self) -> Probe:
        return Probe(self.name, works=False, reason="it is broken", remedy="mend it")

    async def _build(self, spec: SandboxSpec, undo: AsyncExitStack) -> Sandbox:
        raise NotImplementedError

    async def _remove(self, session_id: str) -> None:
        """Nothing was made."""


BROKEN = f"{__name__}:Broken"


@pytest.mark.needs("local")
def test_doctor_finds_that_everything_works_and_leaves_nothing(tmp_path: Path) -> None:
    done = sandgate("doctor", "--json", "--port", "0", cwd=tmp_path, SANDGATE_STATE_DIR=str(tmp_path / "a" / "state"))
    report = json.loads(done.stdout)
    assert (done.returncode, report["works"]) == (0, True)
    assert {one["name"] for one in report["checks"]} >= {
        "python",
        "platform",
        "user",
        "packages",
        "bubblewrap",
        "user namespaces",
        "kind local",
        "kind virtual",
        "control groups",
        "store",
        "state folder",
        "port",
    }
    assert [one for one in report["checks"] if one["verdict"] == "weak" and not one["remedy"]] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("local")
def test_doctor_shows_a_table(tmp_path: Path) -> None:
    done = sandgate("doctor", "--port", "0", cwd=tmp_path, SANDGATE_STATE_DIR=str(tmp_path / "state"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "kind local" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("works here")


def test_doctor_ends_with_1_where_a_needed_kind_does_not_work(tmp_path: Path) -> None:
    (tmp_path / "sandgate.toml").write_text(f"[profiles.default]\nkind = '{BROKEN}'\n")
    done = sandgate(
        "doctor",
        "--port",
        "0",
        cwd=tmp_path,
        SANDGATE_STATE_DIR=str(tmp_path / "state"),
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    assert done.returncode == 1
    assert "it is broken" in done.stdout
    assert "-> mend it" in done.stdout
    assert f"does not work here: kind {BROKEN}" in done.stdout


async def test_a_taken_port_is_broken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = settings_of(server={"port": taken.getsockname()[1]})
        found = {one.name: one for one in await examine(settings, tmp_path, tmp_path / "state")}
    assert (found["port"].verdict, found["port"].fails) == ("broken", True)


async def test_a_store_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = settings_of(store={"uri": str(tmp_path / "file" / "store")})
    found = {one.name: one for one in await examine(settings, tmp_path, tmp_path / "state")}
    assert found["store"].fails


async def test_where_sessions_collect_to_and_seed_from_is_tried(tmp_path: Path) -> None:
    """A place that cannot be written is known before the first session loses its files there."""
    (tmp_path / "file").write_text("")
    fsspec.filesystem("memory").pipe_file("/doctor/seed", b"x")
    profile = {
        "kind": "virtual",
        "collect": tuple({"match": "*", "to": to} for to in ("file/below", "good/in/it", "good")),
        "seed": tuple({"from": uri} for uri in ("memory://doctor/seed", "memory://doctor/none", "file")),
    }
    found = await examine(settings_of(profiles={"default": profile}), tmp_path, tmp_path / "state")
    told = [(one.name, one.verdict, one.fails) for one in found if one.name in ("collect", "seed")]
    assert told == [
        ("collect", "broken", True),
        ("collect", "ok", False),
        ("collect", "ok", False),
        ("seed", "ok", False),
        ("seed", "broken", True),
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("mode", "verdict"), [(0o700, "ok"), (0o755, "weak")])
async def test_the_state_folder_is_for_its_owner_only(mode: int, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=mode)
    (tmp_path / "state").chmod(mode)
    found = {one.name: one for one in await examine(settings_of(), tmp_path, tmp_path / "state")}
    assert found["state folder"].verdict == verdict
    assert list((tmp_path / "state").iterdir()) == []


async def test_a_state_folder_that_is_a_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    found = {one.name: one for one in await examine(settings_of(), tmp_path, tmp_path / "state")}
    assert found["state folder"].fails


def test_a_held_state_folder_is_noticed_without_taking_it(tmp_path: Path) -> None:
    assert not held(tmp_path)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert held(tmp_path)
    os.close(lock)
    assert not held(tmp_path)


@pytest.mark.parametrize(
    "gap",
    [
        "memory: per process only",
        "swap: not limited",
        "cpus: not limited",
        "processes: not limited",
        "workspace_size: per file only",
        "engine: 20.10.24 has known holes (mended in 29.5.1)",
        "seccomp: the engine has none",
        "user namespaces: the engine does not remap users",
        "mandatory access control: neither AppArmor nor SELinux",
    ],
)
def test_every_gap_has_a_remedy(gap: str) -> None:
    assert remedy_of_gap(gap)


async def test_packages_of_another_distribution_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stores.py").write_text("")
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "stores"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.name: one for one in await examine(settings_of(), tmp_path, tmp_path / "state")}
    sys.modules.update(kept)
    assert found["packages"].fails
    assert "an environment of its own" in found["packages"].remedy
