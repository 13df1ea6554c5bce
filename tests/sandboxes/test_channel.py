"""The gateway's end of the channel against an inner end that lies, hangs or dies."""

import array
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from sandboxes import Exit, FileRefused, SandboxLost, TerminalSize, channel
from sandboxes.cgroups import Counters
from sandboxes.channel import Channel, Ended
from sandboxes.direct import DirectSandbox, name_exit
from sandboxes.errors import CommandRefused
from sandboxes.request import inside, run_request

pytestmark = pytest.mark.anyio


class ScriptedSandbox(DirectSandbox):
    kind = "scripted"

    def counters(self) -> Counters:
        return Counters()


class Inner:
    """The far end: answers each call with the next of its lines, in a thread."""

    def __init__(self, sock: socket.socket, answer: Callable[[socket.socket, list[int]], None]) -> None:
        self.sock = sock
        self.answer = answer
        self.ended = 0
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 64, 8)
            except OSError:
                return
            if not data:
                return
            with socket.socket(fileno=fds[0]) as control:
                self.answer(control, fds[1:])
            for fd in fds[1:]:
                os.close(fd)

    def end(self) -> None:
        self.ended += 1
        self.sock.shutdown(socket.SHUT_RDWR)


Opened = tuple[ScriptedSandbox, Inner]


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[[Callable[[socket.socket, list[int]], None]], Opened]]:
    opened: list[Opened] = []

    def open_with(answer: Callable[[socket.socket, list[int]], None]) -> Opened:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inner = Inner(theirs, answer)
        link = Channel(ours, inner.end)
        opened.append((ScriptedSandbox("s", link, {}, anyio.lowlevel.checkpoint, restored=False), inner))
        return opened[-1]

    yield open_with
    for sandbox, inner in opened:
        await sandbox.aclose()
        inner.thread.join()
        inner.sock.close()


Script = Callable[[Callable[[socket.socket, list[int]], None]], Opened]


def saying(*lines: bytes, wait: bool = False) -> Callable[[socket.socket, list[int]], None]:
    def answer(control: socket.socket, fds: list[int]) -> None:
        control.recv(65536)
        for line in lines:
            control.send(line)
        while wait and control.recv(65536):
            pass

    return answer


async def test_a_well_behaved_end_is_believed(scripted: Script) -> None:
    sandbox, _ = scripted(saying(b"accepted\nspawned\n", b"exit 3 2\n"))
    process = await sandbox.start(["x"])
    assert await process.wait() == Exit("exit", 3, killed=2)
    await process.aclose()


async def start_and_wait(sandbox: ScriptedSandbox, terminal: TerminalSize | None = None) -> None:
    async with await sandbox.start(["x"], terminal=terminal) as process:
        await process.wait()


@pytest.mark.parametrize(
    "line",
    [
        b"exit -1 0\n",
        b"exit 0\n",
        b"exit 0 0 0\n",
        b"exit 1e3 0\n",
        b"hello\n",
        b"\n",
        b"errno \n",
        b"errno enoent\n",
        b"file nonsense\n",
        b"exit 0 0" + b" " * 60 + b"\n",
        b"x" * 65,
        b"\xff\xfe\n",
        b"stuck\n",
        "exit ٣ 0\n".encode(),
    ],
)
async def test_nonsense_ends_the_sandbox(scripted: Script, line: bytes) -> None:
    """Everything from inside is untrusted: one word out of place, and the sandbox is ended."""
    sandbox, inner = scripted(saying(b"accepted\nspawned\n", line, wait=True))
    with anyio.fail_after(3), pytest.raises(SandboxLost):
        await start_and_wait(sandbox)
    assert inner.ended == 1
    assert not sandbox.alive


