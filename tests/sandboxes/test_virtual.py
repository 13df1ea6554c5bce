"""The virtual kind passes the suite of all kinds, but for what it says that it cannot do."""

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import anyio
import pytest

from sandboxes import (
    CommandRefused,
    Exit,
    FileRefused,
    Limits,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
    VirtualKind,
    VirtualSandbox,
)
from sandboxes.conformance import SandboxConformance, host_processes, read, run, sh
from sandboxes.interpreter import FILE_BYTES, HIDDEN, STAND_INS, STUCK
from sandboxes.virtual import BUDGETS, CANNOT
from tests.sandboxes.support import open_descriptors


@pytest.fixture
async def kind(tmp_path: Path) -> AsyncIterator[VirtualKind]:
    kind = VirtualKind(tmp_path / "state", instance="test")
    yield kind
    await kind.aclose()


PROGRAMS, SIGNALS, PROCESSES, PLAIN_TEXT = CANNOT[:4]


class TestVirtual(SandboxConformance):
    exceptions: ClassVar = {
        "test_exec_tells_a_signal_from_a_code": SIGNALS,
        "test_daemons_die_with_their_call": PROCESSES,
        "test_a_child_that_holds_stdout_does_not_hold_the_call": PROCESSES,
        "test_zombies_are_reaped": PROCESSES,
        "test_descriptor_exhaustion_stays_inside": PROCESSES,
        "test_arguments_that_are_not_text_arrive_as_they_are": PLAIN_TEXT,
    }
    lacks = VirtualKind.lacks
    output_bytes = 10 << 20
    file_bytes = 9 << 20
    folder_entries = 5000
    folder_depth = 98

    @pytest.fixture
    async def sandbox(self, kind: VirtualKind) -> VirtualSandbox:
        return await kind.open(SandboxSpec("conformance"))


pytestmark = pytest.mark.anyio

RUNAWAY = "jq -n 'def f: f; f'"
"""A step that heeds nothing but its own time limit."""
MEMORY = "seq 1 100000 > n; for i in $(seq 3000); do cat n n n n n n n n; done | wc -c"
"""More memory than there is, past bashkit's own limits."""


@pytest.fixture
async def virtual(kind: VirtualKind) -> VirtualSandbox:
    return await kind.open(SandboxSpec("session", Limits(memory=256 << 20)))


def test_exceptions_hold_no_file_tools_pipelines_or_budgets() -> None:
    words = (
        "read",
        "write",
        "remove",
        "edit",
        "stdin",
        "output",
        "timeout",
        "memory",
        "disk",
        "heredocs",
        "names",
        "folders",
    )
    assert [name for name in TestVirtual.exceptions if any(word in name for word in words)] == []


@pytest.mark.parametrize(
    ("script", "out"),
    [
        ("printf 'b\\na\\nb\\n' | sort | uniq -c | sort -rn | head -1 | tr -s ' '", " 2 b\n"),
        ("printf 'one,1\\ntwo,2\\n' > t.csv; cut -d, -f2 t.csv | paste -sd+ | bc", "3\n"),
        ("echo hello | sed 's/l/L/g' | tr a-z A-Z", "HELLO\n"),
        ("printf '{\"a\": [1, 2]}' | jq -c .a", "[1,2]\n"),
        ("printf 'x 1\\ny 2\\n' | awk '{ sum += $2 } END { print sum }'", "3\n"),
        ("mkdir -p d/e; echo needle > d/e/f; find . -name f | xargs grep -n needle", "1:needle\n"),
        ("f() { echo \"got $1\"; }; for x in a b; do f $x; done | tee copy | wc -l | tr -d ' '", "2\n"),
        ("seq 3 | while read n; do echo $((n * n)); done | tail -1", "9\n"),
        ("tar cf t.tar -C /etc passwd && tar tf t.tar; echo text | gzip | gunzip", "passwd\ntext\n"),
        ("diff <(seq 3) <(seq 4) | tail -1", "> 4\n"),
    ],
)
async def test_text_pipelines_work(virtual: VirtualSandbox, script: str, out: str) -> None:
    assert (await sh(virtual, script)).text == out


async def test_programs_that_are_missing_are_told(virtual: VirtualSandbox) -> None:
    ran = await sh(virtual, "python3 -c 'print(1)'")
    assert (ran.exit, ran.out) == (Exit("exit", 127), b"")
    with pytest.raises(CommandRefused) as refused:
        await run(virtual, "python3", "-c", "print(1)")
    assert refused.value.code == "ENOENT"


