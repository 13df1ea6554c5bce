"""What every sandbox kind must do, yours too: subclass `SandboxConformance`, give it a `sandbox` fixture, run pytest.

    from sandboxes import SandboxSpec
    from sandboxes.conformance import SandboxConformance

    class TestMine(SandboxConformance):
        exceptions: ClassVar = {"test_zombies_are_reaped": "it has no processes"}

        @pytest.fixture
        async def sandbox(self, tmp_path):
            kind = MyKind(tmp_path, instance="test")
            yield await kind.open(SandboxSpec("conformance"))
            await kind.aclose()

The sandbox needs `sh` and the usual small programs inside, and no network. Only this module imports pytest.
"""

import os
import re
import resource
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import anyio
import pytest

from sandboxes.capture import Capture
from sandboxes.errors import (
    CommandRefused,
    FileCode,
    FileRefused,
    JobNotFound,
    NotOffered,
    SandboxLost,
    TooManyJobs,
)
from sandboxes.sandbox import (
    JOB_LOG_BYTES,
    JOBS,
    MOST_JOBS,
    TERMINALS,
    WORKSPACE,
    Exit,
    JobOutput,
    Process,
    Sandbox,
    SmallFile,
    TerminalSize,
)

OK: Final = Exit("exit", 0)
SIGKILL: Final = int(signal.SIGKILL)


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    exit: Exit
    out: bytes
    err: bytes
    timed_out: bool
    seconds: float

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace")


async def run(
    sandbox: Sandbox,
    *argv: str,
    stdin: bytes = b"",
    cwd: str = WORKSPACE,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 30,
    max_bytes: int = 1 << 20,
) -> Ran:
    out, err = Capture(max_bytes), Capture(max_bytes)
    result = await sandbox.exec(argv, stdout=out, stderr=err, cwd=cwd, env=env, stdin=stdin, timeout_seconds=timeout)
    return Ran(result.exit, out.head + out.tail, err.head + err.tail, result.timed_out, result.duration_seconds)


async def sh(sandbox: Sandbox, script: str, timeout: float | None = 30) -> Ran:
    return await run(sandbox, "sh", "-c", script, timeout=timeout)


async def read(sandbox: Sandbox, path: str, start: int = 0, end: int | None = None, *, follow: bool = True) -> bytes:
    return b"".join([chunk async for chunk in sandbox.read(path, start, end, follow=follow)])