async def test_silence_is_noticed(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ACCEPT_SECONDS", 0.1)
    sandbox, inner = scripted(saying(wait=True))
    with anyio.fail_after(3), pytest.raises(SandboxLost, match="answer"):
        await sandbox.start(["x"])
    assert inner.ended == 1


async def test_a_kill_that_is_ignored_ends_the_sandbox(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "END_SECONDS", 0.1)
    release = threading.Event()

    def answer(control: socket.socket, fds: list[int]) -> None:
        control.send(b"accepted\nspawned\n")
        release.wait(5)

    sandbox, inner = scripted(answer)
    process = await sandbox.start(["x"])
    await process.kill()
    with anyio.fail_after(3), pytest.raises(SandboxLost, match="killed"):
        await process.wait()
    await process.aclose()
    assert inner.ended == 1
    release.set()


async def test_a_slot_that_dies_while_it_reads_does_not_hold_us(scripted: Script) -> None:
    """A request larger than any socket buffer, of which only the first bytes are read."""

    def answer(control: socket.socket, fds: list[int]) -> None:
        control.recv(10)

    sandbox, _ = scripted(answer)
    with anyio.fail_after(3), pytest.raises(CommandRefused) as refused:
        await sandbox.start(["x", *["y" * 100_000] * 15])
    assert refused.value.code == "EAGAIN"


async def test_a_closed_stream_wakes_who_waits(scripted: Script) -> None:
    sandbox, _ = scripted(saying(b"accepted\nspawned\n", wait=True))
    process = await sandbox.start(["x"], stdin=True)
    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_closed, process.stdin.send, b"x" * 1_000_000)
            tasks.start_soon(wait_closed, process.stdout.receive, 10)
            await anyio.wait_all_tasks_blocked()
            await process.stdin.aclose()
            await process.stdout.aclose()
    await process.aclose()


async def wait_closed(use: Callable[..., Awaitable[object]], argument: object) -> None:
    with pytest.raises(anyio.ClosedResourceError):
        await use(argument)