async def test_nothing_of_the_host_is_inside(virtual: VirtualSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    ran = await sh(virtual, f"cat {tmp_path}/secret; cat /proc/self/environ /proc/mounts; hostname; id -un")
    assert ran.text == "bashkit-vfs / bashkit-vfs rw 0 0\nsandbox\nagent\n"
    assert (await sh(virtual, "ls / /dev /root; env; ls -R /proc")).text.find(os.fspath(tmp_path)) == -1


async def test_the_network_is_not_there(virtual: VirtualSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"127.0.0.1:{server.getsockname()[1]}"
        await sh(virtual, f"curl -s http://{url}; wget -q http://{url}; http GET http://{url}")
        await sh(virtual, f"echo > /dev/tcp/{url.replace(':', '/')}")
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.needs("root")
async def test_the_interpreter_has_given_up_its_rights(virtual: VirtualSandbox) -> None:
    status = Path(f"/proc/{virtual.pid}/status").read_text().split("\n")
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    assert fields["Uid"].split() == ["65534"] * 4
    assert (fields["CapEff"], fields["NoNewPrivs"]) == ("0" * 16, "1")
    assert os.stat(f"/proc/{virtual.pid}/environ").st_uid == 0  # not dumpable


async def test_memory_that_is_used_up_ends_this_sandbox_only(kind: VirtualKind, virtual: VirtualSandbox) -> None:
    other = await kind.open(SandboxSpec("other"))
    await other.write("kept", b"1")
    with pytest.raises(SandboxLost) as lost:
        await sh(virtual, MEMORY)
    assert lost.value.files_lost
    assert not virtual.alive
    again = await kind.open(SandboxSpec("session"))
    assert not again.restored
    assert (await again.list()).entries == ()
    assert await read(other, "kept") == b"1"


async def test_what_heeds_no_end_is_left_to_its_own(virtual: VirtualSandbox) -> None:
    await virtual.write("kept", b"1")
    ran = await sh(virtual, RUNAWAY, timeout=0.3)
    assert ran.timed_out
    assert ran.seconds < 2.5
    assert (await sh(virtual, "cat kept")).text == "1"


async def test_too_much_that_heeds_no_end_ends_the_sandbox(virtual: VirtualSandbox) -> None:
    lost = 0

    async def one() -> None:
        nonlocal lost
        try:
            await sh(virtual, RUNAWAY, timeout=0.3)
        except SandboxLost:
            lost += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(STUCK):
            tasks.start_soon(one)
    assert lost >= 1
    assert not virtual.alive


async def test_files_beyond_the_budgets_are_refused(virtual: VirtualSandbox) -> None:
    with pytest.raises(FileRefused) as refused:
        await virtual.write("large", bytes(FILE_BYTES + 1))
    assert refused.value.code == "disk_full"
    for number in range(9):
        await virtual.write(f"f{number}", bytes(FILE_BYTES))
    await virtual.write("rest", bytes(FILE_BYTES // 2))
    with pytest.raises(FileRefused) as refused:
        await virtual.write("more", bytes(FILE_BYTES))
    assert refused.value.code == "disk_full"
    assert (await sh(virtual, "cat f0 > copy")).exit.code != 0
    assert [entry.path for entry in (await virtual.list()).entries if entry.path.startswith(".")] == []


async def test_output_beyond_the_budget_is_told(virtual: VirtualSandbox) -> None:
    await virtual.write("block", bytes(1 << 20))
    ran = await sh(virtual, "for i in $(seq 20); do cat block; done")
    assert (ran.exit, ran.err) == (Exit("exit", 0), b"output beyond 10 MiB was left out\n")


async def test_a_call_that_ends_while_its_output_waits_disturbs_no_other(virtual: VirtualSandbox) -> None:
    """Its descriptors' numbers are the next call's."""
    await virtual.write("block", bytes(1 << 20))
    for _ in range(5):
        async with await virtual.start(["sh", "-c", "cat block block & cat block block; cat block >&2"]) as process:
            await anyio.sleep(0.05)
            await process.kill()
        ran = await sh(virtual, "cat block & cat block >&2; wait", timeout=5)
        assert (len(ran.out), len(ran.err), ran.timed_out) == (1 << 20, 1 << 20, False)


async def test_each_command_is_a_new_shell(virtual: VirtualSandbox) -> None:
    await sh(virtual, "export A=1; cd /tmp; alias ls=pwd; f() { echo f; }; set -e")
    assert (await sh(virtual, "echo [$A] $PWD; f")).text == "[] /workspace\n"


async def test_commands_see_stand_ins_in_names_and_file_tools_the_names(virtual: VirtualSandbox) -> None:
    """Each character that bashkit takes in no name, in one folder that commands go through as well."""
    names = [f"{chr(code)}-{code:x}" for code in HIDDEN]
    for name in names:
        await virtual.write(f"odd\n/{name}", b"1")
    ran = await sh(virtual, 'cd odd* && for f in *; do cat "$f"; cp "$f" "$f.copy"; done | wc -c | tr -d \' \'')
    assert ran.text == f"{len(names)}\n"
    found = [entry.path for entry in (await virtual.list("odd\n")).entries]
    assert sorted(found) == sorted(name + end for name in names for end in ("", ".copy"))
    assert (await run(virtual, "pwd", cwd="odd\n")).exit == Exit("exit", 0)
    shown = (await sh(virtual, "ls odd*")).text.splitlines()
    assert b"1" * len(found) == b"".join([await read(virtual, f"odd{chr(STAND_INS[10])}/{name}") for name in shown])


async def test_folders_deeper_than_its_own_limit_are_refused(virtual: VirtualSandbox) -> None:
    """By bashkit, to commands as to file tools: neither makes what the other could not see."""
    deep = "/".join("d" * 98)
    await virtual.write(f"{deep}/f", b"1")
    assert (await sh(virtual, f"cat {deep}/f")).text == "1"
    with pytest.raises(FileRefused) as refused:
        await virtual.write(f"{deep}/d/f", b"1")
    assert refused.value.code == "invalid_path"
    assert "path too deep" in (await sh(virtual, f"cd {deep} && mkdir -p d/d")).err.decode()


async def test_roots_come_back(virtual: VirtualSandbox) -> None:
    await sh(virtual, "rm -rf /*")
    assert (await sh(virtual, "echo on > file; pwd; cat file")).text == "/workspace\non\n"


async def test_links_out_of_the_roots_are_refused_in_files_too(virtual: VirtualSandbox) -> None:
    await sh(virtual, "rm -r /workspace; ln -s /etc /workspace")
    with pytest.raises(FileRefused):
        await read(virtual, "passwd")
    with pytest.raises(FileRefused):
        await virtual.write("passwd", b"")


async def test_a_smaller_workspace_is_named_as_not_enforced(kind: VirtualKind) -> None:
    sandbox = await kind.open(SandboxSpec("small", Limits(workspace_size=1 << 20)))
    assert [gap.partition(":")[0] for gap in sandbox.not_enforced] == ["cpus", "workspace_size"]


async def test_one_sandbox_a_session(kind: VirtualKind, virtual: VirtualSandbox) -> None:
    with pytest.raises(SandboxUnavailable):
        await kind.open(SandboxSpec("session"))
    await kind.destroy("session")
    assert not virtual.alive
    assert not Path(f"/proc/{virtual.pid}").exists()
    await kind.destroy("session")


async def test_an_interpreter_that_does_not_start_leaves_nothing(
    kind: VirtualKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr("sandboxes.interpreter.__file__", str(tmp_path / "gone.py"))
    with pytest.raises(SandboxUnavailable, match="did not start"):
        await kind.open(SandboxSpec("session"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(SandboxUnavailable, match="could not be started"):
        await kind.open(SandboxSpec("session"))
    assert open_descriptors() == before
    assert host_processes("gone.py") == []


async def test_an_interpreter_whose_gateway_is_gone_ends() -> None:
    """Its end of the channel is all that holds it, whatever it runs."""
    script = (
        "import anyio, pathlib, sys\n"
        "from sandboxes import SandboxSpec, VirtualKind\n"
        "async def main():\n"
        "    sandbox = await VirtualKind(pathlib.Path(), instance='x').open(SandboxSpec('s'))\n"
        "    await sandbox.start(['sh', '-c', 'while :; do :; done'])\n"
        "    print(sandbox.pid, flush=True)\n"
        "    import os; os.kill(os.getpid(), 9)\n"
        "anyio.run(main)\n"
    )
    done = await anyio.run_process([sys.executable, "-c", script], check=False)
    with anyio.fail_after(5), contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "\nState:\tZ" not in Path(f"/proc/{int(done.stdout)}/status").read_text():
            await anyio.sleep(0.02)


async def test_paths_of_the_host_are_refused(kind: VirtualKind) -> None:
    with pytest.raises(SandboxUnavailable):
        await kind.open(SandboxSpec("session", read_only=(Path("/usr"),)))


async def test_probe_says_what_it_is_and_what_it_cannot(kind: VirtualKind) -> None:
    probe = await kind.probe()
    assert (probe.works, [gap.partition(":")[0] for gap in probe.not_enforced]) == (True, ["cpus"])
    assert (probe.facts["cannot"], probe.facts["at most"]) == ("; ".join(CANNOT), BUDGETS)


def test_the_readme_says_what_it_cannot() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text().replace("`", "")
    assert [one for one in CANNOT if f"- {one}\n" not in readme] == []
    assert BUDGETS in " ".join(readme.split())


async def test_probe_without_bashkit_names_the_remedy(kind: VirtualKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    probe = await kind.probe()
    assert (probe.works, probe.reason) == (False, "bashkit is not installed")
    assert "sandgate[server]" in probe.remedy
