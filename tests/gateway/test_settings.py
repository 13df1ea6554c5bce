"""Settings: the file, the environment over it, and a clear word for everything that is wrong."""

from pathlib import Path

import pytest

from gateway.build import imported, open_state
from gateway.errors import SettingsError, StateError
from gateway.settings import Settings, load_settings, state_dir


def written(folder: Path, text: str) -> Path:
    file = folder / "sandgate.toml"
    file.write_text(text)
    return file


def test_starts_with_no_file_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings, folder = load_settings()
    assert (settings, folder) == (Settings(), tmp_path)


def test_table_of_defaults() -> None:
    """The one table of design section 7."""
    settings = Settings()
    server, profile = settings.server, settings.profiles["default"]
    limits = profile.limits
    assert (server.host, server.port, server.sessions, server.live_sandboxes) == ("127.0.0.1", 8710, 100, 20)
    assert (server.json_body, server.upload, server.replay_seconds) == (4 << 20, 2 << 30, 10)
    assert (profile.kind, profile.network, profile.permission) == ("local", "none", "auto")
    assert (profile.idle_seconds, profile.lifetime_seconds) == (900, 4 * 3600)
    assert (limits.call_seconds, limits.max_call_seconds, limits.parallel_calls) == (120, 600, 8)
    assert (limits.memory, limits.cpus, limits.processes, limits.open_files) == (1 << 30, 1, 128, 1024)
    assert (limits.output, limits.workspace_size, limits.results_size) == (1 << 20, 512 << 20, 2 << 30)
    assert (settings.agent.profiles, settings.store.retention_hours) == (("default",), 24)
    assert [(rule.tools, rule.when, rule.over_chars) for rule in settings.offload.rules] == [
        (("read_result", "read_file", "ls", "glob", "grep", "job_output"), "never", None),
        (("*",), None, 30_000),
    ]


