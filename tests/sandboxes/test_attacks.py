"""Attacks on the local kind, run for real inside it."""

import ctypes
import os
import socket
import stat
import threading
import time
from pathlib import Path

import anyio
import pytest

from sandboxes import Exit, FileRefused, LocalKind, SandboxSpec
from sandboxes.local import LocalSandbox
from tests.sandboxes.support import gone, host_processes, open_descriptors, python, read, run, sh

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


async def test_no_privilege_inside(local: LocalSandbox, tmp_path: Path) -> None:
    """A01: no capability, no new privileges, a filter, and a file it wrote is not root's on the host."""
    ran = await sh(local, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; id -u; touch mine")
    words = dict(line.split(":\t") for line in ran.text.splitlines()[:-1])
    assert {words[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (words["NoNewPrivs"], words["Seccomp"]) == ("1", "2")
    assert ran.text.splitlines()[-1] == "1000"
    owner = (tmp_path / "state/workspaces/session/workspace/mine").stat().st_uid
    assert owner == os.geteuid() or owner in range(60000, 61000)
    assert owner != 0


async def test_only_its_own_places_are_writable(local: LocalSandbox) -> None:
    """A02."""
    code = """
import os
found = []
for top, folders, files in os.walk("/"):
    if top.startswith("/proc/") and top.split("/")[2].isdigit():
        folders.clear()
        continue
    if top.startswith(("/usr", "/root", "/opt")) and top.count("/") > 3:
        folders.clear()
    try:
        with open(os.path.join(top, ".probe"), "w"):
            found.append(top)
        os.unlink(os.path.join(top, ".probe"))
    except OSError:
        pass
    if top.startswith("/proc/sys"):
        for name in files:
            try:
                os.close(os.open(os.path.join(top, name), os.O_WRONLY))
                found.append(os.path.join(top, name))
            except OSError:
                pass
print(*sorted(found))
"""
    ran = await python(local, code)
    assert ran.text.split() == ["/dev/shm", "/home/agent", "/tmp", "/workspace"]
    assert (await sh(local, "ls /sys")).exit.code != 0


async def test_nothing_can_be_reached(local: LocalSandbox) -> None:
    """A03, A07, A11: loopback, metadata, engines, abstract sockets of the host: nothing hears of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0sandgate-test-abstract")
    abstract.listen()
    port = listener.getsockname()[1]
    code = f"""
import socket
def reached(family, address, kind=socket.SOCK_STREAM):
    s = socket.socket(family, kind)
    s.settimeout(0.5)
    try:
        s.connect(address)
        if kind == socket.SOCK_DGRAM:
            s.send(b"x")
        return [address]
    except OSError:
        return []
    finally:
        s.close()
found = []
for host in ("127.0.0.1", "172.17.0.1", "169.254.169.254", "10.0.0.1", "1.1.1.1"):
    for port in ({port}, 22, 80, 2375, 2376, 8710):
        found += reached(socket.AF_INET, (host, port))
for host in ("fe80::1", "2606:4700:4700::1111"):
    found += reached(socket.AF_INET6, (host, 80))
found += reached(socket.AF_INET6, ("::1", {port}))
found += reached(socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM)
found += reached(socket.AF_UNIX, "\\0sandgate-test-abstract")
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
    found += reached(socket.AF_UNIX, path)
print(found)
"""
    with listener, abstract:
        ran = await python(local, code)
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert ran.text == "[]\n"
    assert ran.seconds < 5


async def test_socket_families_are_refused(local: LocalSandbox) -> None:
    """A04."""
    code = """
import errno, socket
for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5), (2, 3), (10, 3), (31, 1)):
    try:
        socket.socket(family, kind, socket.IPPROTO_ICMP if kind == 3 and family in (2, 10) else 0).close()
        print(family, "open")
    except OSError as error:
        print(family, errno.errorcode[error.errno])
socket.socket(socket.AF_INET).close(); socket.socketpair()
"""
    ran = await python(local, code)
    assert ran.text.splitlines() == [
        "40 EAFNOSUPPORT",
        "16 EAFNOSUPPORT",
        "17 EAFNOSUPPORT",
        "38 EAFNOSUPPORT",
        "2 EPERM",
        "10 EPERM",
        "31 EAFNOSUPPORT",
    ]
    assert ran.exit == Exit("exit", 0)


SYSTEM_CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
async def test_namespaces_and_kernel_doors_are_refused(local: LocalSandbox) -> None:
    """A05, and the list of D.1 and D.2 by number."""
    code = (
        SYSTEM_CALLS
        + """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x04000000, 0x08000000, 0x02000000):
    print("unshare", call(272, flag), "clone", call(56, flag | 17, 0, 0, 0, 0))
