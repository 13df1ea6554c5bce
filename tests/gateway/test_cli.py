"""Commands that need no running gateway: help, init, config, token, and what errors look like."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from gateway.cli.app import run
from gateway.cli.serve import Plain
from gateway.cli.template import ABOUT, UNSET, default_toml
from gateway.settings import Settings, load_settings
from tests.gateway.commandline import environment, sandgate

Typed = Callable[..., tuple[int, str, str]]
OPERATE = ("demo", "init", "doctor", "images", "config", "serve", "token")
COMMANDS = (*OPERATE, "exec", "attach", "sessions", "calls", "close")


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    """Run a command in this process, in a folder of its own: its exit code, and what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SANDGATE_STATE_DIR", str(tmp_path / "state"))

    def run_here(*arguments: str, **variables: str) -> tuple[int, str, str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = run(arguments)
        return code, *capsys.readouterr()

    return run_here


def test_help_lists_every_command_and_how_to_begin() -> None:
    done = sandgate("--help")
    assert done.returncode == 0
    assert [name for name in COMMANDS if f"  {name} " not in done.stdout] == []
    assert "sandgate init && sandgate doctor && sandgate serve" in done.stdout


def test_help_imports_nothing_of_the_server_or_the_client() -> None:
    code = (
        "import sys\nfrom gateway.cli.app import run\nrun(['--help'])\n"
        "print([name for name in ('fastapi', 'pydantic', 'httpx2', 'fsspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_it(command: str, typed: Typed) -> None:
    code, out, err = typed(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: sandgate {command}" in out


def test_version_is_the_distributions(typed: Typed) -> None:
    assert typed("--version") == (0, f"{version('sandgate')}\n", "")


def test_unknown_command_names_the_nearest(typed: Typed) -> None:
    assert typed("serv") == (
        2,
        "",
        "error: no such command: serv; did you mean serve?\n  sandgate --help lists the commands.\n",
    )


def test_unknown_option_names_the_nearest(typed: Typed) -> None:
    code, _, err = typed("serve", "--prt", "1")
    assert code == 2
    assert "Did you mean --port?" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calls"], "error: SESSION is missing\n  sandgate calls --help says what there is.\n"),
        (["serve", "now"], "error: no place for 'now' here\n  sandgate serve --help says what there is.\n"),
        (["token", "--state-dir"], "--state-dir"),
        (["images", "bild"], 'Did you mean "build"?'),
        (["exec"], "error: no command\n"),
        (["exec", "--timout", "1", "--", "ls"], "error: no such option: --timout\n"),
    ],
    ids=" ".join,
)
def test_usage_errors_say_what_is_wrong(typed: Typed, words: list[str], message: str) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (125 if words[0] == "exec" else 2, "")
    assert message in err


BASE_INSTALL = """
import sys
from gateway.cli.app import NEEDS_SERVER, run
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NEEDS_SERVER:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.exit(run(sys.argv[1:]))
"""


def base_install(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BASE_INSTALL, *arguments],
        capture_output=True,
        text=True,
        env=environment(**variables),
        check=False,
    )