async def test_end_of_file_is_a_signal_with_a_note(scripted: Script) -> None:
    sandbox, _ = scripted(saying(b"accepted\nspawned\n"))
    process = await sandbox.start(["x"])
    end = await process.wait()
    assert (end.how, end.code, len(end.notes)) == ("signal", 0, 1)
    assert sandbox.alive
    await process.aclose()


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process are open on a file."""
    return sum(Path(f"/proc/self/fd/{number}").resolve() == path for number in os.listdir("/proc/self/fd"))


async def test_descriptors_from_inside_are_never_received(scripted: Script, tmp_path: Path) -> None:
    (tmp_path / "offered").touch()
    held = os.open(tmp_path / "offered", os.O_RDONLY)

    def answer(control: socket.socket, fds: list[int]) -> None:
        control.recv(65536)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held] * 50))]
        control.sendmsg([b"accepted\nspawned\n"], rights)
        control.sendmsg([b"exit 0 0\n"], rights)

    sandbox, _ = scripted(answer)
    async with await sandbox.start(["x"]) as process:
        assert (await process.wait()).code == 0
        assert descriptors_of(tmp_path / "offered") == 1
    os.close(held)


@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/status", "/dev/ptmx and another"])
async def test_a_descriptor_that_is_no_terminals_master_ends_the_sandbox(scripted: Script, path: str) -> None:
    """Design 5: no descriptors but the one master of a terminal."""
    held = [os.open(one, os.O_RDWR if "dev" in one else os.O_RDONLY) for one in path.split(" and another")[:1]]
    held += held if "another" in path else []

    def answer(control: socket.socket, fds: list[int]) -> None:
        control.recv(65536)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))]
        control.sendmsg([b"accepted\nspawned\n"], rights)
        control.recv(10)

    before = len(os.listdir("/proc/self/fd"))
    sandbox, inner = scripted(answer)
    with anyio.fail_after(3), pytest.raises(SandboxLost):
        await start_and_wait(sandbox, TerminalSize())
    inner.thread.join()
    assert (inner.ended, len(os.listdir("/proc/self/fd")) <= before + 1) == (1, True)
    os.close(held[0])


async def test_a_terminal_without_its_master_ends_the_sandbox(scripted: Script) -> None:
    sandbox, inner = scripted(saying(b"accepted\nspawned\n", wait=True))
    with anyio.fail_after(3), pytest.raises(SandboxLost):
        await start_and_wait(sandbox, TerminalSize())
    assert inner.ended == 1


async def test_a_word_on_the_channel_ends_the_sandbox(scripted: Script) -> None:
    sandbox, inner = scripted(saying(b"accepted\n", wait=True))
    inner.sock.send(b"hello")
    with anyio.fail_after(3):
        while sandbox.alive:
            await anyio.sleep(0.01)


def listing(data: bytes, end: bytes = b"done 1 1\n") -> Callable[[socket.socket, list[int]], None]:
    def answer(control: socket.socket, fds: list[int]) -> None:
        control.recv(65536)
        control.send(b"accepted\n")
        os.write(fds[1], data)
        control.send(end)

    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"../up\0file\x001\x000\x000\0",
        b"/abs\0file\x001\x000\x000\0",
        b"a\0device\x001\x000\x000\0",
        b"a\0file\0x\x000\x000\0",
        b"a\0file\0",
        b"a/../../b\0file\x001\x000\x000\0",
    ],
)
async def test_a_listing_that_makes_no_sense_is_refused(scripted: Script, data: bytes) -> None:
    sandbox, _ = scripted(listing(data))
    with pytest.raises(FileRefused) as refused:
        await sandbox.list()
    assert refused.value.code == "sandbox_helper_failed"


async def test_a_listing_longer_than_asked_is_refused(scripted: Script) -> None:
    sandbox, _ = scripted(listing(b"a\0file\x001\x000\x000\0" * 3))
    with pytest.raises(FileRefused, match="more entries"):
        await sandbox.list(max_entries=2)


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"running 0 0\x001\0",
        b"running 0 0\x001\x000\x00-1\x000\x000\0title\0",
        b"exit 1000 0\x001\x001\x000\x000\x000\0title\0",
        b"paused 0 0\x001\x000\x000\x000\x000\0title\0",
        b"stuck\x001\x000\x000\x000\x000\0title\0",
        b"running 0 0\x001\x000\x000\x000\x000\0title\0more than was asked",
        b"x" * 5000,
    ],
)
async def test_a_job_that_makes_no_sense_ends_the_sandbox(scripted: Script, state: bytes) -> None:
    sandbox, inner = scripted(listing(state))
    with anyio.fail_after(5), pytest.raises(SandboxLost):
        await sandbox.jobs.read("j-1", max_bytes=10)
    assert inner.ended == 1


@pytest.mark.parametrize(
    ("word", "number", "before", "after", "asked", "how"),
    [
        ("signal", 9, (0, 0), (1, 0), False, "oom"),
        ("exit", 137, (0, 0), (1, 0), False, "oom"),
        ("signal", 9, (0, 0), (1, 0), True, "signal"),
        ("signal", 9, (1, 0), (1, 0), False, "signal"),
        ("exit", 0, (0, 0), (1, 0), False, "exit"),
        ("exit", 1, (0, 0), (0, 5), False, "pids"),
        ("exit", 0, (0, 0), (0, 5), False, "exit"),
        ("exit", 1, (-1, -1), (-1, -1), False, "exit"),
    ],
)
def test_reasons_need_a_fitting_status(
    word: str, number: int, before: tuple[int, int], after: tuple[int, int], asked: bool, how: str
) -> None:
    """Channel-facts 7: the counter moved and the program's own status fits."""
    end = name_exit(Ended(word, number), Counters(*before), Counters(*after), asked)
    assert (end.how, end.code) == (how, number)
    assert bool(end.notes) == (how in ("exit", "signal") and before != after)


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("", "/workspace"),
        (".", "/workspace"),
        ("a/../b", "/workspace/b"),
        ("//tmp//x/", "/tmp/x"),
        ("/home/agent", "/home/agent"),
        ("a/..", "/workspace"),
        ("\udcff", "/workspace/\udcff"),
    ],
)
def test_paths_become_absolute(path: str, full: str) -> None:
    assert inside(path) == full


@pytest.mark.parametrize("path", ["..", "/", "/tmpx", "/home", "/home/agent/..", "a\0", "/workspace/../x", "a/../.."])
def test_paths_outside_are_refused(path: str) -> None:
    """A36."""
    with pytest.raises(FileRefused) as refused:
        inside(path)
    assert refused.value.code == "invalid_path"


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A": "x\0"}, {"A\0": ""}])
def test_bad_variables_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(CommandRefused) as refused:
        run_request(["x"], "", env)
    assert refused.value.code == "EINVAL"


def test_a_request_is_fields_between_zero_bytes() -> None:
    assert run_request(["a", "", "ä"], "sub", {"K": "v=w"}) == (b"run\0/workspace/sub\x003\0a\0\0\xc3\xa4\0K=v=w")