print("clone3", call(435, 0, 0))
for number in (425, 426, 427, 101, 310, 311, 312, 135, 308, 165, 166, 155, 161, 321, 298, 323, 248, 249, 250, 304, 246,
               320, 175, 313, 176, 167, 169, 438, 428, 429, 430, 442):
    print(number, call(number, 0, 0, 0, 0, 0))
print("prlimit", call(302, 1, 7, 0, 0), call(302, os.getppid(), 7, 0, 0), call(302, 0, 7, 0, 0))
print("x32", call(0x40000000 + 39))
"""
    )
    lines = (await python(local, code)).text.splitlines()
    assert lines[:7] == ["unshare EPERM clone EPERM"] * 7
    assert lines[7] == "clone3 ENOSYS"
    assert {line.split()[1] for line in lines[8:-2]} == {"EPERM"}
    assert lines[-2:] == ["prlimit EPERM EPERM ok", "x32 EPERM"]


async def test_unshare_program_is_refused(local: LocalSandbox) -> None:
    """A05."""
    for option in ("-U", "-m", "-n", "-r", "-p"):
        assert (await run(local, "unshare", option, "true")).exit.code != 0


async def test_runner_cannot_be_read(local: LocalSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A06, K20: PID 1 and the slots give away no environment, no memory, no descriptor, and no host path."""
    code = """
import os
for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) < os.getpid() - 1]:
    for name in ("environ", "mem", "maps", "auxv", "io", "fd", "cwd", "root", "exe", "ns/mnt", "map_files"):
        path = f"/proc/{pid}/{name}"
        try:
            os.listdir(path) if os.path.isdir(path) and name != "cwd" else open(path, "rb").read(1)
            if name in ("cwd", "root", "exe", "ns/mnt"):
                os.readlink(path)
            print("OPENED", path)
        except OSError:
            pass
print(open("/proc/1/cmdline").read())
print(open("/proc/self/mountinfo").read())
"""
    ran = await python(local, code)
    assert "OPENED" not in ran.text
    assert "state/workspaces" not in ran.text.splitlines()[0]
    assert "runner.py" in ran.text