@pytest.mark.parametrize("command", ["serve", "init", "doctor", "config", "demo"])
def test_base_install_answers_server_commands_with_what_to_type(command: str) -> None:
    done = base_install(command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this command needs the gateway; type: pip install 'sandgate[server]'\n"


@pytest.mark.parametrize("command", [["exec", "--", "ls"], ["sessions"], ["calls", "s-1"]])
def test_base_install_runs_client_commands(command: list[str], tmp_path: Path) -> None:
    done = base_install(*command, SANDGATE_URL="http://127.0.0.1:9", SANDGATE_STATE_DIR=str(tmp_path))
    assert done.returncode == (125 if command[0] == "exec" else 1)
    assert "error: no gateway at http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_log_record_is_one_line_whatever_it_holds() -> None:
    record = logging.LogRecord(
        "gateway", logging.WARNING, "", 0, "no such tool %s", ('x\n{"level": "x"}\x1b[2J',), None
    )
    assert Plain("%(message)s").format(record) == 'no such tool x\\x0a{"level": "x"}\\x1b[2J'


# init


def test_init_writes_the_defaults_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = sandgate("init", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_settings() == (Settings(), tmp_path)


def test_init_states_every_default() -> None:
    text = default_toml()
    keys = [key for key in ABOUT if "." in key and key not in (*UNSET, "profiles.limits")]
    assert [key for key in keys if f"\n{key.rpartition('.')[2]} = " not in text] == []
    assert [section for section in Settings.model_fields if f"[{section}" not in text] == []


def test_init_examples_are_valid_when_their_marks_are_removed(tmp_path: Path) -> None:
    text = "".join(
        line.removeprefix("# ")
        if line.startswith(
            (
                "# [",
                "# use",
                "# tools",
                "# name",
                "# argv",
                "# param",
                "# otherwise",
                "# rules",
                "# timeout",
                "# on_fail",
                "# descr",
                "# uri",
                "#   {",
                "# ]",
                "# command",
                "# url",
                "# token_env",
                "# stateless",
            )
        )
        else line
        for line in default_toml().splitlines(keepends=True)
    )
    (tmp_path / "sandgate.toml").write_text(text)
    settings, _ = load_settings(tmp_path / "sandgate.toml")
    assert (len(settings.hooks), len(settings.tools), list(settings.permissions)) == (1, 2, ["careful"])


def test_init_marks_what_the_machine_does_not_enforce() -> None:
    assert "on this machine: not limited" in default_toml(["cpus: not limited"])


def test_init_overwrites_only_when_told(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "sandgate.toml"
    file.write_text("[server]\nport = 1\n")
    code, _, err = typed("init", str(file))
    assert (code, file.read_text()) == (1, "[server]\nport = 1\n")
    assert "is there already" in err
    assert typed("init", str(file), "--force")[0] == 0
    assert "port = 8710" in file.read_text()


# config


def test_config_says_where_each_setting_comes_from(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "sandgate.toml").write_text("[server]\nport = 9000\n[profiles.build]\n[agent]\nprofiles = ['build']\n")
    _, out, _ = typed("config", "--json", SANDGATE_SERVER__SESSIONS="7")
    found = {one["key"]: (one["value"], one["source"]) for one in json.loads(out)["settings"]}
    assert found["server.port"] == (9000, "sandgate.toml")
    assert found["server.sessions"] == (7, "SANDGATE_SERVER__SESSIONS")
    assert found["server.host"] == ("127.0.0.1", "default")
    assert found["profiles.build.limits.memory"] == (1 << 30, "default")
    assert found["agent.profiles"] == (["build"], "sandgate.toml")


def test_config_shows_no_secret(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "sandgate.toml").write_text(
        "[profiles.default]\nenv = { PASSWORD = 'canary-1' }\n"
        "[store]\nuri = 's3://canary-2:canary-3@bucket'\noptions = { client_kwargs = { key = 'canary-4' } }\n"
        "[[hooks]]\nuse = 'a:B'\noptions = { value = 'canary-5' }\n"
    )
    for more in ([], ["--json"]):
        code, out, err = typed("config", *more, SANDGATE_AGENT_TOKEN="canary-6")
        assert (code, err) == (0, "")
        assert "canary" not in out
        assert "SANDGATE_AGENT_TOKEN" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server\n", "not valid TOML"),
        ("[server]\nprot = 1\n", "server.prot: no such key; did you mean 'port'?"),
        ("[profiles.default.limits]\nmemry = 1\n", "no such key; did you mean 'memory'?"),
    ],
)
@pytest.mark.parametrize("command", ["config", "serve", "doctor"])
def test_wrong_configuration_is_refused_with_the_nearest_name(
    command: str, text: str, message: str, typed: Typed, tmp_path: Path
) -> None:
    (tmp_path / "sandgate.toml").write_text(text)
    code, out, err = typed(command)
    assert (code, out) == (1, "")
    assert message in err
    assert not (tmp_path / "state").exists()


def test_serve_with_a_broken_file_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "sandgate.toml").write_text("[server\n")
    done = sandgate("serve", cwd=tmp_path, SANDGATE_STATE_DIR=str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: sandgate.toml: not valid TOML")
    assert "Traceback" not in done.stderr


def test_unknown_variable_is_refused_with_the_nearest_name(typed: Typed) -> None:
    code, _, err = typed("config", SANDGATE_SERVER__PROT="1")
    assert code == 1
    assert "did you mean 'port'?" in err


# token


def test_token_prints_the_one_of_the_state_folder(tmp_path: Path) -> None:
    first = sandgate("token", "agent", "--state-dir", str(tmp_path / "state")).stdout.strip()
    assert first.startswith("sandgate_agent_")
    assert sandgate("token", "agent", "--state-dir", str(tmp_path / "state")).stdout.strip() == first
    assert (tmp_path / "state" / "tokens" / "agent").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_token_rotate_makes_a_new_one_and_leaves_the_other(typed: Typed) -> None:
    def token(role: str, *more: str) -> str:
        return typed("token", role, *more)[1]

    agent, operator = token("agent"), token("operator")
    rotated = token("agent", "--rotate")
    assert (rotated != agent, token("agent"), token("operator")) == (True, rotated, operator)


def test_token_of_an_unusable_folder_is_an_error(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    code, out, err = typed("token", "agent")
    assert (code, out) == (1, "")
    assert "--state-dir" in err
