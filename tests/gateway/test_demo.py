"""The demo: every row as it must be; and what would notice that something is left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.demo import KINDS, LARGE_BYTES, descendants, first_kind, left_in, left_on_disk, left_running, write_trace
from gateway.errors import Unavailable
from tests.gateway.commandline import sandgate
from tests.gateway.test_doctor import BROKEN


@pytest.mark.needs("local")
def test_demo_ends_as_it_must(tmp_path: Path) -> None:
    done = sandgate("demo", "--json", TMPDIR=str(tmp_path), SANDGATE_AGENT_TOKEN="not the demo's")
    report = json.loads(done.stdout)
    assert [(row["tool"], row["status"], row["as_expected"]) for row in report["calls"]] == [
        ("bash", "ok", True),
        ("grep", "ok", True),
        ("python", "ok", True),
        ("write_file", "ok", True),
        ("edit_file", "ok", True),
        ("deploy", "denied", True),
        ("bash", "skipped", True),
        ("bash", "timeout", True),
        ("bash", "ok", True),
        ("read_result", "ok", True),
    ]
    assert (done.returncode, done.stderr, report["ok"], report["kind"]) == (0, "", True, "local")
    assert report["calls"][6]["hooks"] == ["NoPush"]
    assert (report["calls"][8]["bytes"], report["read_back"]["bytes"]) == (LARGE_BYTES, LARGE_BYTES)
    assert (report["read_back"]["by_reference"], report["read_back"]["by_store_uri"]) == (True, True)
    assert report["collected"] == {"files": ["out/notes.md", "out/summary.json"], "verified": True}
    assert (report["left_behind"], list(tmp_path.iterdir())) == ([], [])


@pytest.mark.slow
def test_demo_in_a_virtual_sandbox_ends_as_it_must(tmp_path: Path) -> None:
    """Ten rows as on local, but for the one that needs a program."""
    done = sandgate("demo", "--kind", "virtual", "--json", TMPDIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert [(row["tool"], row["status"]) for row in report["calls"] if not row["as_expected"]] == []
    assert [row["tool"] for row in report["calls"]].count("python") == 0
    assert (done.returncode, report["ok"], report["kind"], len(report["calls"])) == (0, True, "virtual", 10)
    assert report["collected"] == {"files": ["out/notes.md", "out/summary.txt"], "verified": True}
    assert (report["left_behind"], list(tmp_path.iterdir())) == ([], [])


@pytest.mark.anyio
async def test_virtual_is_the_last_kind_to_be_taken(tmp_path: Path) -> None:
    assert KINDS[-1] == "virtual"
    kind, refused = await first_kind(tmp_path, (BROKEN, "virtual"))
    assert (kind, [probe.reason for probe in refused]) == ("virtual", ["it is broken"])


@pytest.mark.needs("local")
def test_demo_shows_a_table_that_ends_well() -> None:
    done = sandgate("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert "NOT" not in done.stdout
    assert "sandbox local (bubblewrap), no network, 128 processes" in done.stdout
    assert "killed with its 3 child processes" in done.stdout
    assert "5,242,880 bytes, sha256 matches" in done.stdout
    assert "nothing left behind" in done.stdout


@pytest.mark.anyio
async def test_without_a_kind_that_works_every_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as told:
        await first_kind(tmp_path, (BROKEN,))
    assert (told.value.message, told.value.remedy) == ("no kind of sandbox works here: broken: it is broken", "mend it")


@pytest.mark.anyio
@pytest.mark.needs("local")
async def test_the_first_kind_that_works_is_taken_and_the_others_say_why(tmp_path: Path) -> None:
    kind, refused = await first_kind(tmp_path, (BROKEN, "local"))
    assert (kind, [probe.reason for probe in refused]) == ("local", ["it is broken"])


def test_the_seed_is_a_log_that_was_really_written(tmp_path: Path) -> None:
    log = write_trace(tmp_path / "trace.log")
    assert (tmp_path / "trace.log").read_bytes() == log
    assert len(log) > LARGE_BYTES
    assert b"modulename: pydoc" in log


def test_what_is_left_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "workspaces" / "s-1").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ours = {one for one in descendants() if one.pid == process.pid}
        assert list(left_running(ours)) == [f"process {process.pid}"]
        process.kill()
    assert list(left_running(ours)) == []
    assert list(left_in(tmp_path)) == ["workspaces: s-1"]
    assert list(left_on_disk(tmp_path)) == [f"folder {tmp_path}"]
