"""Control groups: found, limited and swept, on trees that look like each version's."""

from pathlib import Path

import pytest

from sandboxes import SandboxUnavailable, cgroups
from sandboxes.cgroups import Counters, Groups, find_groups
from sandboxes.sandbox import Limits

LIMITS = Limits(memory=1 << 20, cpus=0.5, processes=10)


def make_proc(tmp_path: Path, mounts: list[tuple[str, str, str]], own: str) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    lines = [f"30 29 0:27 / {place} rw shared:1 - {kind} {kind} {options}" for place, kind, options in mounts]
    (proc / "mountinfo").write_text("\n".join(lines))
    (proc / "cgroup").write_text(own)
    return proc


def test_version_1_is_found_below_our_own_group(tmp_path: Path) -> None:
    for name in ("memory/here", "pids", "cpu"):
        (tmp_path / name).mkdir(parents=True)
    mounts = [(str(tmp_path / name), "cgroup", f"rw,{name}") for name in ("memory", "pids", "cpu")]
    groups = find_groups("x", make_proc(tmp_path, mounts, "3:memory:/here\n2:pids:/\n1:cpu:/\n0::/\n"))
    assert groups.controllers == {"memory", "pids", "cpu"}
    assert groups.not_enforced == ("workspace_size: per file only",)
    group = groups.create("s", LIMITS)
    folder = tmp_path / "memory/here/sandgate-x/s"
    assert (folder / "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert (tmp_path / "pids/sandgate-x/s/pids.max").read_text() == "18"
    assert (tmp_path / "cpu/sandgate-x/s/cpu.cfs_quota_us").read_text() == "50000"
    assert set(group.procs) == {
        tmp_path / f"{name}/sandgate-x/s/cgroup.procs" for name in ("memory/here", "pids", "cpu")
    }
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "pids/sandgate-x/s/pids.events").write_text("max 7\n")
    assert group.counters() == Counters(3, 7)


def test_version_2_is_used_where_it_is_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "unified/user"
    base.mkdir(parents=True)
    proc = make_proc(tmp_path, [(str(tmp_path / "unified"), "cgroup2", "rw")], "0::/user\n")
    enabled: list[Path] = []

    def enable(folder: Path) -> tuple[str, ...]:
        enabled.append(folder)
        return cgroups.CONTROLLERS

    monkeypatch.setattr(cgroups, "_enable", enable)
    groups = find_groups("x", proc)
    assert groups.controllers == {"memory", "pids", "cpu"}
    assert enabled == [base, base / "sandgate-x"]
    group = groups.create("s", LIMITS)
    folder = base / "sandgate-x/s"
    assert (folder / "memory.max").read_text() == str(1 << 20)
    assert (folder / "cpu.max").read_text() == "50000 100000"
    assert (folder / "pids.max").read_text() == "18"
    assert group.procs == (folder / "cgroup.procs",)
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (folder / "pids.events").write_text("max 0\n")
    assert group.counters() == Counters(1, 0)


def test_nothing_is_an_answer(tmp_path: Path) -> None:
    groups = find_groups("x", make_proc(tmp_path, [], "0::/\n"))
    assert groups.controllers == frozenset()
    assert groups.not_enforced == ("memory: per process only", "cpus: not limited", "workspace_size: per file only")


def test_only_our_own_groups_are_swept(tmp_path: Path) -> None:
    """A65: two instances on one machine."""
    ours, theirs = tmp_path / "sandgate-a", tmp_path / "sandgate-b"
    for folder in (ours / "old", theirs / "live"):
        folder.mkdir(parents=True)
    groups = Groups({"memory": ours}, 1)
    groups.sweep()
    assert not (ours / "old").exists()
    groups.close()
    assert not ours.exists()
    assert (theirs / "live").exists()


def test_version_2_is_not_used_where_it_is_not_delegated(tmp_path: Path) -> None:
    """As on a machine whose controllers are all with version 1, or whose user has none."""
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("")
    (tmp_path / "unified/cgroup.subtree_control").write_text("")
    proc = make_proc(tmp_path, [(str(tmp_path / "unified"), "cgroup2", "rw")], "0::/\n")
    assert find_groups("x", proc).controllers == frozenset()


def test_a_limit_that_is_refused_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_REMOVE_SECONDS", 0)
    (tmp_path / "p/s/pids.max").mkdir(parents=True)
    with pytest.raises(SandboxUnavailable, match="limited"):
        Groups({"pids": tmp_path / "p"}, 1).create("s", LIMITS)