async def test_other_processes_are_not_seen(kind: LocalKind) -> None:
    """A08: two sessions do not see, signal or share memory with each other or the host."""
    one, two = await kind.open(SandboxSpec("one")), await kind.open(SandboxSpec("two"))
    async with await one.start(["sleep", "300.308"]):
        seen = await sh(two, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; kill -0 -1; ls /dev/shm; ipcs -a | wc -l")
        assert "300.308" not in seen.text
        await sh(two, "kill -9 -1")
        assert len(host_processes("300.308")) == 1
    await sh(one, "ipcmk -M 100 -Q >/dev/null; touch /dev/shm/x /tmp/x")
    assert (await sh(two, "ls /dev/shm /tmp; ipcs -m | grep -c 0x")).text == "/dev/shm:\n\n/tmp:\n0\n"


async def test_terminal_push_back_is_refused(local: LocalSandbox) -> None:
    """A09: also with a bit set above the low 32."""
    code = (
        SYSTEM_CALLS
        + """
import pty
master, slave = pty.openpty()
byte = ctypes.create_string_buffer(b"x")
for request in (0x5412, 0x5412 | 1 << 32, 0x541C):
    print(call(16, slave, ctypes.c_ulong(request), byte))
"""
    )
    ran = await python(local, code)
    assert ran.text.split() == ["EPERM"] * 3


async def test_preload_stays_inside(local: LocalSandbox, tmp_path: Path) -> None:
    """A12: variables that make programs run code do so inside, or not at all; the gateway is not touched."""
    await local.write("evil.py", b"open('/workspace/ran', 'w').write('x')")
    ran = await run(
        local,
        "python3",
        "-c",
        "print(1)",
        env={"PYTHONSTARTUP": "/workspace/evil.py", "LD_PRELOAD": "/workspace/evil.so", "BASH_ENV": "x"},
    )
    assert ran.text == "1\n"
    assert await read(local, "evil.py")


async def test_links_lead_nowhere_on_the_host(local: LocalSandbox, tmp_path: Path) -> None:
    """A27, A29: a link planted by the workload reaches nothing of the host, also when it is swapped in meanwhile."""
    secret = tmp_path / "secret"
    secret.write_text("canary")
    await sh(local, f"ln -s {secret} link; ln -s ../../../../../..{secret} up; ln -s /etc/hostname host")
    for path in ("link", "up", "host"):
        with pytest.raises(FileRefused):
            await read(local, path)
    await local.write("real", b"content")
    swap = "while :; do mv real keep; ln -s /etc/passwd real; rm real; mv keep real; done"
    async with await local.start(["sh", "-c", swap]):
        for _ in range(200):
            try:
                assert await read(local, "real") == b"content"
            except FileRefused as error:
                assert error.code in ("invalid_path", "missing_file", "file_changed")  # noqa: PT017


async def test_planted_set_uid_has_no_effect(local: LocalSandbox, tmp_path: Path) -> None:
    """A32: a set-uid file of the workload belongs to its own uid, and mounts are nosuid inside."""
    await sh(local, "cp /bin/sh shell; chmod 4777 shell")
    path = tmp_path / "state/workspaces/session/workspace/shell"
    assert path.stat().st_uid != 0
    assert (await sh(local, "./shell -p -c 'id -u'")).text == "1000\n"
    assert "nosuid" in (await sh(local, "grep ' /workspace ' /proc/self/mountinfo")).text


async def test_folders_deeper_than_any_path(local: LocalSandbox) -> None:
    """A38: 3,000 levels, the deepest closed: beyond what one path can name."""
    code = (
        "import os; os.mkdir('top'); os.chdir('top')\n"
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    )
    assert (await python(local, code)).exit == Exit("exit", 0)
    listing = await local.list(recursive=True)
    assert (len(listing.entries), listing.complete) == (101, False)  # the top, and 100 levels below it
    await local.remove("top", recursive=True)
    assert (await local.list()).entries == ()


async def test_host_folders_are_closed(local: LocalSandbox, tmp_path: Path) -> None:
    """A42, for workspaces: nobody else on this machine reads them."""
    for path in ("state", "state/workspaces", "state/workspaces/session", "state/workspaces/session/workspace"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700


# --- PID 1 and the slots


@pytest.mark.parametrize("name", ["KILL", "STOP", "TERM", "INT", "HUP", "QUIT", "SEGV", "USR1", "TSTP", "RTMIN"])
async def test_pid_1_cannot_be_signalled(local: LocalSandbox, name: str) -> None:
    await sh(local, f"kill -{name} 1; sleep 0.02")
    with anyio.fail_after(2):
        assert (await sh(local, "echo on")).text == "on\n"


async def test_kill_all_ends_only_calls(local: LocalSandbox) -> None:
    """R18: `kill -9 -1` takes the slots: calls end as `signal` with a note, never as ok; the sandbox goes on."""
    ran = await sh(local, "kill -9 -1; sleep 1")
    assert (ran.exit.how, ran.exit.code) in (("signal", 0), ("signal", 9))
    for _ in range(5):
        assert (await sh(local, "echo on")).text == "on\n"


KILL_SLOT = "kill -{signal} $PPID; echo sent; sleep 300.401"


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
async def test_a_killed_or_stopped_slot_is_replaced(local: LocalSandbox, signal: str) -> None:
    """The call ends with a note, its orphans die, and a call beside it lives."""
    async with await local.start(["sh", "-c", "sleep 1; echo lived"]) as beside:
        with anyio.fail_after(1):
            ran = await sh(local, KILL_SLOT.format(signal=signal))
        assert (ran.exit.how, ran.exit.code, bool(ran.exit.notes)) == ("signal", 0, True)
        assert await gone("300.401")
        assert (await sh(local, "echo on")).text == "on\n"
        assert (await beside.wait()).code == 0
        assert await beside.stdout.receive() == b"lived\n"


async def test_all_slots_stopped_again_and_again(local: LocalSandbox) -> None:
    script = "for p in $(seq 2 40); do kill -STOP $p; done 2>/dev/null; sleep 0.1"
    for _ in range(5):
        await sh(local, script)
        with anyio.fail_after(2):
            assert (await sh(local, "echo on")).text == "on\n"


async def test_a_storm_of_hoppers_is_ended(local: LocalSandbox) -> None:
    """A22: processes that fork and leave their session for ever, at a normal end of their call."""
    code = """
import os, sys
for _ in range(20):
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
print("away")
"""
    with anyio.fail_after(5):
        ran = await run(local, "python3", "-c", code, "hopper-A22")
    assert ran.text == "away\n"
    assert host_processes("hopper-A22") == []
    assert (await sh(local, "echo on")).text == "on\n"


async def test_children_without_exit_signal_are_reaped(local: LocalSandbox) -> None:
    code = (
        SYSTEM_CALLS
        + """
if libc.syscall(56, 0, 0, 0, 0, 0) == 0:
    os.execvp("sleep", ["sleep", "300.402"])
"""
    )
    ran = await python(local, code)
    assert ran.exit.how == "exit"
    assert host_processes("300.402") == []


async def test_reopened_pipes_cannot_keep_a_call(local: LocalSandbox) -> None:
    """A program of another call that holds our pipe's other end: the call is over all the same."""
    grab = "while :; do for p in /proc/[0-9]*; do exec 9>$p/fd/1 && while :; do echo stolen >&9; done; done; done"
    async with await local.start(["sh", "-c", grab + " 2>/dev/null"]):
        for _ in range(10):
            with anyio.fail_after(3):
                ran = await sh(local, "sleep 0.05; echo mine", timeout=2)
            assert "mine" in ran.text or ran.timed_out or ran.exit.how == "signal"


async def test_descriptors_of_a_program_are_three(local: LocalSandbox) -> None:
    ran = await sh(local, "ls /proc/self/fd; readlink /proc/self/fd/0")
    assert ran.text.split() == ["0", "1", "2", "3", "/dev/null"]


async def test_gateway_keeps_no_descriptors(kind: LocalKind) -> None:
    """A26, A25: after many calls, kills and sandboxes, the gateway holds what it held before."""
    await kind.probe()
    before = open_descriptors()
    for number in range(3):
        sandbox = await kind.open(SandboxSpec(f"s{number}"))
        await sh(sandbox, "sleep 10", timeout=0.05)
        await sh(sandbox, "kill -9 $PPID")
        await sandbox.write("x", b"y")
        await sandbox.aclose()
        await kind.destroy(f"s{number}")
    assert open_descriptors() == before


async def test_read_only_paths_are_shown_read_only(kind: LocalKind, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)  # to all but root, who shows what is in it
    folder = tmp_path / "closed" / "data"
    folder.mkdir(mode=0o755)
    (folder / "file").write_text("shown")
    sandbox = await kind.open(SandboxSpec("s", read_only=(folder,)))
    ran = await sh(sandbox, f"cat {folder}/file; touch {folder}/new")
    assert (ran.text, ran.exit.code != 0) == ("shown", True)


async def test_cpu_of_idle_sandbox_is_nothing(local: LocalSandbox) -> None:
    await sh(local, "true")
    pids = host_processes("/run/sandgate/runner.py")
    assert pids

    def ticks() -> int:
        return sum(int(value) for pid in pids for value in Path(f"/proc/{pid}/stat").read_text().split()[13:15])

    before = ticks()
    await anyio.sleep(0.5)
    assert ticks() - before <= 1


async def test_threads_do_not_start_bubblewrap(kind: LocalKind) -> None:
    """A sandbox opened while threads come and go stays alive: its parent is the launcher, not a thread of ours."""
    sandbox = await kind.open(SandboxSpec("s"))
    await anyio.to_thread.run_sync(time.sleep, 0.01)
    for thread in [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(4)]:
        thread.start()
        thread.join()
    assert (await sh(sandbox, "echo on")).text == "on\n"


def test_this_file_needs_no_libc_of_its_own() -> None:
    assert ctypes.sizeof(ctypes.c_long) == 8