def test_environment_comes_before_the_file_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, '[server]\nport = 1\nhost = "127.0.0.2"\n[profiles.default.limits]\nmemory = "2GiB"\n')
    monkeypatch.setenv("SANDGATE_SERVER__PORT", "2")
    monkeypatch.setenv("SANDGATE_PROFILES__DEFAULT__LIMITS__PROCESSES", "7")
    settings, folder = load_settings(file)
    assert (settings.server.port, settings.server.host) == (2, "127.0.0.2")
    limits = settings.profiles["default"].limits
    assert (limits.memory, limits.processes) == (2 << 30, 7)
    assert folder == tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "server.prot: no such key; did you mean 'port'?"),
        ("[servr]\n", "servr: no such key; did you mean 'server'?"),
        ("[profiles.default]\nnetwrk = 'none'\n", "profiles.default.netwrk: no such key; did you mean 'network'?"),
        (
            "[profiles.default.limits]\nmemry = 1\n",
            "profiles.default.limits.memry: no such key; did you mean 'memory'?",
        ),
        ("[[hooks]]\nuse = 'a:b'\ntimeout = 1\n", "hooks.0.timeout: no such key; did you mean 'timeout_seconds'?"),
        ("[server]\nport = 99999\n", "server.port: Input should be less than or equal to 65535"),
        ("[profiles.default]\nnetwork = ['a']\n", "profiles.default.network: a list of hosts is not supported yet"),
        (
            "[profiles.default]\npermission = 'carefull'\n[permissions.careful]\n",
            "profiles.default.permission: no such permission 'carefull'; did you mean 'careful'?",
        ),
        ("[agent]\nprofiles = ['defualt']\n", "agent.profiles: no such profile 'defualt'; did you mean 'default'?"),
        ("[offload]\nrules = [{tools = ['*']}]\n", "offload.rules.0: give exactly one of 'when', 'over_chars'"),
        ("[server\n", "not valid TOML"),
        ("[profiles.default]\nnetwork = 'open'\n", "profiles.default: network 'open' needs kind = 'docker': a local"),
        ("[profiles.default]\nkind = 'none'\nnetwork = 'open'\n", "profiles.default: network 'open' needs kind"),
        ("[profiles.default]\nnetwork = 'host'\n", "profiles.default.network: no such network; use 'none' or 'open'"),
        ("[profiles.default]\nimage = 'x'\n", "profiles.default: 'image' needs kind = 'docker'"),
        ("[profiles.default]\nworkspace = 'disk'\n", "profiles.default: 'workspace' needs kind = 'docker'"),
        ("[profiles.default]\nkind = 'dokcer'\n", "profiles.default.kind: no such kind 'dokcer'"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        load_settings(written(tmp_path, text))
    assert message in wrong.value.message
    assert wrong.value.message.startswith(str(tmp_path))
    assert wrong.value.remedy


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("SANDGATE_SERVR__PORT", "SANDGATE_SERVER__PORT"),
        ("SANDGATE_SERVER__PROT", "port"),
        ("SANDGATE_STATEDIR", "SANDGATE_STATE_DIR"),
        ("SANDGATE_AGENT_TOKE", "SANDGATE_AGENT_TOKEN"),
        ("SANDGATE_PORT", ""),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch, name: str, nearest: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert name in wrong.value.message
    assert nearest in wrong.value.message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SERVER__PORT", "abc", "server.port: Input should be a valid integer"),
        ("SERVER", '{"prot": 1}', "server.prot: no such key; did you mean 'port'?"),
        ("SERVER", "{bad", "a list or a table is written as JSON"),
        ("AGENT__PROFILES", "default", "a list or a table is written as JSON"),
        ("AGENT__PROFILES", '["defualt"]', "agent.profiles: no such profile 'defualt'; did you mean 'default'?"),
        ("PROFILES__DEFAULT__KND", "docker", "no such key 'knd'; did you mean 'kind'?"),
        ("PROFILES__DEFAULT__KIND", "dokcer", "profiles.default.kind: no such kind 'dokcer'"),
        ("PROFILES__DEFAULT__IMAGE", "x", "profiles.default: 'image' needs kind = 'docker'"),
        ("PROFILES__DEFAULT__LIMITS", "none", "a list or a table is written as JSON"),
        ("PROFILES__DEFAULT__POOL__MIN", "a", "profiles.default.pool.min: Input should be a valid integer"),
        ("PROFILES__DEFAULT__POOL__MN", "1", "no such key 'mn'; did you mean 'min'?"),
        ("PROFILES__DEFAULT__POOL", "1", "profiles.default.pool: Input should be a valid dictionary"),
        ("HOOKS", '[{"use": 1}]', "hooks.0.use: Input should be a valid string"),
    ],
)
def test_what_is_wrong_in_a_variable_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """And not the file beside it, which says something else."""
    monkeypatch.setenv(f"SANDGATE_{name}", value)
    with pytest.raises(SettingsError) as wrong:
        load_settings(written(tmp_path, "[store]\nretention_hours = 1\n"))
    assert wrong.value.message.startswith(f"SANDGATE_{name}: {message}")
    assert wrong.value.remedy


def test_clients_variables_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SANDGATE_URL", "SANDGATE_TOKEN", "SANDGATE_TEST_ANYTHING", "SANDGATE_STATE_DIR"):
        monkeypatch.setenv(name, "x")
    load_settings()


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as wrong:
        load_settings(tmp_path / "absent.toml")
    assert "sandgate init" in wrong.value.remedy


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().server.port = 1


def test_state_folder_comes_from_option_then_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDGATE_STATE_DIR", "/from/variable")
    assert state_dir(Path("/from/option")) == Path("/from/option")
    assert state_dir() == Path("/from/variable")
    monkeypatch.delenv("SANDGATE_STATE_DIR")
    assert state_dir().name == "sandgate"


def test_state_folder_is_private_and_held_by_one(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    with pytest.raises(StateError, match="in use by another gateway"):
        open_state(tmp_path / "state")
    state.release()
    again = open_state(tmp_path / "state")
    assert again.instance == state.instance
    again.release()


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_such_module:Hook", "no_such_module"), ("json:Nothing", "Nothing"), ("json", "no dotted path")],
)
def test_dotted_path_that_leads_nowhere_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        imported(path, tmp_path)
