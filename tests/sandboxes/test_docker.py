"""The docker kind passes the suite of all kinds, on a real engine; and what is its own."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from sandboxes import Exit, Limits, Sandbox, SandboxLost, SandboxSpec, SandboxUnavailable, Usage
from sandboxes.cgroups import Counters, group_of_container
from sandboxes.conformance import SandboxConformance
from sandboxes.container import (
    BASE_IMAGE,
    DEFAULT_IMAGE,
    INSTANCE_LABEL,
    Container,
    Storage,
    container_name,
    labels,
    preparing_options,
)
from sandboxes.docker import AnySandbox, DockerKind, Engine, engine_version
from sandboxes.sandbox import JOBS, TERMINALS
from tests.sandboxes.support import FORKS_FOR_EVER, first_refusal, host_processes, open_descriptors, python, read, sh

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker")]

SMALL = Limits(memory=128 << 20, cpus=0.5, processes=48, workspace_size=16 << 20)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine of this test's own instance, which must have nothing left at the end."""
    engine = Engine(tmp_path / "state", instance=f"test-{secrets.token_hex(4)}")
    yield engine
    left = await engine.left()
    for name in await engine.ask(lambda api: [one["Id"] for one in api.containers(all=True, filters=mine(engine))]):
        await engine.remove(name)
    await engine.aclose()
    channels = tmp_path / "state/channels"
    assert (left, list(channels.iterdir()) if channels.exists() else []) == ([], [])


def mine(engine: Engine) -> dict[str, str]:
    return {"label": f"{INSTANCE_LABEL}={engine.instance}"}


@pytest.fixture
async def kind(engine: Engine) -> AsyncIterator[DockerKind]:
    kind = DockerKind(engine)
    yield kind
    await kind.aclose()


@pytest.fixture
async def docker(kind: DockerKind) -> AnySandbox:
    return await kind.open(SandboxSpec("session"))


@pytest.fixture
async def small(kind: DockerKind) -> AnySandbox:
    return await kind.open(SandboxSpec("small", limits=SMALL))


def inside(sandbox: Sandbox, marker: str) -> list[int]:
    """Processes of the container, which are all below its first."""
    assert isinstance(sandbox, AnySandbox)
    return host_processes(marker, below=sandbox.pid)


class Docker(SandboxConformance):
    def processes(self, sandbox: Sandbox, marker: str) -> list[int]:
        return inside(sandbox, marker)


class TestDockerInMemory(Docker):
    @pytest.fixture
    async def sandbox(self, kind: DockerKind) -> AnySandbox:
        return await kind.open(SandboxSpec("conformance"))


@pytest.mark.slow
class TestDockerOnDisk(Docker):
    @pytest.fixture
    async def sandbox(self, engine: Engine) -> AsyncIterator[AnySandbox]:
        kind = DockerKind(engine, storage="disk")
        yield await kind.open(SandboxSpec("conformance"))
        await kind.destroy("conformance")
        await kind.aclose()


class DockerByExec(Docker):
    """Without a runner inside: everything but jobs and terminals."""

    async def test_an_input_that_ends_at_once_is_seen_every_time(self, sandbox: Sandbox) -> None:
        """R15: through the engine's half-closed stream."""
        for _ in range(30):
            async with await sandbox.start(["cat"], stdin=True) as process:
                await process.stdin.aclose()
                with anyio.fail_after(20):
                    assert await process.wait() == Exit("exit", 0)

    lacks: ClassVar = frozenset({JOBS, TERMINALS})
    many_files = 60  # an exec for each
    flood_blocks, output_bytes = 100, 100_000_000  # through the engine


@pytest.mark.slow
class TestDockerByExecInMemory(DockerByExec):
    @pytest.fixture
    async def sandbox(self, engine: Engine) -> AsyncIterator[AnySandbox]:
        kind = DockerKind(engine, image=BASE_IMAGE)
        yield await kind.open(SandboxSpec("conformance"))
        await kind.aclose()


# --- what it protects from


