"""`sandgate serve`, and the commands that ask a running gateway: whole processes, over a real sandbox."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.gateway.commandline import SANDGATE, Serving, environment, on_terminal, sandgate, serve

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.needs("local")]

HOSTILE = "\x1b]8;;http://x\x07\x9b2J\u202e[bold]x[/bold]\r\nforged"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would act upon; new lines and tabs are a program's own affair."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One gateway for all tests that only ask; its state folder's path is longer than a socket's may be."""
    with serve(tmp_path_factory.mktemp("cli") / ("long-" * 30) / "state") as running:
        yield running


def asking(gateway: Serving) -> dict[str, str]:
    """The variables by which a client finds it."""
    return {"SANDGATE_URL": gateway.url, "SANDGATE_STATE_DIR": str(gateway.state_dir)}


def opened(gateway: Serving, **request: object) -> str:
    answer = httpx2.post(
        f"{gateway.url}/v1/sessions", json=request, headers={"authorization": f"Bearer {gateway.token('agent')}"}
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def called(gateway: Serving, session: str, tool: str, **arguments: object) -> None:
    answer = httpx2.post(
        f"{gateway.url}/v1/sessions/{session}/calls",
        json={"tool": tool, "arguments": arguments},
        headers={"authorization": f"Bearer {gateway.token('agent')}"},
    )
    assert answer.status_code == 200, answer.text


# serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_the_tokens_are_and_ends_with_0(number: int, tmp_path: Path) -> None:
    with serve(tmp_path / "state") as running:
        assert httpx2.get(f"{running.url}/readyz").status_code == 200
        tokens = [running.token(role) for role in ("operator", "agent")]
        code, out, err = running.stop(number)
    said = running.said + out + err
    assert code == 0
    assert str(tmp_path / "state" / "tokens" / "agent") in said
    assert [token for token in tokens if token in said] == []
    assert err == ""


def test_serve_shows_the_profile_and_what_is_not_enforced(gateway: Serving) -> None:
    assert "profile  default: local, network none" in gateway.said
    assert "workspace_size" in gateway.said


def test_serve_ends_though_a_hook_hangs_in_its_thread(tmp_path: Path) -> None:
    """A58: nothing can end a thread, and Python would wait for it."""
    (tmp_path / "my_hang.py").write_text(
        "import time\nfrom gateway.hooks.hook import Continue, Hook\n"
        "class Hangs(Hook):\n    def pre_tool_call(self, ctx, call):\n        time.sleep(600)\n"
    )
    (tmp_path / "sandgate.toml").write_text('[[hooks]]\nuse = "my_hang:Hangs"\ntimeout_seconds = 0.1\n')
    with serve(tmp_path / "state", "--config", str(tmp_path / "sandgate.toml")) as gateway:
        assert "no answer within 0.1 s" in gateway.run("exec", "--", "true").stderr
        assert gateway.stop()[0] == 0


def test_serve_lets_a_running_call_end_before_it_stops(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as running:
        client = subprocess.Popen(
            [SANDGATE, "exec", "--", "sh", "-c", "echo started; sleep 1; echo done"],
            env=environment(**asking(running)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        code, _, _ = running.stop()
        assert (code, client.stdout.read()) == (0, "done\n")
        client.stdout.close()
        client.wait()


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_serve_asked_twice_cancels_what_runs_and_ends(numbers: tuple[int, int], tmp_path: Path) -> None:
    """Ctrl-C twice is what people do; the second does not wait for calls any longer, and cuts nothing else short."""
    with serve(tmp_path / "state") as running:
        session = opened(running)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(called, running, session, "bash", command="sleep 60")
            time.sleep(0.5)
            running.process.send_signal(numbers[0])
            time.sleep(0.5)
            started = time.monotonic()
            code, out, _ = running.stop(numbers[1])
            call.result(10)
    assert (code, time.monotonic() - started < 8) == (0, True)
    assert "once more (Ctrl-C) cancels them now" in out


def test_serve_on_a_taken_port_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = sandgate("serve", "--port", port, "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "--port" in done.stderr
    assert not (tmp_path / "state").exists()


def test_serve_over_a_state_folder_in_use_says_so(gateway: Serving) -> None:
    done = sandgate("serve", "--port", "0", "--state-dir", str(gateway.state_dir))
    assert done.returncode == 1
    assert "in use by another gateway" in done.stderr


def test_serve_for_the_network_without_names_is_refused(tmp_path: Path) -> None:
    done = sandgate("serve", "--host", "0.0.0.0", "--port", "0", "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 1
    assert "0.0.0.0 can be reached from the network" in done.stderr
    assert "server.allowed_hosts" in done.stderr


def test_serve_for_the_network_names_a_url_that_works_here(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with serve(state_dir, "--host", "0.0.0.0", SANDGATE_SERVER__ALLOWED_HOSTS='["gateway"]') as gateway:
        [url] = re.findall(r"export SANDGATE_URL=(\S+)", gateway.said)
        assert url == gateway.url.replace("0.0.0.0", "localhost")
        assert sandgate("sessions", SANDGATE_URL=url, SANDGATE_STATE_DIR=str(state_dir)).returncode == 0


def test_serve_with_a_kind_that_does_not_work_starts_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "sandgate.toml").write_text("[profiles.default]\nkind = 'tests.gateway.test_doctor:Broken'\n")
    with serve(tmp_path / "state", cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2])) as running:
        assert "DOES NOT WORK HERE: it is broken" in running.said
        assert "mend it" in running.said
        ready = httpx2.get(f"{running.url}/readyz")
        assert (ready.status_code, ready.json()["kinds"][0]["remedy"]) == (503, "mend it")
        assert running.stop()[0] == 0


# exec


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        (["echo", "hello there"], 0, "hello there\n", ""),
        (["sh", "-c", "echo o; echo e >&2; exit 7"], 7, "o\n", "e\n"),
        (["printf", "%s", 'a\'b "c" $d'], 0, 'a\'b "c" $d', ""),
    ],
)
def test_exec_is_like_the_command_itself(command: list[str], code: int, out: str, err: str, gateway: Serving) -> None:
    done = gateway.run("exec", "--", *command)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_exec_passes_bytes_as_they_are(gateway: Serving) -> None:
    done = subprocess.run(
        [SANDGATE, "exec", "--", "printf", r"\033[1m\377\0"],
        capture_output=True,
        check=True,
        env=environment(**asking(gateway)),
    )
    assert done.stdout == b"\x1b[1m\xff\0"


def test_exec_shows_escapes_on_a_terminal(gateway: Serving) -> None:
    seen = on_terminal("exec", "--", "printf", r"\033]52;c;eA==\007\302\233\342\200\256\tok\n", **asking(gateway))
    assert seen == b"\\x1b]52;c;eA==\\x07\\x9b\\u202e\tok\r\n"


def test_exec_streams_output_as_it_comes(gateway: Serving) -> None:
    with subprocess.Popen(
        [SANDGATE, "exec", "--", "sh", "-c", "echo first; sleep 30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(**asking(gateway)),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


def test_exec_that_takes_too_long_is_124(gateway: Serving) -> None:
    done = gateway.run("exec", "--timeout", "0.3", "--", "sh", "-c", "echo x; sleep 30")
    assert (done.returncode, done.stdout) == (124, "x\n")
    assert "timeout: ended after 0.3 s" in done.stderr
    assert "Ask for more with --timeout" in done.stderr


def test_exec_ended_by_a_signal_is_128_and_its_number(gateway: Serving) -> None:
    assert gateway.run("exec", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("arguments", [[], ["--profile", "absent", "--", "ls"], ["--timeout", "9999", "--", "ls"]])
def test_exec_that_did_not_run_is_125(arguments: list[str], gateway: Serving) -> None:
    done = gateway.run("exec", *arguments)
    assert (done.returncode, done.stdout) == (125, "")
    assert "Traceback" not in done.stderr


def test_exec_with_a_stdin_that_never_closes_returns_when_the_command_ends(gateway: Serving) -> None:
    """R14."""
    reader, writer = os.pipe()
    try:
        started = time.monotonic()
        done = subprocess.run(
            [SANDGATE, "exec", "--", "cat"],
            stdin=reader,
            capture_output=True,
            timeout=20,
            check=False,
            env=environment(**asking(gateway)),
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"")
    assert time.monotonic() - started < 15


def test_exec_closes_its_session_unless_told_to_keep_it(gateway: Serving) -> None:
    kept = gateway.run("exec", "--keep", "--", "true").stderr.split()[1]
    gateway.run("exec", "--", "true")
    open_ones = [
        one["id"]
        for one in json.loads(gateway.run("sessions", "--json").stdout)
        if one["labels"] == {"client": "sandgate exec"}
    ]
    assert open_ones == [kept]
    assert gateway.run("close", kept).returncode == 0


# sessions and calls


def test_tables_show_nothing_that_a_terminal_obeys(gateway: Serving) -> None:
    session = opened(gateway, labels={HOSTILE: HOSTILE})
    called(gateway, session, HOSTILE, **{HOSTILE: HOSTILE})
    for command in (["sessions"], ["calls", session], ["calls", session, "1"]):
        done = gateway.run(*command)
        assert done.returncode == 0, done.stderr
        assert OBEYED.findall(done.stdout) == []
        assert "\nforged" not in done.stdout
        assert "[bold]" in done.stdout
        assert OBEYED.findall(gateway.run(*command, "--json").stdout) == []


def test_calls_shows_one_call_as_a_timeline(gateway: Serving) -> None:
    session = opened(gateway)
    called(gateway, session, "Bash", command="seq 1 20000", timeout=1000)
    shown = gateway.run("calls", session[:12], "1").stdout
    for part in (
        "c-0001 bash, asked for as Bash",
        "accepted",
        '"timeout": 1000',
        "in force",
        '"timeout_s": 1',
        "offload      stored at post_tool_call: 0001-bash-stdout",
        "ran          bash",
        "ended        ok after",
        f"sandgate://{session}/results/0001-bash-stdout",
    ):
        assert part in shown
    record = json.loads(gateway.run("calls", session, "c-0001", "--json").stdout)
    assert (record["status"], record["requested_tool"]) == ("ok", "Bash")


def test_calls_of_a_session_that_is_not_there_is_an_error(gateway: Serving) -> None:
    done = gateway.run("calls", "s-absent")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no session with an id that begins with 's-absent'" in done.stderr


def test_sessions_fit_a_terminal(gateway: Serving) -> None:
    """80 columns, whatever the names; a program gets all of it."""
    session = opened(gateway, labels={"purpose": "a label that is longer than what is left of the line"})
    called(gateway, session, "bash", command="true")
    shown = on_terminal("sessions", COLUMNS="80", **asking(gateway)).decode()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [
        "session",
        "profile",
        "kind",
        "channel",
        "calls",
        "age",
        "idle",
        "memory",
        "cpu",
        "labels",
    ]
    assert any(line.startswith(session[:6]) and " direct " in line for line in lines)
    unenforced = " ".join(lines).partition("local: not enforced: ")[2]  # an ordinary user has more of it
    assert "workspace_size: per file only" in unenforced
    [record] = [one for one in json.loads(gateway.run("sessions", "--json").stdout) if one["id"] == session]
    assert {"memory", "cpu_seconds", "not_enforced"} <= set(record)
    gateway.run("close", session)


def test_sessions_are_those_of_the_token(gateway: Serving) -> None:
    session = opened(gateway)
    token = gateway.run("token", "agent").stdout.strip()
    assert session in gateway.run("sessions", SANDGATE_TOKEN=token).stdout
    refused = gateway.run("sessions", SANDGATE_TOKEN="wrong")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert gateway.run("close", session).returncode == 0
    assert session not in gateway.run("sessions").stdout
    assert session in gateway.run("sessions", "--all").stdout


def test_commands_without_a_gateway_say_how_to_get_one(tmp_path: Path) -> None:
    done = sandgate("sessions", SANDGATE_URL="http://127.0.0.1:9", SANDGATE_STATE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "sandgate serve" in done.stderr


# results


def test_results_are_listed_shown_saved_and_searched(gateway: Serving, tmp_path: Path) -> None:
    session = opened(gateway)
    called(gateway, session, "bash", command="seq 1 200000")
    called(gateway, session, "bash", command="head -c 40000 /dev/zero")
    numbers = "".join(f"{number}\n" for number in range(1, 200_001))
    listed = gateway.run("results", session[:12]).stdout
    assert re.search(r"0001-bash-stdout +stdout +1.2 MiB +text/plain; charset=utf-8", listed)
    assert [one["bytes"] for one in json.loads(gateway.run("results", session, "--json").stdout)] == [1_288_895, 40_000]
    assert gateway.run("results", session, "0001").stdout == numbers
    saved = gateway.run("results", session, f"sandgate://{session}/results/0001-bash-stdout", "--save", str(tmp_path))
    assert saved.stdout.startswith("1.2 MiB to ")
    assert (tmp_path / "0001-bash-stdout").read_text() == numbers
    found = gateway.run("results", session, "0001", "--grep", "^1999[89]$")
    assert (found.returncode, found.stdout) == (0, "19998:19998\n19999:19999\n")
    assert gateway.run("results", session, "0001", "--grep", "x").returncode == 1


def test_results_show_nothing_that_a_terminal_obeys(gateway: Serving) -> None:
    session = opened(gateway)
    called(gateway, session, "bash", command=r"for i in $(seq 1 9000); do printf '\033[2Jx\n'; done")
    called(gateway, session, "bash", command="head -c 40000 /dev/zero")
    shown = on_terminal("results", session, "0001", **asking(gateway))
    assert b"\x1b[2J" not in shown
    assert b"\\x1b[2Jx" in shown
    assert b"0002-bash-stdout is no text" in on_terminal("results", session, "0002", **asking(gateway))


def test_long_transfer_shows_how_far_it_is(gateway: Serving, tmp_path: Path) -> None:
    session = opened(gateway)
    called(gateway, session, "bash", command="head -c 100000000 /dev/zero")
    shown = on_terminal("results", session, "0001", "--save", str(tmp_path / "zeros"), **asking(gateway))
    assert b"MB/s" in shown
    assert (tmp_path / "zeros").stat().st_size == 100_000_000