def host_processes(marker: str, below: int | None = None) -> list[int]:
    """Processes of this machine whose command line holds the marker: descendants of this test run, or all (0)."""
    root = os.getpid() if below is None else below
    parents = {int(folder.name): _parent(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    return [pid for pid in parents if pid != os.getpid() and _descends(pid, root, parents) and _shows(pid, marker)]


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root


def _shows(pid: int, marker: str) -> bool:
    try:
        return marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class FailingSink:
    async def write(self, chunk: bytes) -> None:
        raise RuntimeError("the sink is full")


class SlowSink:
    def __init__(self) -> None:
        self.total = 0

    async def write(self, chunk: bytes) -> None:
        await anyio.sleep(0.01)
        self.total += len(chunk)


async def job_output(sandbox: Sandbox, name: str, *, ended: bool = True, least: int = 0) -> JobOutput:
    """A job's output once it has ended, or has written so much."""
    with anyio.fail_after(30):
        while True:
            output = await sandbox.jobs.read(name)
            if output.job.exit is not None if ended else output.job.total >= least:
                return output
            await anyio.sleep(0.02)


async def shown(process: Process, until: bytes = b"") -> bytes:
    """What a terminal shows until it shows those bytes, or to its end."""
    data = b""
    with anyio.fail_after(30):
        while not until or until not in data:
            try:
                data += await process.stdout.receive()
            except anyio.EndOfStream:
                break
    return data


async def refusal(awaitable: object) -> FileCode:
    with pytest.raises(FileRefused) as refused:
        await awaitable  # type: ignore[misc]
    return refused.value.code


def deep_folders(levels: int) -> str:
    """A script that makes folders in each other, 500 at a time, and ends in the deepest."""
    step = min(levels, 500)
    part = "/".join(["d"] * step)
    return f"i=0; while [ $i -lt {levels // step} ]; do mkdir -p {part} && cd {part} || exit 1; i=$((i+1)); done"


@pytest.mark.anyio
class SandboxConformance:
    """The suite. Each test has a sandbox of its own.

    `exceptions` maps a test, or one of its cases, to what your kind cannot do, `lacks` is your kind's own; the figures
    are how far a kind that says so is tested.
    """

    exceptions: ClassVar[Mapping[str, str]] = {}
    lacks: ClassVar[frozenset[str]] = frozenset()
    output_bytes: ClassVar[int] = 1_000_000_000
    file_bytes: ClassVar[int] = 400 << 20
    folder_entries: ClassVar[int] = 10_000
    many_files: ClassVar[int] = 1200
    flood_blocks: ClassVar[int] = 1000
    folder_depth: ClassVar[int] = 2000

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture(autouse=True)
    def _excepted(self, request: pytest.FixtureRequest) -> None:
        name = request.node.name
        if reason := self.exceptions.get(name, self.exceptions.get(name.partition("[")[0])):
            pytest.skip(f"this kind cannot: {reason}")
        for what, word in ((JOBS, "job"), (TERMINALS, "terminal")):
            if what in self.lacks and word in name:
                pytest.skip(f"this kind has no {what}")

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        raise NotImplementedError("give the suite a sandbox")

    def processes(self, sandbox: Sandbox, marker: str) -> list[int]:
        """What runs with the marker in its command line; override it where that is not below this process."""
        return host_processes(marker)

    # --- programs

    async def test_exec_returns_output_and_code(self, sandbox: Sandbox) -> None:
        ran = await sh(sandbox, "echo out; echo err >&2; exit 7")
        assert (ran.exit, ran.out, ran.err, ran.timed_out) == (Exit("exit", 7), b"out\n", b"err\n", False)

    async def test_exec_tells_a_signal_from_a_code(self, sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "kill -TERM $$")).exit == Exit("signal", 15)
        assert (await sh(sandbox, "exit 143")).exit == Exit("exit", 143)

    async def test_arguments_arrive_as_they_are(self, sandbox: Sandbox) -> None:
        """A30: newline, quotes, leading dash, empty; no shell effect."""
        words = ["a b", "", "-n", "*", "$(id)", "it's", "two\nlines", "ä"]
        ran = await run(sandbox, "printf", r"%s|", *words)
        assert ran.out.split(b"|")[:-1] == [os.fsencode(word) for word in words]

    async def test_arguments_that_are_not_text_arrive_as_they_are(self, sandbox: Sandbox) -> None:
        """A30: bytes that are not UTF-8, and NUL on the way out."""
        ran = await run(sandbox, "printf", r"%s\0", "\udcff", "a")
        assert ran.out == b"\xff\0a\0"

    async def test_environment_is_only_ours(self, sandbox: Sandbox) -> None:
        """seed-facts 12 row 15, A12, K20: nothing of the gateway's environment is inside; what a call brings is."""
        os.environ["SANDGATE_TEST_CANARY"] = "canary-value"
        try:
            ran = await run(sandbox, "env", env={"GREETING": "hello world"})
            after = await run(sandbox, "env")
        finally:
            del os.environ["SANDGATE_TEST_CANARY"]
        assert "GREETING=hello world" in ran.text.splitlines()
        assert "GREETING" not in after.text
        assert "canary" not in ran.text
        assert "HOME=/home/agent" in ran.text

    @pytest.mark.parametrize("cwd", ["/workspace/sub", "sub", "/home/agent", "/tmp"])
    async def test_cwd_is_where_it_runs(self, sandbox: Sandbox, cwd: str) -> None:
        await sh(sandbox, "mkdir sub")
        expected = "/workspace/sub" if cwd == "sub" else cwd
        assert (await run(sandbox, "pwd", cwd=cwd)).text == f"{expected}\n"

    @pytest.mark.parametrize("cwd", ["/", "..", "/etc", "/workspace/../etc", "link"])
    async def test_cwd_outside_is_refused(self, sandbox: Sandbox, cwd: str) -> None:
        """A12: the folder of a call stays in the sandbox's own places, links included."""
        await sh(sandbox, "ln -s /etc link")
        assert await refusal(run(sandbox, "pwd", cwd=cwd)) == "invalid_path"

    async def test_cwd_missing_is_refused(self, sandbox: Sandbox) -> None:
        assert await refusal(run(sandbox, "pwd", cwd="nowhere")) == "missing_file"

    @pytest.mark.parametrize(
        ("argv", "code"),
        [
            (["no-such-program-anywhere"], "ENOENT"),
            (["/workspace/plain"], "EACCES"),
            (["/workspace"], "EACCES"),
            ([], "EINVAL"),
            (["echo", "a\0b"], "EINVAL"),
            (["echo", "x" * 131_072], "E2BIG"),
            (["echo", *(["x" * 100_000] * 30)], "E2BIG"),
        ],
    )
    async def test_a_program_that_cannot_start_is_refused(self, sandbox: Sandbox, argv: list[str], code: str) -> None:
        await sandbox.write("plain", b"just text")
        with pytest.raises(CommandRefused) as refused:
            await run(sandbox, *argv)
        assert refused.value.code == code
        assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_long_arguments_pass(self, sandbox: Sandbox) -> None:
        words = ["x" * 100_000] * 18
        ran = await run(sandbox, "sh", "-c", "echo $#", "sh", *words)
        assert ran.text == "18\n"

    async def test_stdin_is_empty_where_none_is_given(self, sandbox: Sandbox) -> None:
        """R13: tools that wait for input do not hang."""
        ran = await run(sandbox, "cat", timeout=5)
        assert (ran.exit, ran.out, ran.timed_out) == (OK, b"", False)

    async def test_stdin_arrives_whole(self, sandbox: Sandbox) -> None:
        """A24, first half: more than any pipe holds."""
        data = os.urandom(3 << 20)
        assert (await run(sandbox, "cat", stdin=data, max_bytes=4 << 20)).out == data

    async def test_stdin_that_nobody_reads_does_not_hang(self, sandbox: Sandbox) -> None:
        """A24, second half."""
        ran = await run(sandbox, "true", stdin=b"x" * (100 << 20), timeout=10)
        assert (ran.exit, ran.timed_out) == (OK, False)

    async def test_heredocs_and_quotes_work(self, sandbox: Sandbox) -> None:
        """R10."""
        ran = await sh(sandbox, "cat <<'EOF'\n\"$HOME\" 'x' `y`\nEOF\n")
        assert ran.text == "\"$HOME\" 'x' `y`\n"

    @pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 262_145, 8 << 20])
    async def test_output_of_any_size_arrives_on_both_streams(self, sandbox: Sandbox, size: int) -> None:
        """R19."""
        await sandbox.write("large", bytes(size))
        script = f"head -c {size} large & head -c {size} large >&2; wait"
        ran = await sh(sandbox, script)
        assert ran.exit == OK
        whole = await run(sandbox, "sh", "-c", script, max_bytes=size)
        assert (len(whole.out), len(whole.err)) == (size, size)

    async def test_output_bytes_are_not_changed(self, sandbox: Sandbox) -> None:
        """R21, R22: output is bytes; what is not UTF-8 passes."""
        data = bytes(range(256)) * 40 + "ä€😀".encode() * 3000
        await sandbox.write("bytes", data)
        assert (await run(sandbox, "cat", "bytes")).out == data

    async def test_output_flood_is_counted_and_bounded(self, sandbox: Sandbox) -> None:
        """seed-facts 12 row 14. A19: 1 GB of output, 1 MB kept, fast, and no memory for it."""
        await sandbox.write("block", bytes(1_000_000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = Capture(1 << 20)
        script = f"i=0; while [ $i -lt {self.flood_blocks} ]; do cat block; i=$((i+1)); done"
        result = await sandbox.exec(["sh", "-c", script], stdout=out, stderr=Capture(1000), timeout_seconds=30)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (result.exit, out.total, out.truncated) == (OK, self.output_bytes, True)
        assert grown < 64 * 1024

    async def test_a_slow_sink_slows_the_program(self, sandbox: Sandbox) -> None:
        sink = SlowSink()
        await sandbox.write("large", bytes(3_000_000))
        await sandbox.exec(["cat", "large"], stdout=sink, stderr=sink, timeout_seconds=30)
        assert sink.total == 3_000_000

    async def test_an_error_of_the_sink_is_raised_as_itself(self, sandbox: Sandbox) -> None:
        with pytest.raises(RuntimeError, match="the sink is full"):
            await sandbox.exec(["sh", "-c", "echo; sleep 30"], stdout=FailingSink(), stderr=FailingSink())
        assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_a_process_can_be_talked_to(self, sandbox: Sandbox) -> None:
        async with await sandbox.start(["cat"], stdin=True) as process:
            await process.stdin.send(b"one")
            assert await process.stdout.receive() == b"one"
            await process.stdin.aclose()
            assert await process.wait() == OK
            with pytest.raises(anyio.EndOfStream):
                await process.stdout.receive()

    async def test_a_process_that_is_left_is_dead(self, sandbox: Sandbox) -> None:
        async with await sandbox.start(["sleep", "300.111"]) as process:
            pass
        assert self.processes(sandbox, "300.111") == []
        await process.aclose()

    async def test_kill_ends_the_tree(self, sandbox: Sandbox) -> None:
        async with await sandbox.start(["sh", "-c", "sleep 300.112 & sleep 300.112"]) as process:
            await process.kill()
            end = await process.wait()
        assert (end.how, end.code) == ("signal", SIGKILL)
        assert self.processes(sandbox, "300.112") == []

    # --- time and left-overs

    async def test_timeout_keeps_what_was_printed(self, sandbox: Sandbox) -> None:
        """A20, R26: partial output, in time."""
        started = time.monotonic()
        ran = await sh(sandbox, "while :; do echo x; sleep 0.2; done", timeout=1)
        assert ran.timed_out
        assert ran.exit.code == SIGKILL
        assert ran.text.startswith("x\nx\n")
        assert time.monotonic() - started < 3

    async def test_timeout_ends_a_loop(self, sandbox: Sandbox) -> None:
        """R01: what burnt CPU is gone."""
        ran = await run(sandbox, "sh", "-c", "while :; do :; done", "loop-R01", timeout=0.5)
        assert ran.timed_out
        assert self.processes(sandbox, "loop-R01") == []

    async def test_timeout_ends_what_ignores_term(self, sandbox: Sandbox) -> None:
        """A21, R02: a program that ignores TERM, with children that do too."""
        script = "trap '' TERM HUP INT; sh -c \"trap '' TERM; sleep 300.121\" & sleep 300.121; sleep 300.121"
        ran = await sh(sandbox, script, timeout=0.5)
        assert ran.timed_out
        assert ran.seconds < 2.6
        assert self.processes(sandbox, "300.121") == []

    async def test_timeout_ends_the_children_of_a_shell(self, sandbox: Sandbox) -> None:
        """seed-facts 12 row 13. R03, R04: not only the leader dies."""
        ran = await sh(sandbox, "setsid sleep 300.104 & sleep 300.104 & wait", timeout=0.05)
        assert ran.timed_out
        assert self.processes(sandbox, "300.104") == []

    async def test_daemons_die_with_their_call(self, sandbox: Sandbox) -> None:
        """A22, R08: setsid, double fork, nohup; at a normal end."""
        script = (
            "setsid sh -c 'setsid sleep 300.122 >/dev/null 2>&1 & exit' >/dev/null 2>&1; "
            "nohup sleep 300.122 >/dev/null 2>&1 & (sleep 300.122 &) ; env -i setsid sleep 300.122 & exit 3"
        )
        ran = await sh(sandbox, script)
        assert (ran.exit.how, ran.exit.code) == ("exit", 3)
        assert ran.exit.killed >= 3
        assert self.processes(sandbox, "300.122") == []

    async def test_a_child_that_holds_stdout_does_not_hold_the_call(self, sandbox: Sandbox) -> None:
        """A23, R05, R06."""
        ran = await sh(sandbox, "echo done; sleep 300.123 & exit 0", timeout=10)
        assert (ran.text, ran.exit.code, ran.timed_out) == ("done\n", 0, False)
        assert ran.seconds < 1.5
        assert self.processes(sandbox, "300.123") == []

    async def test_a_timed_out_call_does_not_poison_the_next(self, sandbox: Sandbox) -> None:
        """R11."""
        for _ in range(5):
            assert (await sh(sandbox, "sleep 300.111", timeout=0.05)).timed_out
            assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_cancellation_kills_the_tree(self, sandbox: Sandbox) -> None:
        """R08: an exec can be stopped from outside, with its offspring."""
        with anyio.move_on_after(0.2) as limit:
            await sh(sandbox, "setsid nohup sleep 300.108 & sleep 300.108")
        assert limit.cancelled_caught
        assert self.processes(sandbox, "300.108") == []
        assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_calls_run_at_the_same_time_and_do_not_touch_each_other(self, sandbox: Sandbox) -> None:
        texts: dict[int, str] = {}

        async def one(number: int) -> None:
            texts[number] = (await sh(sandbox, f"sleep 0.3; echo {number}")).text

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
            tasks.start_soon(sh, sandbox, "setsid sleep 300.99 & sleep 300.99", 0.1)
        assert texts == {number: f"{number}\n" for number in range(12)}
        assert time.monotonic() - started < 3

    async def test_zombies_are_reaped(self, sandbox: Sandbox) -> None:
        """A25, R45, R46."""
        ran = await sh(
            sandbox,
            "i=0; while [ $i -lt 300 ]; do (true &) ; i=$((i+1)); done; "
            "sleep 0.2; grep -l '^State:.Z' /proc/[0-9]*/status | wc -l",
        )
        assert ran.text.strip() == "0"

    async def test_many_short_calls_leave_nothing(self, sandbox: Sandbox) -> None:
        """A25, A26: descriptors of the gateway and processes of the sandbox stay where they were."""
        count = "ls -d /proc/[0-9]* | wc -l"
        for _ in range(3):
            await sh(sandbox, count)
        before, processes = len(os.listdir("/proc/self/fd")), (await sh(sandbox, count)).text
        for _ in range(60):
            await sh(sandbox, "exit 1")
        assert len(os.listdir("/proc/self/fd")) < before + 30
        assert int((await sh(sandbox, count)).text) < int(processes) + 30  # the sandbox may keep a few at the ready

    async def test_descriptor_exhaustion_stays_inside(self, sandbox: Sandbox) -> None:
        """A26."""
        ran = await sh(sandbox, "ulimit -n")
        assert int(ran.text) == 1024

    # --- files

    async def test_write_then_read_gives_the_same_bytes(self, sandbox: Sandbox) -> None:
        data = os.urandom(1_000_003)
        assert await sandbox.write("a/b/c.bin", data) == len(data)
        assert await read(sandbox, "/workspace/a/b/c.bin") == data
        assert await read(sandbox, "a/b/c.bin", 10, 20) == data[10:20]
        assert await read(sandbox, "a/b/c.bin", 999_999, 10**9) == data[999_999:]
        assert await read(sandbox, "a/b/c.bin", 5, 3) == b""
        assert (await run(sandbox, "wc", "-c", "a/b/c.bin")).text.split()[0] == str(len(data))

    async def test_many_files_make_a_round_trip(self, sandbox: Sandbox) -> None:
        """seed-facts 12 row 12: whole, in order, with their modes; empty ones and deep ones too."""
        files = [SmallFile(f"d{n % 7}/f {n}", b"%d\n" % n * (n % 50), 0o640) for n in range(self.many_files)]
        await sandbox.write_many(files)
        contents = [one async for one in sandbox.read_many([file.path for file in files], 1000)]
        assert contents == [file.content for file in files]
        modes = {entry.mode for entry in (await sandbox.list(recursive=True)).entries if entry.kind == "file"}
        assert modes == {0o640}

    async def test_many_reads_tell_each_refusal(self, sandbox: Sandbox) -> None:
        """A27: a link, a folder, a missing and a large file are refused by themselves; the others come."""
        await sh(sandbox, "mkdir d; echo plain > plain; ln -s plain link; ln -s d down; echo x > d/x; seq 1000 > large")
        paths = ["plain", "link", "d", "none", "large", "down/x", "plain"]
        contents = [one async for one in sandbox.read_many(paths, 100)]
        codes = [one.code if isinstance(one, FileRefused) else one for one in contents]
        assert codes == [
            b"plain\n",
            "invalid_path",
            "invalid_path",
            "missing_file",
            "content_too_large",
            "invalid_path",
            b"plain\n",
        ]
        assert [one async for one in sandbox.read_many([], 100)] == []

    async def test_many_reads_that_are_left_end(self, sandbox: Sandbox) -> None:
        await sandbox.write_many([SmallFile(str(n), bytes(50_000)) for n in range(self.many_files // 12)])
        contents = sandbox.read_many([str(n) for n in range(self.many_files // 12)], 50_000)
        async with aclosing(contents):
            assert await anext(contents) == bytes(50_000)
        assert (await sh(sandbox, "echo on")).text == "on\n"

    @pytest.mark.parametrize("path", ["link/x", "d", "a/b", "n" * 300])
    async def test_many_writes_end_at_the_first_refusal(self, sandbox: Sandbox, path: str) -> None:
        """A27, A32: which names the file; no link is followed."""
        await sh(sandbox, "mkdir d; ln -s /tmp link; echo plain > a")
        with pytest.raises(FileRefused, match=re.escape(path[:100])) as refused:
            await sandbox.write_many([SmallFile("before", b"1"), SmallFile(path, b"2"), SmallFile("after", b"3")])
        assert refused.value.code == "invalid_path"
        assert (await sh(sandbox, "ls -A /tmp; cat a; ls -A; find . -name after")).text == "plain\na\nbefore\nd\nlink\n"

    async def test_write_takes_a_stream(self, sandbox: Sandbox) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 65_536
            yield b""

        assert await sandbox.write("big", chunks()) == 50 * 65_536

    async def test_write_that_breaks_leaves_no_file(self, sandbox: Sandbox) -> None:
        """A cancelled upload never becomes half a file, and leaves no rest."""

        async def chunks() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("the client is gone")

        await sandbox.write("there", b"old")
        for path in ("new", "there"):
            with pytest.raises(RuntimeError):
                await sandbox.write(path, chunks())
        assert [entry.path for entry in (await sandbox.list()).entries] == ["there"]
        assert await read(sandbox, "there") == b"old"

    async def test_write_that_is_cancelled_leaves_no_file(self, sandbox: Sandbox) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"half"
            await anyio.sleep_forever()

        with anyio.move_on_after(0.1):
            await sandbox.write("new", chunks())
        assert (await sandbox.list()).entries == ()

    @pytest.mark.parametrize("mode", [0o644, 0o600, 0o755, 0o4755, 0o2777, 0o1777])
    async def test_write_drops_set_uid_bits(self, sandbox: Sandbox, mode: int) -> None:
        """A32."""
        await sandbox.write("file", b"", mode=mode)
        (entry,) = (await sandbox.list("file")).entries
        assert (entry.path, entry.mode) == (".", mode & 0o777)

    async def test_write_replaces_a_link_and_not_its_target(self, sandbox: Sandbox) -> None:
        await sandbox.write("target", b"old")
        await sh(sandbox, "ln -s target link")
        await sandbox.write("link", b"new")
        assert await read(sandbox, "target") == b"old"
        assert [entry.kind for entry in (await sandbox.list()).entries] == ["file", "file"]

    async def test_write_through_a_link_is_refused(self, sandbox: Sandbox) -> None:
        """A37: a link in the workspace leads no seed elsewhere."""
        await sh(sandbox, "mkdir real; ln -s real inside; ln -s /tmp out")
        assert await refusal(sandbox.write("out/x", b"")) == "invalid_path"
        assert await refusal(sandbox.write("inside/x", b"")) == "invalid_path"

    @pytest.mark.parametrize(
        "path",
        [
            "..",
            "/",
            "/etc/passwd",
            "../x",
            "/workspace/../etc/passwd",
            "/workspaceX/a",
            "a\0b",
            "/proc/self/environ",
            "/dev/null",
            "/usr/bin/env",
        ],
    )
    async def test_paths_outside_are_refused(self, sandbox: Sandbox, path: str) -> None:
        """A36, as far as it concerns a sandbox."""
        assert await refusal(read(sandbox, path)) == "invalid_path"
        assert await refusal(sandbox.write(path, b"")) == "invalid_path"
        assert await refusal(sandbox.list(path)) == "invalid_path"
        assert await refusal(sandbox.remove(path)) == "invalid_path"

    async def test_paths_are_tidied(self, sandbox: Sandbox) -> None:
        await sandbox.write("//workspace/./a//b/../c", b"1")
        assert await read(sandbox, "a/c") == b"1"

    @pytest.mark.parametrize("path", ["", "/workspace", "folder"])
    async def test_folders_are_not_files(self, sandbox: Sandbox, path: str) -> None:
        await sh(sandbox, "mkdir folder")
        assert await refusal(read(sandbox, path)) == "invalid_path"
        assert await refusal(sandbox.write(path, b"")) == "invalid_path"

    async def test_missing_files_are_told(self, sandbox: Sandbox) -> None:
        assert await refusal(read(sandbox, "nothing")) == "missing_file"
        assert await refusal(read(sandbox, "no/thing")) == "missing_file"
        assert await refusal(sandbox.list("nothing")) == "missing_file"
        assert await refusal(sandbox.remove("nothing")) == "missing_file"

    async def test_links_are_followed_only_inside(self, sandbox: Sandbox) -> None:
        """A27: absolute, relative, chained, looping, dangling."""
        await sandbox.write("d/file", b"text")
        await sh(
            sandbox,
            "ln -s d/file relative; ln -s /workspace/d/file absolute; ln -s relative chained; "
            "ln -s ../../d/./file d/up; ln -s /home/agent home; echo home > home/f; ln -s d folder; "
            "ln -s /etc/passwd etc; ln -s ../../../etc/passwd above; ln -s etc chained-out; "
            "ln -s /proc/self/environ proc; ln -s loop loop; ln -s nowhere dangling",
        )
        for path in ("relative", "absolute", "chained", "folder/file"):
            assert await read(sandbox, path) == b"text"
            assert await refusal(read(sandbox, path, follow=False)) == "invalid_path"
        assert await read(sandbox, "home/f") == b"home\n"
        assert await refusal(read(sandbox, "d/up")) in ("invalid_path", "missing_file")
        for path in ("etc", "above", "chained-out", "proc", "loop"):
            assert await refusal(read(sandbox, path)) == "invalid_path"
        assert await refusal(read(sandbox, "dangling")) == "missing_file"
        kinds = {entry.path: entry.kind for entry in (await sandbox.list()).entries}
        assert kinds["etc"] == kinds["dangling"] == kinds["folder"] == "symlink"

    async def test_links_upwards_work_inside(self, sandbox: Sandbox) -> None:
        await sandbox.write("x/file", b"text")
        await sh(
            sandbox,
            "mkdir -p y/z; ln -s ../../x/../x/file y/z/up; ln -s ../../home/agent/f y/other; echo f > /home/agent/f",
        )
        assert await read(sandbox, "y/z/up") == b"text"
        assert await read(sandbox, "y/other") == b"f\n"

    async def test_special_files_answer_at_once(self, sandbox: Sandbox) -> None:
        """A28: FIFO, socket, and a link to a device."""
        await sh(sandbox, "mkfifo fifo; ln -s /dev/zero zero")
        with anyio.fail_after(1):
            for path in ("fifo", "zero"):
                assert await refusal(read(sandbox, path)) == "invalid_path"
            assert await refusal(sandbox.write("fifo", b"")) == "invalid_path"
        assert {entry.path: entry.kind for entry in (await sandbox.list()).entries} == {
            "fifo": "other",
            "zero": "symlink",
        }

    async def test_sparse_files_cost_what_is_asked(self, sandbox: Sandbox) -> None:
        """A18: the listing tells the size, a read is bounded by its range."""
        ran = await sh(sandbox, f"truncate -s {self.file_bytes} sparse; ls")
        assert ran.exit == OK
        with anyio.fail_after(2):
            assert await read(sandbox, "sparse", 0, 1 << 20) == bytes(1 << 20)
            assert (await sandbox.list()).entries[0].size == self.file_bytes

    async def test_a_read_that_is_left_ends(self, sandbox: Sandbox) -> None:
        await sh(sandbox, f"truncate -s {self.file_bytes} sparse")
        stream = sandbox.read("sparse")
        assert await anext(stream)
        with anyio.fail_after(2):
            await stream.aclose()  # type: ignore[attr-defined]

    async def test_names_survive(self, sandbox: Sandbox) -> None:
        """A30: leading dash, quotes, what means something to a shell."""
        await self.names_survive(sandbox, ["-rf", 'it\'s "q"', "$(id)", "ä", " ", "*"])

    async def test_names_that_are_not_plain_text_survive(self, sandbox: Sandbox) -> None:
        """A30: newline, bidi, bytes that are not UTF-8."""
        await self.names_survive(sandbox, ["a\nb", "\u202etxt.exe", "\udcff\udcfe"])

    async def names_survive(self, sandbox: Sandbox, names: list[str]) -> None:
        for name in names:
            await sandbox.write(name, os.fsencode(name))
        entries = (await sandbox.list()).entries
        assert sorted(os.fsencode(entry.path) for entry in entries) == sorted(map(os.fsencode, names))
        for name in names:
            assert await read(sandbox, name) == os.fsencode(name)
            await sandbox.remove(name)
        assert (await sandbox.list()).entries == ()

    async def test_list_shows_names_kinds_sizes(self, sandbox: Sandbox) -> None:
        await sandbox.write("b/two", b"22", mode=0o600)
        await sandbox.write("a", b"1")
        flat = await sandbox.list()
        assert [(e.path, e.kind) for e in flat.entries] == [("a", "file"), ("b", "directory")]
        deep = await sandbox.list("/workspace", recursive=True)
        assert [(e.path, e.size, e.mode) for e in deep.entries if e.kind == "file"] == [
            ("a", 1, 0o644),
            ("b/two", 2, 0o600),
        ]
        assert deep.complete
        assert abs(deep.entries[0].modified - time.time()) < 60

    async def test_list_stops_at_its_caps(self, sandbox: Sandbox) -> None:
        """A31: many files, and deep folders, answer in time and say that they are not complete."""
        await sh(sandbox, f"mkdir many; cd many; seq {self.folder_entries} | xargs touch")
        with anyio.fail_after(10):
            listing = await sandbox.list(recursive=True)
            assert (len(listing.entries), listing.complete) == (self.folder_entries + 1, True)
            capped = await sandbox.list("many", max_entries=10)
            assert (len(capped.entries), capped.complete) == (10, False)

    async def test_deep_folders_are_no_trouble(self, sandbox: Sandbox) -> None:
        """A31, A38: 2,000 levels: the listing stops at its depth, removal goes to the bottom."""
        assert (await sh(sandbox, f"mkdir top; cd top; {deep_folders(self.folder_depth)}")).exit == OK
        listing = await sandbox.list(recursive=True)
        listed = min(self.folder_depth, 100)
        assert (len(listing.entries), listing.complete) == (1 + listed, listed == self.folder_depth)
        await sandbox.remove("top", recursive=True)
        assert (await sandbox.list()).entries == ()

    async def test_closed_folders_do_not_break_a_listing(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "mkdir a b c; touch a/1 b/2 c/3; chmod 000 b")
        listing = await sandbox.list(recursive=True)
        assert [entry.path for entry in listing.entries] == ["a", "a/1", "b", "c", "c/3"]
        assert not listing.complete
        assert await refusal(read(sandbox, "b/2")) == "permission_denied"

    async def test_remove_takes_one_thing(self, sandbox: Sandbox) -> None:
        await sandbox.write("folder/file", b"")
        await sh(sandbox, "ln -s folder link; mkdir empty; mkfifo fifo")
        assert await refusal(sandbox.remove("folder")) == "invalid_path"
        for path in ("link", "empty", "fifo"):
            await sandbox.remove(path)
        assert [entry.path for entry in (await sandbox.list()).entries] == ["folder"]
        await sandbox.remove("folder", recursive=True)
        assert await refusal(sandbox.remove("/workspace", recursive=True)) == "invalid_path"

    async def test_remove_opens_closed_folders(self, sandbox: Sandbox) -> None:
        """A38, from inside."""
        await sh(sandbox, "mkdir -p t/a/b t/c; touch t/a/b/f t/c/g; chmod 000 t/a/b t/c; chmod 500 t/a; chmod 000 t")
        await sandbox.remove("t", recursive=True)
        assert (await sandbox.list()).entries == ()

    async def test_file_operations_run_at_the_same_time(self, sandbox: Sandbox) -> None:
        async def one(number: int) -> None:
            data = str(number).encode() * 100_000
            for _ in range(10):
                await sandbox.write(f"f{number}", data)
                assert await read(sandbox, f"f{number}") == data

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
        assert len((await sandbox.list()).entries) == 12

    async def test_a_full_disk_is_told(self, sandbox: Sandbox) -> None:
        """A16, as far as each kind can: /tmp is small everywhere."""

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(300):
                yield b"x" * (1 << 20)

        assert await refusal(sandbox.write("/tmp/big", chunks())) == "disk_full"
        assert (await sandbox.list("/tmp")).entries == ()

    # --- background jobs

    async def test_a_job_runs_on_and_its_output_is_read_by_offset(self, sandbox: Sandbox) -> None:
        await sandbox.jobs.start("j-1", ["sh", "-c", "echo one; echo two >&2; cat; exit 3"], title="three lines")
        output = await job_output(sandbox, "j-1", ended=False, least=8)
        assert (output.data, output.job.exit, output.job.ended) == (b"one\ntwo\n", None, None)
        assert (await sh(sandbox, "echo on")).text == "on\n"
        assert (await sandbox.jobs.read("j-1", 4)).data == b"two\n"
        assert (await sandbox.jobs.read("j-1", 2, 3)).data == b"e\nt"
        assert (await sandbox.jobs.read("j-1", -3)).data == b"wo\n"
        beyond = await sandbox.jobs.read("j-1", 100)
        assert (beyond.start, beyond.data) == (8, b"")
        assert await sandbox.jobs.write("j-1", b"three\0\n", close=True) == 7
        output = await job_output(sandbox, "j-1")
        assert (output.data, output.job.exit) == (b"one\ntwo\nthree\0\n", Exit("exit", 3))
        (job,) = await sandbox.jobs.list()
        assert (job.name, job.title, job.total, job.first) == ("j-1", "three lines", 15, 0)
        assert job.ended is not None
        assert abs(job.started - time.time()) < 60

    async def test_a_job_has_the_folder_and_environment_that_were_asked(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "mkdir sub")
        await sandbox.jobs.start("j-1", ["sh", "-c", "pwd; echo $GREETING"], cwd="sub", env={"GREETING": "hello"})
        assert (await job_output(sandbox, "j-1")).data == b"/workspace/sub\nhello\n"

    async def test_a_job_that_cannot_start_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandRefused) as refused:
            await sandbox.jobs.start("j-1", ["no-such-program-anywhere"])
        assert refused.value.code == "ENOENT"
        assert await refusal(sandbox.jobs.start("j-2", ["true"], cwd="nowhere")) == "missing_file"
        assert await sandbox.jobs.list() == ()

    async def test_a_job_that_is_not_there_is_told(self, sandbox: Sandbox) -> None:
        for name in ("j-9", "../x", "", "a\0b", "x" * 1000):
            for attempt in (
                sandbox.jobs.read(name),
                sandbox.jobs.write(name, b""),
                sandbox.jobs.stop(name),
            ):
                with pytest.raises(JobNotFound):
                    await attempt

    async def test_stopping_a_job_ends_its_tree(self, sandbox: Sandbox) -> None:
        """A21, A22: also what ignores signals or hides; its output stays."""
        script = "trap '' TERM HUP; echo up; setsid sleep 300.141 & (setsid nohup sleep 300.141 &); sleep 300.141"
        await sandbox.jobs.start("j-1", ["sh", "-c", script])
        await job_output(sandbox, "j-1", ended=False, least=3)
        job = await sandbox.jobs.stop("j-1")
        assert job.exit is not None
        assert (job.exit.how, job.exit.code) == ("signal", SIGKILL)
        assert self.processes(sandbox, "300.141") == []
        assert (await sandbox.jobs.stop("j-1")).exit == job.exit
        assert (await sandbox.jobs.read("j-1")).data == b"up\n"

    async def test_what_a_job_leaves_behind_ends_with_it(self, sandbox: Sandbox) -> None:
        """A23, R08: a child that holds the output holds nothing up."""
        await sandbox.jobs.start("j-1", ["sh", "-c", "setsid sleep 300.142 & echo done"])
        output = await job_output(sandbox, "j-1")
        assert (output.data, output.job.exit) == (b"done\n", Exit("exit", 0, killed=1))
        assert self.processes(sandbox, "300.142") == []

    async def test_a_call_that_is_killed_leaves_jobs_alone(self, sandbox: Sandbox) -> None:
        await sandbox.jobs.start("j-1", ["cat"])
        assert (await sh(sandbox, "sleep 300.143 & sleep 300.143", timeout=0.1)).timed_out
        assert await sandbox.jobs.write("j-1", b"still here", close=True) == 10
        assert (await job_output(sandbox, "j-1")).data == b"still here"

    async def test_a_job_that_floods_keeps_the_end_of_its_output(self, sandbox: Sandbox) -> None:
        """A19: it waits for no reader, and what is kept has a bound."""
        await sandbox.jobs.start("j-1", ["sh", "-c", "yes 0123456; echo never"])
        output = await job_output(sandbox, "j-1", ended=False, least=4 * JOB_LOG_BYTES)
        assert output.start == output.job.first > 0
        job = await sandbox.jobs.stop("j-1")
        assert JOB_LOG_BYTES <= job.total - job.first <= 2 * JOB_LOG_BYTES
        tail = await sandbox.jobs.read("j-1", -16)
        assert len(tail.data) == 16
        assert b"0123456\n" in tail.data
        assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_input_that_a_job_does_not_read_is_not_kept(self, sandbox: Sandbox) -> None:
        """A24: what its pipe has no room for is not taken, and the end of the input does not overtake it."""
        await sandbox.jobs.start("j-1", ["sleep", "300.144"])
        taken = await sandbox.jobs.write("j-1", b"x" * 1_000_000, close=True)
        assert 0 < taken < 1_000_000
        assert await sandbox.jobs.write("j-1", b"x" * 1_000_000) == 0
        await sandbox.jobs.stop("j-1")
        with pytest.raises(anyio.BrokenResourceError):
            await sandbox.jobs.write("j-1", b"x")

    async def test_a_job_that_ends_its_keeper_is_gone(self, sandbox: Sandbox) -> None:
        """Killed or stopped: what it started is dead, and the sandbox goes on."""
        for name, signal_name in (("j-1", "KILL"), ("j-2", "STOP")):
            await sandbox.jobs.start(name, ["sh", "-c", f"setsid sleep 300.145 & sleep 0.2; kill -{signal_name} $PPID"])
            with pytest.raises(JobNotFound):
                await job_output(sandbox, name)
        with anyio.fail_after(10):
            while self.processes(sandbox, "300.145"):
                await anyio.sleep(0.02)
        assert await sandbox.jobs.list() == ()
        assert (await sh(sandbox, "echo on")).text == "on\n"

    async def test_the_oldest_job_that_has_ended_makes_room(self, sandbox: Sandbox) -> None:
        for number in range(MOST_JOBS):
            await sandbox.jobs.start(f"j-{number}", ["cat"] if number != 3 else ["true"])
        await job_output(sandbox, "j-3")
        await sandbox.jobs.start("new", ["cat"])
        names = [job.name for job in await sandbox.jobs.list()]
        assert names == [*(f"j-{number}" for number in range(MOST_JOBS) if number != 3), "new"]
        with pytest.raises(TooManyJobs):
            await sandbox.jobs.start("more", ["true"])
        await sandbox.jobs.stop("j-0")
        await sandbox.jobs.start("more", ["true"])

    async def test_jobs_are_asked_at_the_same_time(self, sandbox: Sandbox) -> None:
        async def one(name: str) -> None:
            await sandbox.jobs.start(name, ["sh", "-c", f"echo {name}; cat"])
            await sandbox.jobs.write(name, name.encode(), close=True)
            assert (await job_output(sandbox, name)).data == f"{name}\n{name}".encode()

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, f"j-{number}")

    async def test_jobs_end_with_their_sandbox(self, sandbox: Sandbox) -> None:
        await sandbox.jobs.start("j-1", ["sh", "-c", "setsid sleep 300.146 & sleep 300.146"])
        await sandbox.aclose()
        assert self.processes(sandbox, "300.146") == []
        for attempt in (sandbox.jobs.read("j-1"), sandbox.jobs.list(), sandbox.jobs.start("j-2", ["true"])):
            with pytest.raises(SandboxLost):
                await attempt

    async def test_what_the_kind_lacks_is_refused(self, sandbox: Sandbox) -> None:
        """A typed error, which names what works."""
        if JOBS in self.lacks:
            with pytest.raises(NotOffered) as refused:
                _ = sandbox.jobs
            assert refused.value.remedy
        if TERMINALS in self.lacks:
            with pytest.raises(NotOffered) as refused:
                await sandbox.start(["sh"], terminal=TerminalSize())
            assert refused.value.remedy

    # --- terminals

    async def test_a_terminal_is_one_and_changes_its_size(self, sandbox: Sandbox) -> None:
        script = "tty; stty size; trap 'stty size; exit 3' WINCH; echo ready >/dev/tty; while :; do sleep 0.1; done"
        async with await sandbox.start(["sh", "-c", script], terminal=TerminalSize(77, 33)) as process:
            first = await shown(process, b"ready")
            assert first.startswith(b"/dev/pts/")
            assert b"\r\n33 77\r\n" in first
            process.resize(TerminalSize(100, 40))
            assert b"40 100" in await shown(process)
            assert await process.wait() == Exit("exit", 3)
            with pytest.raises(anyio.EndOfStream):
                await process.stderr.receive()

    async def test_a_terminal_takes_keys_and_sends_their_signals(self, sandbox: Sandbox) -> None:
        """What is typed is echoed; Ctrl-C, Ctrl-Z and Ctrl-D are what they are on a terminal."""
        async with await sandbox.start(["sh", "-i"], env={"PS1": "> "}, terminal=TerminalSize()) as process:
            await shown(process, b"> ")
            await process.stdin.send(b"echo a$((1+1))b\n")
            assert b"a2b" in await shown(process, b"a2b\r\n")
            await process.stdin.send(b"echo run; sleep 300.151\n")
            await shown(process, b"run\r\n")
            while not self.processes(sandbox, "300.151"):
                await anyio.sleep(0.02)
            await process.stdin.send(b"\x03")
            await shown(process, b"> ")
            assert self.processes(sandbox, "300.151") == []
            await process.stdin.send(b"exit 4\n")
            await shown(process)
            assert await process.wait() == Exit("exit", 4)

    async def test_a_terminal_shows_everything_to_its_end(self, sandbox: Sandbox) -> None:
        """R19: also what is still on its way when the program has ended."""
        async with await sandbox.start(["seq", "100000"], terminal=TerminalSize()) as process:
            data = await shown(process)
            assert data.replace(b"\r\n", b"\n") == b"".join(b"%d\n" % number for number in range(1, 100_001))
            assert await process.wait() == OK

    async def test_a_terminal_that_is_left_ends_its_tree(self, sandbox: Sandbox) -> None:
        """A22: no hang-up is ignored."""
        script = "trap '' HUP TERM; setsid sleep 300.152 & nohup sleep 300.152 & echo up; sleep 300.152"
        async with await sandbox.start(["sh", "-c", script], terminal=TerminalSize()) as process:
            await shown(process, b"up")
        assert self.processes(sandbox, "300.152") == []
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"x")

    async def test_another_program_that_holds_a_terminal_does_not_hold_the_call(self, sandbox: Sandbox) -> None:
        """A23: the device can be opened by whoever has the sandbox's uid."""
        script = "tty > name; echo up; cat >/dev/null; echo last"
        async with await sandbox.start(["sh", "-c", script], terminal=TerminalSize()) as process:
            await shown(process, b"up")
            async with await sandbox.start(["sh", "-c", "exec 9<>$(cat name); echo held; sleep 300.153"]) as other:
                assert await other.stdout.receive() == b"held\n"
                await process.stdin.send(b"\x04")
                assert b"last" in await shown(process)
                assert await process.wait() == OK

    async def test_a_program_that_cannot_start_on_a_terminal_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandRefused) as refused:
            await sandbox.start(["no-such-program-anywhere"], terminal=TerminalSize())
        assert refused.value.code == "ENOENT"

    async def test_many_terminals_leave_nothing(self, sandbox: Sandbox) -> None:
        """A26: no descriptor stays."""
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            async with await sandbox.start(["echo", "hi"], terminal=TerminalSize()) as process:
                assert await shown(process) == b"hi\r\n"
        assert len(os.listdir("/proc/self/fd")) <= before + 2

    # --- the end

    async def test_closed_sandbox_is_lost(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep", "300.131"])
        assert sandbox.alive
        with anyio.fail_after(5):
            await sandbox.aclose()
            await sandbox.aclose()
        assert not sandbox.alive
        assert self.processes(sandbox, "300.131") == []
        for attempt in (
            process.wait(),
            sh(sandbox, "true"),
            read(sandbox, "x"),
            sandbox.write("x", b""),
            sandbox.list(),
            sandbox.remove("x"),
        ):
            with pytest.raises(SandboxLost):
                await attempt
        await process.aclose()