async def test_no_privilege_inside(docker: AnySandbox) -> None:
    """seed-facts 12 row 15. A01: no capability, no new privileges, a filter, not root, on the host neither."""
    ran = await sh(docker, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; id -u")
    words = dict(line.split(":\t") for line in ran.text.splitlines()[:-1])
    assert {words[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (words["NoNewPrivs"], words["Seccomp"], ran.text.splitlines()[-1]) == ("1", "2", "1000")
    uids = next(line for line in Path(f"/proc/{docker.pid}/status").read_text().splitlines() if line.startswith("Uid"))
    assert "0" not in uids.split()[1:]


async def test_only_its_own_places_are_writable(docker: AnySandbox) -> None:
    """A02, the queues of /dev/mqueue and the channel's folder among them."""
    code = """
import os
found = []
for top, folders, files in os.walk("/"):
    if top.startswith("/proc/") and top.split("/")[2].isdigit():
        folders.clear()
        continue
    if top.startswith("/usr") and top.count("/") > 3:
        folders.clear()
    try:
        with open(os.path.join(top, ".probe"), "w"):
            found.append(top)
        os.unlink(os.path.join(top, ".probe"))
    except OSError:
        pass
print(*sorted(found))
"""
    assert (await python(docker, code)).text.split() == ["/dev/shm", "/home/agent", "/tmp", "/workspace"]


async def test_nothing_can_be_reached(docker: AnySandbox) -> None:
    """A03, A07: the host's ports on every address of its, the engine, the channel's socket; no name of a resolver."""
    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    code = f"""
import socket
found = []
for host in ("127.0.0.1", "172.17.0.1", "169.254.169.254", "10.0.0.1", "1.1.1.1"):
    for port in ({port}, 22, 80, 2375):
        with socket.socket() as s:
            s.settimeout(0.5)
            try:
                s.connect((host, port))
                found.append((host, port))
            except OSError:
                pass
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/sandgate/channel"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as s:
            try:
                s.connect(path)
                found.append(path)
            except OSError:
                pass
print(found, open("/etc/resolv.conf").read())
"""
    with listener:
        ran = await python(docker, code)
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert ran.text.split() == ["[]", "nameserver", "127.0.0.1"]
    assert ran.seconds < 5


async def test_an_open_network_is_the_sessions_own_and_goes_with_it(kind: DockerKind, engine: Engine) -> None:
    """What listens on the host is reached, another session is not (F26); the bridge is gone with its sandbox."""
    listener = socket.create_server(("0.0.0.0", 0))
    reach = """
import socket, sys
with open("/proc/net/route") as routes:
    gateway = next(line.split()[2] for line in routes if line.split()[1] == "00000000")
host = sys.argv[1] if len(sys.argv) > 2 else socket.inet_ntoa(bytes.fromhex(gateway)[::-1])
with socket.socket() as s:
    s.settimeout(2)
    try:
        s.connect((host, int(sys.argv[-1])))
        print("reached")
    except OSError:
        print("refused")
"""
    serve = """
import socket
with socket.create_server(("0.0.0.0", 7777)) as server:
    print(socket.gethostbyname(socket.gethostname()), flush=True)
    server.accept()
"""
    one, two = [await kind.open(SandboxSpec(name, network="open")) for name in ("one", "two")]
    closed = await kind.open(SandboxSpec("three"))
    with listener:
        assert (await python(one, reach, str(listener.getsockname()[1]))).text == "reached\n"
    async with await two.start(["python3", "-c", serve]) as serving:
        address = (await serving.stdout.receive()).decode().strip()
        assert (await python(one, reach, address, "7777")).text == "refused\n"
        assert (await python(two, reach, address, "7777")).text == "reached\n"
    assert (await sh(closed, "cat /proc/net/route | wc -l")).text == "1\n"
    names = [name for name in await engine.left() if name.startswith("network")]
    assert names == [f"network {container_name(engine.instance, name)}" for name in ("one", "two")]
    await one.aclose()
    await two.aclose()
    assert [name for name in await engine.left() if name.startswith("network")] == []


SYSTEM_CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def family(number, kind):
    try:
        socket.socket(number, kind, socket.IPPROTO_ICMP if (number, kind) == (2, 3) else 0).close()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
async def test_kernel_doors_are_refused(docker: AnySandbox) -> None:
    """A04, A05, A09, and the list of D.1 by number: the same answers as in the local kind."""
    code = (
        SYSTEM_CALLS
        + """
import pty
print({call(272, flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x04000000, 0x08000000)})
print({call(56, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x04000000,
                                                  0x08000000, 0x02000000)})
print(call(435, 0, 0))
print({call(number, 0, 0, 0, 0, 0) for number in (425, 426, 427, 101, 310, 311, 312, 135, 308, 165, 166, 155, 161,
      321, 298, 323, 248, 249, 250, 304, 246, 320, 175, 313, 176, 167, 169, 438, 428, 429, 430, 442)})
print(call(302, 1, 7, 0, 0), call(302, os.getppid(), 7, 0, 0), call(302, 0, 7, 0, 0))
print({call(number, 0, 0, 0, 0, 0) for number in (153, 159, 180, 212, 300, 305)})  # nobody named them
print({family(number, kind) for number, kind in ((40, 1), (16, 3), (17, 3), (38, 5), (31, 1))})
print(family(2, 3), family(2, 1), family(1, 1), family(10, 2))
master, slave = pty.openpty()
byte = ctypes.create_string_buffer(b"x")
print({call(16, slave, ctypes.c_ulong(request), byte) for request in (0x5412, 0x5412 | 1 << 32, 0x541C)})
"""
    )
    assert (await python(docker, code)).text.splitlines() == [
        "{'EPERM'}",
        "{'EPERM'}",
        "ENOSYS",
        "{'EPERM'}",
        "EPERM EPERM ok",
        "{'EPERM'}",
        "{'EAFNOSUPPORT'}",
        "EPERM ok ok ok",
        "{'EPERM'}",
    ]


async def test_runner_cannot_be_read_or_signalled(docker: AnySandbox, tmp_path: Path) -> None:
    """A06, R18: no environment, memory or descriptor of PID 1; no host path in what it shows of itself."""
    code = """
import os
for name in ("environ", "mem", "maps", "auxv", "fd", "cwd", "root", "exe", "ns/mnt"):
    path = f"/proc/1/{name}"
    try:
        os.readlink(path) if name in ("cwd", "root", "exe", "ns/mnt") else os.listdir(path) if name == "fd" else open(path, "rb").read(1)
        print("OPENED", path)
    except OSError:
        pass
print(open("/proc/1/cmdline").read().split("\\0"))
"""  # noqa: E501
    shown = (await python(docker, code)).text
    assert shown == "['python3', '-I', '-S', '-B', '/run/sandgate/runner.py', '/run/sandgate/channel', '']\n"
    await sh(docker, "for s in KILL STOP TERM INT HUP SEGV; do kill -$s 1; done; kill -9 -1")
    for _ in range(3):
        assert (await sh(docker, "echo on")).text == "on\n"


async def test_other_sandboxes_are_not_seen(kind: DockerKind) -> None:
    """A08."""
    one, two = await kind.open(SandboxSpec("one")), await kind.open(SandboxSpec("two"))
    async with await one.start(["sleep", "300.308"]):
        seen = await sh(two, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; kill -9 -1")
        assert "300.308" not in seen.text
        assert len(inside(one, "300.308")) == 1


# --- limits


async def test_fork_bomb_ends_and_a_neighbour_answers(kind: DockerKind, small: AnySandbox) -> None:
    """A13, R69."""
    neighbour = await kind.open(SandboxSpec("neighbour"))
    async with await small.start(["sh", "-c", "bomb() { bomb | bomb & bomb; }; bomb", "bomb-A13"]) as bomb:
        await anyio.sleep(0.3)
        assert len(inside(small, "bomb-A13")) <= SMALL.processes + 8
        with anyio.fail_after(2):
            assert (await sh(neighbour, "echo on")).text == "on\n"
        await bomb.kill()
        with anyio.fail_after(5):
            await bomb.wait()
    assert inside(small, "bomb-A13") == []
    assert (await sh(small, "echo on")).text == "on\n"


async def test_used_up_processes_are_named(small: AnySandbox) -> None:
    """A13: `pids` where the program failed for it, EAGAIN where it cannot even start."""
    code = """
import os, sys, time
try:
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(20); os._exit(0)
except OSError:
    sys.exit(3)
"""
    assert (await python(small, code)).exit.how == "pids"
    async with await small.start(["python3", "-c", FORKS_FOR_EVER]):
        assert (await first_refusal(small)).code == "EAGAIN"
    assert (await sh(small, "echo on")).text == "on\n"


async def test_memory_hog_is_named_and_the_sandbox_goes_on(small: AnySandbox) -> None:
    """A14: in the first and in the second call."""
    for _ in range(2):
        ran = await python(small, "x = bytearray(300 << 20); print(len(x))")
        assert (ran.exit.how, ran.exit.code) == ("oom", 9)
        assert (await sh(small, "echo on")).text == "on\n"


async def test_kills_for_memory_are_counted_without_its_processes(
    kind: DockerKind, small: AnySandbox, engine: Engine
) -> None:
    """As a gateway in a container does, by the container's name among the control groups."""
    assert (await python(small, "bytearray(1 << 30)")).exit.how == "oom"
    found = await engine.find(container_name(engine.instance, "small"))
    assert found is not None
    group = group_of_container(found["Id"])
    assert group.counters() == small.counters() != Counters()
    group.close()


async def test_cpu_is_bounded(small: AnySandbox) -> None:
    """A15."""
    code = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    assert float((await python(small, code)).text) < 1.5 * 0.65


async def test_workspace_in_memory_has_its_size(small: AnySandbox) -> None:
    """A16: bytes, by many files, within 5 %; `disk_full` for a write of ours; and it goes on."""
    ran = await sh(small, "for i in $(seq 40); do head -c 1M /dev/zero > f$i || break; done; du -sb . | cut -f1")
    assert b"No space left" in ran.err
    assert 0.95 * SMALL.workspace_size < int(ran.text) < 1.05 * SMALL.workspace_size
    with pytest.raises(Exception, match="disk full"):
        await small.write("more", b"x" * (1 << 20))
    await sh(small, "rm f*")
    assert await small.write("more", b"x" * (1 << 20)) == 1 << 20


async def test_workspace_in_memory_has_its_number_of_files(small: AnySandbox) -> None:
    """A17: a flood of empty files ends, and what is there is listed in time."""
    ran = await python(
        small, "n = 0\ntry:\n  while n < 50000: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nprint(n)"
    )
    assert 3000 < int(ran.text) < 4200
    with anyio.fail_after(10):
        assert len((await small.list()).entries) == int(ran.text)


async def test_scratch_is_small(small: AnySandbox) -> None:
    ran = await sh(small, "df -m --output=size /tmp /dev/shm /home/agent /workspace | tail -4; ulimit -c; ulimit -Hn")
    assert [int(line) for line in ran.text.split()] == [8, 8, 16, 16, 0, 1024]


async def test_usage_is_told(engine: Engine, docker: AnySandbox) -> None:
    """By the control groups and by the engine alike."""
    await python(docker, "for i in range(10**7): pass")
    seen, told = await docker.usage(), await engine.usage(container_name(engine.instance, "session"))
    for usage in (seen, told):
        assert usage.memory is not None
        assert usage.cpu_seconds is not None
        assert 1 << 20 < usage.memory < 256 << 20
        assert 0.1 < usage.cpu_seconds < 20
    assert await engine.usage("no-such-container") == Usage()


# --- the image


async def test_pip_installs_for_the_user(docker: AnySandbox) -> None:
    wheel = BytesIO()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "def main(): print('tiny')\n")
        file.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        file.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.dist-info/entry_points.txt", "[console_scripts]\ntiny = tiny:main\n")
        file.writestr("tiny-1.dist-info/RECORD", "")
    await docker.write("tiny-1-py3-none-any.whl", wheel.getvalue())
    ran = await sh(docker, "pip install --quiet --user --no-index ./tiny-*.whl && tiny", timeout=60)
    assert (ran.text, ran.exit) == ("tiny\n", Exit("exit", 0))
    assert (await sh(docker, "python -c 'import tiny; tiny.main()'")).text == "tiny\n"


async def test_the_image_is_what_an_agent_expects(docker: AnySandbox) -> None:
    await docker.write("Makefile", b"all:\n\t@echo made\n")
    commit = "git init -q . && git add . && git -c user.name=a -c user.email=a commit -qm one; git log --format=%s"
    for script, out in (
        ("id -un; id -u; cd; pwd", "agent\n1000\n/home/agent\n"),
        ("make", "made\n"),
        ("rg --line-number echo Makefile", "2:\t@echo made\n"),
        (commit, "one\n"),
        ("bash -c 'python --version | cut -d. -f1'", "Python 3\n"),
    ):
        assert (await sh(docker, script)).text == out


async def test_missing_image_is_refused_with_the_command(engine: Engine) -> None:
    """A10: nothing runs in its place."""
    kind = DockerKind(engine, image=f"{DEFAULT_IMAGE}:no-such-tag")
    probe = await kind.probe()
    assert (probe.works, probe.reason, probe.remedy) == (
        False,
        "the image sandgate/sandbox:no-such-tag is missing",
        "make it: sandgate images build",
    )
    with pytest.raises(SandboxUnavailable) as refused:
        await DockerKind(engine, image="no-such-image").open(SandboxSpec("s"))
    assert refused.value.remedy == "make it: docker pull no-such-image"


@asynccontextmanager
async def image_with_python(engine: Engine, script: str) -> AsyncIterator[str]:
    """An image whose python3 is a shell script."""
    tag = f"sandgate-test-{secrets.token_hex(4)}"
    program = "/usr/local/bin/python3"
    text = f"FROM {DEFAULT_IMAGE}\nUSER root\nRUN printf '#!/bin/sh\\n{script}' >{program} && chmod +x {program}\n"
    await engine.ask(lambda api: list(api.build(fileobj=BytesIO(text.encode()), tag=tag, rm=True)))
    try:
        yield tag
    finally:
        await engine.ask(lambda api: api.remove_image(tag, force=True))


async def refused(kind: DockerKind) -> SandboxUnavailable:
    with pytest.raises(SandboxUnavailable) as error:
        await kind.open(SandboxSpec("s"))
    return error.value


async def test_an_image_without_python_is_served_by_the_engines_exec(engine: Engine) -> None:
    kind = DockerKind(engine, image=BASE_IMAGE)
    sandbox = await kind.open(SandboxSpec("s"))
    assert (sandbox.channel, sandbox.channel_reason) == ("engine", f"the image {BASE_IMAGE} has no python3")
    assert (await sh(sandbox, "id -u")).text == "1000\n"
    probe = await kind.probe()
    assert (probe.works, probe.facts["channel"]) == (
        True,
        f"the engine's exec, slower: the image {BASE_IMAGE} has no python3",
    )
    await kind.aclose()


async def test_a_runner_that_ends_at_once_is_noticed(engine: Engine) -> None:
    async with image_with_python(engine, "exit 3") as image:
        kind = DockerKind(engine, image=image)
        with anyio.fail_after(8):
            sandbox = await kind.open(SandboxSpec("s"))
        assert sandbox.channel == "engine"
        assert "ended with code 3 before it connected" in sandbox.channel_reason
        await kind.aclose()


async def test_a_channel_folder_that_cannot_be_connected_to_is_noticed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a bounded time; the next sandbox of the image does not wait for it again."""
    monkeypatch.setattr("sandboxes.docker._OPEN_SECONDS", 2.0)
    async with image_with_python(engine, "exec sleep 60") as image:
        kind = DockerKind(engine, image=image)
        first = await kind.open(SandboxSpec("one"))
        monkeypatch.setattr("sandboxes.docker._OPEN_SECONDS", 60.0)
        with anyio.fail_after(20):
            second = await kind.open(SandboxSpec("two"))
        assert "could not connect to" in first.channel_reason
        assert second.channel_reason == first.channel_reason
        assert (await sh(second, "echo on")).text == "on\n"
        await kind.aclose()


async def test_an_image_without_a_shell_is_refused(engine: Engine) -> None:
    """R48: and nothing is left of what was made."""
    tag = f"sandgate-test-{secrets.token_hex(4)}"
    await engine.ask(lambda api: api.import_image_from_data(b"\0" * 1024, tag))
    kind = DockerKind(engine, image=tag)
    try:
        error = await refused(kind)
        assert error.message.startswith(f"the image {tag} has no python3, and no shell that serves")
        assert error.remedy == "use an image with sh and sleep, or with Python 3.9 or newer"
    finally:
        await engine.ask(lambda api: api.remove_image(tag, force=True))
    assert await engine.left() == []


async def test_only_the_containers_own_process_may_connect(
    kind: DockerKind, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is quicker than the runner is refused, and nothing is told to him."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as thief:
        start = kind._start

        async def steal(one: Container, name: str) -> None:
            monkeypatch.chdir(engine.meeting("s").folder)
            thief.connect("channel")
            await start(one, name)

        monkeypatch.setattr(kind, "_start", steal)
        error = await refused(kind)
        assert error.message == "another process than the sandbox's own answered"
        assert thief.recv(64) == b""


# --- the engine


async def test_no_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nowhere")
    kind = DockerKind(Engine(tmp_path / "state", instance="none"))
    probe = await kind.probe()
    assert (probe.works, probe.reason) == (False, f"no Docker engine at {tmp_path}/nowhere: No such file or directory")
    assert "start Docker" in probe.remedy
    assert (await refused(kind)).remedy == probe.remedy
    await kind.aclose()


async def test_an_engine_that_hangs_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/hangs")
    monkeypatch.setattr("sandboxes.docker._ENGINE_SECONDS", 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/hangs")
        listener.listen()
        kind = DockerKind(Engine(tmp_path / "state", instance="none"))
        with anyio.fail_after(5):
            probe = await kind.probe()
    assert (probe.works, probe.reason) == (False, "the Docker engine does not answer")
    await kind.aclose()


async def test_probe_names_what_is_missing_here(kind: DockerKind, docker: AnySandbox) -> None:
    """A70: probe and sandbox name the same."""
    probe = await kind.probe()
    assert (probe.kind, probe.works, probe.not_enforced) == ("docker", True, docker.not_enforced)
    assert {"engine", "cgroup version", "security", "image", "workspace"} <= set(probe.facts)
    assert ("engine: " in str(probe.not_enforced)) == (engine_version(probe.facts["engine"]) < (29, 5, 1))


def test_versions_are_numbers() -> None:
    assert [engine_version(text) for text in ("20.10.24+dfsg1", "29.5.1", "29.10", "28.0.0-rc.1", "odd")] == [
        (20, 10, 24),
        (29, 5, 1),
        (29, 10),
        (28, 0, 0),
        (0,),
    ]


# --- life and death


async def test_kinds_over_one_engine_do_not_disturb_each_other(engine: Engine) -> None:
    kinds = [DockerKind(engine), DockerKind(engine, storage="disk")]
    found = []

    async def probe(kind: DockerKind) -> None:
        found.append((await kind.probe()).works)

    async with anyio.create_task_group() as tasks:
        for kind in kinds:
            tasks.start_soon(probe, kind)
    assert found == [True, True]
    first = await kinds[0].open(SandboxSpec("one"))
    await kinds[1].open(SandboxSpec("two"))
    await kinds[1].destroy("two")
    await kinds[1].aclose()
    assert (await sh(first, "echo on")).text == "on\n"
    await kinds[0].aclose()


async def test_more_processors_than_the_machine_has_are_no_error(kind: DockerKind) -> None:
    sandbox = await kind.open(SandboxSpec("s", limits=Limits(cpus=1000)))
    assert (await sh(sandbox, "echo on")).text == "on\n"


async def test_closed_and_reopened_in_memory_is_empty(kind: DockerKind) -> None:
    first = await kind.open(SandboxSpec("s"))
    await first.write("file", b"x")
    with pytest.raises(SandboxUnavailable, match="has an open sandbox"):
        await kind.open(SandboxSpec("s"))
    await first.aclose()
    second = await kind.open(SandboxSpec("s"))
    assert (second.restored, (await second.list()).entries) == (False, ())


async def test_files_on_disk_survive_their_container_and_their_gateway(engine: Engine, tmp_path: Path) -> None:
    """R42."""
    kind = DockerKind(engine, storage="disk")
    first = await kind.open(SandboxSpec("s"))
    await first.write("file", b"x")
    await first.write("/home/agent/file", b"y")
    assert not first.restored
    assert "workspace_size: per file only" in first.not_enforced
    await kind.aclose()
    again = DockerKind(Engine(tmp_path / "state", instance=engine.instance), storage="disk")
    second = await again.open(SandboxSpec("s"))
    assert (second.restored, await read(second, "file"), await read(second, "/home/agent/file")) == (True, b"x", b"y")
    await again.destroy("s")
    await again.destroy("s")
    assert await engine.left() == []
    third = await again.open(SandboxSpec("s"))
    assert (third.restored, (await third.list()).entries) == (False, ())
    await again.destroy("s")
    await again.aclose()


async def test_volumes_that_were_not_handed_over_are_made_anew(engine: Engine, tmp_path: Path) -> None:
    """A gateway that was killed while it prepared them: the next life removes them."""
    name = container_name(engine.instance, "s")
    one = Container(engine.instance, "s", DEFAULT_IMAGE, tmp_path, "disk")
    await engine.create(preparing_options(one), f"{name}-prepare")
    assert len(await engine.left()) == 3
    kind = DockerKind(engine, storage="disk")
    sandbox = await kind.open(SandboxSpec("s"))
    assert not sandbox.restored
    assert await sandbox.write("file", b"x") == 1
    await kind.destroy("s")
    await kind.aclose()


async def test_a_container_removed_behind_our_back_is_lost_and_the_next_one_works(
    kind: DockerKind, engine: Engine, docker: AnySandbox
) -> None:
    process = await docker.start(["sleep", "60"])
    await engine.remove(container_name(engine.instance, "session"))
    with anyio.fail_after(5):
        for attempt in (process.wait(), sh(docker, "true")):
            with pytest.raises(SandboxLost) as lost:
                await attempt
            assert lost.value.files_lost
    await process.aclose()
    assert not docker.alive
    assert (await sh(await kind.open(SandboxSpec("session")), "echo on")).text == "on\n"


async def test_a_killed_runner_is_lost_and_on_disk_no_files_are(engine: Engine) -> None:
    kind = DockerKind(engine, storage="disk")
    sandbox = await kind.open(SandboxSpec("s"))
    await sandbox.write("file", b"x")
    async with await sandbox.start(["sleep", "60"]) as process:
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxLost) as lost:
            await process.wait()
    assert not lost.value.files_lost
    assert await read(await kind.open(SandboxSpec("s")), "file") == b"x"
    await kind.destroy("s")
    await kind.aclose()


async def test_a_container_left_by_its_name_is_replaced(kind: DockerKind, engine: Engine, tmp_path: Path) -> None:
    await kind.probe()
    options = preparing_options(Container(engine.instance, "s", DEFAULT_IMAGE, tmp_path))
    await engine.create(options, container_name(engine.instance, "s"))
    assert (await sh(await kind.open(SandboxSpec("s")), "echo on")).text == "on\n"


async def test_sweep_removes_its_own_orphans_and_nobody_elses(
    kind: DockerKind, engine: Engine, docker: AnySandbox, tmp_path: Path
) -> None:
    """A65: the next life of one instance removes what it left; another instance's sandbox goes on."""
    other = Engine(tmp_path / "other", instance=f"test-{secrets.token_hex(4)}")
    one = Container(other.instance, "orphan", DEFAULT_IMAGE, tmp_path)
    await other.create(preparing_options(one), container_name(other.instance, "orphan"))
    await other.create_network(one.name, labels(other.instance, "orphan"))
    (tmp_path / "other/channels/orphan").mkdir(parents=True)
    assert len(await other.left()) == 2
    await other.host()
    assert await other.left() == []
    assert list((tmp_path / "other/channels").iterdir()) == []
    await other.aclose()
    assert (await sh(docker, "echo on")).text == "on\n"


async def test_a_killed_gateway_leaves_no_process_and_its_next_life_no_container(
    engine: Engine, tmp_path: Path
) -> None:
    """A60: the runner ends as its channel closes; what is left is a record, which the next start sweeps."""
    code = """
import anyio, pathlib, sys
from sandboxes import SandboxSpec
from sandboxes.docker import DockerKind, Engine
async def main():
    kind = DockerKind(Engine(pathlib.Path(sys.argv[1]), instance=sys.argv[2]))
    sandbox = await kind.open(SandboxSpec("s"))
    async with await sandbox.start(["sleep", "300"]):
        print(sandbox.pid, flush=True)
        await anyio.sleep(60)
anyio.run(main)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "state"), engine.instance]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as gateway:
        assert gateway.stdout is not None
        pid = int(await anyio.to_thread.run_sync(gateway.stdout.readline))
        gateway.kill()
    with anyio.fail_after(2):
        while Path(f"/proc/{pid}").exists():
            await anyio.sleep(0.02)
    assert await engine.left() == [f"container /{container_name(engine.instance, 's')}"]
    await engine.host()
    assert await engine.left() == []


async def test_cancelled_opening_leaves_nothing(engine: Engine) -> None:
    """R48."""
    kind = DockerKind(engine)
    await engine.host()
    for seconds in (0.01, 0.05, 0.1, 0.15, 0.2):
        with anyio.move_on_after(seconds):
            await kind.open(SandboxSpec("s"))
        await kind.destroy("s")
    assert await engine.left() == []
    await kind.aclose()


@pytest.mark.needs("root")
async def test_a_full_disk_refuses_a_sandbox_leaves_nothing_and_harms_no_other(
    docker: AnySandbox, engine: Engine, tmp_path: Path
) -> None:
    """A disk of the gateway's own, too full for the channel's folder; space back, it works."""
    small = tmp_path / "small"
    small.mkdir()
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)])
    try:
        filler = small / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        full = DockerKind(Engine(small, instance=engine.instance))
        full.keep(["session"])
        with pytest.raises(SandboxUnavailable, match="No space left"):
            await full.open(SandboxSpec("s"))
        assert await engine.left() == [f"container /{container_name(engine.instance, 'session')}"]
        assert (await sh(docker, "echo on")).text == "on\n"
        filler.unlink()
        assert (await sh(await full.open(SandboxSpec("s")), "echo on")).text == "on\n"
        await full.aclose()
    finally:
        await anyio.run_process(["umount", "--lazy", str(small)])


async def test_state_folder_of_any_length(tmp_path: Path, engine: Engine) -> None:
    """A socket's path has at most 107 bytes."""
    long = Engine(tmp_path / ("x" * 150) / "state", instance=engine.instance)
    kind = DockerKind(long)
    assert (await sh(await kind.open(SandboxSpec("s")), "echo on")).text == "on\n"
    await kind.aclose()


async def test_read_only_paths_are_shown_read_only(kind: DockerKind, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / "file").write_text("shown")
    sandbox = await kind.open(SandboxSpec("s", read_only=(folder,)))
    ran = await sh(sandbox, f"cat {folder}/file; touch {folder}/new")
    assert (ran.text, ran.exit.code != 0) == ("shown", True)


async def test_gateway_keeps_no_descriptors(kind: DockerKind) -> None:
    """A26: after calls, kills and sandboxes it holds what it held before. (The SDK keeps a connection for each of the
    last 25 addresses that it asked.)"""

    async def rounds(names: str) -> int:
        for name in names:
            sandbox = await kind.open(SandboxSpec(name))
            await sh(sandbox, "sleep 10", timeout=0.05)
            await sandbox.aclose()
            await kind.destroy(name)
        return open_descriptors()

    before = await rounds("abcdef")
    assert await rounds("ghijkl") <= before


async def test_several_open_and_close_at_once(kind: DockerKind, engine: Engine) -> None:
    """R47."""
    opened: list[AnySandbox] = []

    async def one(number: int) -> None:
        opened.append(await kind.open(SandboxSpec(f"s{number}")))

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(one, number)
    assert [(await sh(sandbox, "echo on")).text for sandbox in opened] == ["on\n"] * 6
    await kind.aclose()
    assert await engine.left() == []


# --- the gateway's next life


async def staying(kind: DockerKind, session_id: str = "s", seconds: float = 60, **more: Any) -> AnySandbox:
    """A sandbox that outlives its gateway."""
    sandbox = await kind.open(SandboxSpec(session_id, **more))
    sandbox.stay(time.time() + seconds)
    return sandbox


@asynccontextmanager
async def next_life(engine: Engine, *session_ids: str, storage: Storage = "memory") -> AsyncIterator[DockerKind]:
    """The docker kind of a gateway that starts again, with the sessions that go on."""
    kind = DockerKind(engine_again(engine), storage=storage)
    kind.keep(session_ids)
    yield kind
    for session_id in session_ids:
        await kind.destroy(session_id)
    await kind.aclose()


def engine_again(engine: Engine) -> Engine:
    return Engine(engine.meeting("any").folder.parents[1], instance=engine.instance)


async def until_gone(pid: int, seconds: float) -> None:
    with anyio.fail_after(seconds):
        while Path(f"/proc/{pid}").exists():
            await anyio.sleep(0.02)


@pytest.mark.parametrize("storage", ["memory", "disk"])
async def test_a_sandbox_that_was_left_is_taken_up(engine: Engine, storage: Storage) -> None:
    """R39, R42: the same container with its files and its jobs; the call that ran has ended, the next one works."""
    first = await staying(DockerKind(engine, storage=storage))
    await first.write("file", b"x")
    await first.jobs.start("job", ["sh", "-c", "echo begun; read line; echo $line"])
    process = await first.start(["sleep", "4720.1"])
    await first.leave()
    with pytest.raises(SandboxLost, match="the gateway has stopped"):
        await process.wait()
    await process.aclose()
    async with next_life(engine, "s", storage=storage) as kind:
        assert await kind.survivors() == {"s"}
        second = await staying(kind)
        assert (second.pid, second.taken_up, second.restored) == (first.pid, True, True)
        assert (await read(second, "file"), second.counters().oom) == (b"x", 0)
        assert (await sh(second, "cat file; ls /run/sandgate")).text == "xrunner.py\n"
        assert inside(second, "4720.1") == []
        await second.jobs.write("job", b"on\n")
        with anyio.fail_after(5):
            while (await second.jobs.read("job")).data != b"begun\non\n":
                await anyio.sleep(0.02)
    await until_gone(first.pid, 1)
    await engine.aclose()


async def test_a_killed_gateways_sandbox_is_taken_up(engine: Engine, tmp_path: Path) -> None:
    """A60, R34."""
    code = """
import anyio, pathlib, sys, time
from sandboxes import SandboxSpec
from sandboxes.docker import DockerKind, Engine
async def main():
    kind = DockerKind(Engine(pathlib.Path(sys.argv[1]), instance=sys.argv[2]))
    sandbox = await kind.open(SandboxSpec("s"))
    sandbox.stay(time.time() + 60)
    await sandbox.write("file", b"x")
    async with await sandbox.start(["sh", "-c", "(setsid sleep 4721.1 &); sleep 4721.2"]):
        print(sandbox.pid, flush=True)
        await anyio.sleep(60)
anyio.run(main)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "state"), engine.instance]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as gateway:
        assert gateway.stdout is not None
        pid = int(await anyio.to_thread.run_sync(gateway.stdout.readline))
        gateway.kill()
    async with next_life(engine, "s") as kind:
        sandbox = await staying(kind)
        assert (sandbox.pid, await read(sandbox, "file")) == (pid, b"x")
        with anyio.fail_after(2):
            while inside(sandbox, "4721."):
                await anyio.sleep(0.02)


async def test_only_sessions_that_go_on_keep_what_was_left(engine: Engine) -> None:
    """A65: of any other session nothing stays, volumes neither."""
    memory, disk = DockerKind(engine), DockerKind(engine, storage="disk")
    for sandbox in (await staying(memory, "kept"), await staying(memory, "not"), await staying(disk, "nor")):
        await sandbox.leave()
    async with next_life(engine, "kept", "unknown") as kind:
        assert await kind.survivors() == {"kept"}
        assert await engine.left() == [f"container /{container_name(engine.instance, 'kept')}"]


async def test_a_sandbox_without_a_gateway_ends_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """D.1, lifetime: the runner sees to it itself."""
    monkeypatch.setattr("sandboxes.docker._LATE_SECONDS", 1)
    sandbox = await staying(DockerKind(engine), seconds=0)
    await sandbox.leave()
    await until_gone(sandbox.pid, 5)
    async with next_life(engine, "s"):
        pass


async def test_a_sandbox_ends_in_time_while_its_gateway_sleeps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.docker._LATE_SECONDS", 1)
    kind = DockerKind(engine)
    sandbox = await staying(kind, seconds=0)
    async with await sandbox.start(["sleep", "4722"]) as process:
        with pytest.raises(SandboxLost), anyio.fail_after(5):
            await process.wait()
    await kind.aclose()


async def test_what_died_without_a_gateway_is_lost_once(engine: Engine) -> None:
    """R44: the files went with it; the next opening works. On disk nothing is lost."""
    for storage in ("memory", "disk"):
        first = await staying(DockerKind(engine, storage=storage))
        await first.write("file", b"x")
        await first.leave()
        await engine.remove(container_name(engine.instance, "s"))
        async with next_life(engine, "s", storage=storage) as kind:
            assert await kind.survivors() == set()
            if storage == "memory":
                with pytest.raises(SandboxLost) as lost:
                    await staying(kind)
                assert lost.value.files_lost
            second = await staying(kind)
            assert (second.taken_up, second.restored) == (False, storage == "disk")
            assert len((await second.list()).entries) == (storage == "disk")


async def test_a_sandbox_of_other_limits_is_not_taken_up(engine: Engine) -> None:
    """What the operator narrowed meanwhile holds: nothing goes on under the old options."""
    first = await staying(DockerKind(engine))
    await first.leave()
    async with next_life(engine, "s") as kind:
        with pytest.raises(SandboxLost):
            await staying(kind, limits=SMALL)
        await until_gone(first.pid, 1)
        assert not (await staying(kind, limits=SMALL)).taken_up


async def test_a_program_that_poses_as_the_runner_is_sent_away(engine: Engine) -> None:
    """It may connect while the gateway waits for the runner: it has neither its pid nor its secret."""
    first = await staying(DockerKind(engine))
    code = """
import socket, time
held = []
while True:
    try:
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[-1].settimeout(0.01)
        held[-1].connect("/run/sandgate/channel")
        held[-1].send(b"again\\0" + b"0" * 32)
        held[-1].recv(64)
    except OSError:
        time.sleep(0.001)
    held = held[-50:]
"""
    name = container_name(engine.instance, "s")
    started = await engine.ask(lambda api: api.exec_create(name, ["python3", "-c", code]))
    await engine.ask(lambda api: api.exec_start(started["Id"], detach=True))
    await first.leave()
    async with next_life(engine, "s") as kind:
        second = await staying(kind)
        assert (second.pid, second.taken_up) == (first.pid, True)
        assert (await sh(second, "echo on")).text == "on\n"


async def test_a_sandbox_of_the_pool_is_taken_up_as_any_other(engine: Engine) -> None:
    """It bears its session's name by then, and is what would be made for that session today."""
    kind = DockerKind(engine)
    first = await kind.open(SandboxSpec("pool-1"))
    await kind.hand_over(first, SandboxSpec("s", env={"GREETING": "hello"}))
    first.stay(time.time() + 60)
    await first.write("file", b"x")
    assert await engine.left() == [f"container /{container_name(engine.instance, 'pool-1')}"]
    await first.leave()
    assert await engine.left() == [f"container /{container_name(engine.instance, 's')}"]
    async with next_life(engine, "s") as again:
        second = await staying(again, env={"GREETING": "hello"})
        assert (second.pid, second.taken_up) == (first.pid, True)
        assert (await sh(second, "cat file; echo $GREETING")).text == "xhello\n"
