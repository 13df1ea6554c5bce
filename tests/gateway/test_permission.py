"""Permissions: which rule decides, what a pattern means, and that nothing is allowed that was not read."""

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.build import check_configuration
from gateway.errors import SettingsError
from gateway.hooks.permission import MODES, PermissionPolicy, PermissionRule, Permissions, Ruling, session_policy
from gateway.hooks.script import MAX_SCRIPT_CHARACTERS, RUNNERS, read_script
from gateway.matching import words_match
from gateway.models import Arguments
from tests.gateway.conftest import served, settings_of

pytestmark = pytest.mark.anyio


def policy(*rules: dict[str, Any], otherwise: str = "auto") -> PermissionPolicy:
    return PermissionPolicy.model_validate({"otherwise": otherwise, "rules": rules})


def bash(command: str, *rules: dict[str, Any]) -> str:
    """What rules of `bash` say of a command."""
    return policy(*({"tools": ["bash"], **rule} for rule in rules)).decide("bash", {"command": command}).mode


# rules


def test_first_matching_rule_wins() -> None:
    """Seed-facts 12 row 6: names and globs, in the order of the list."""
    one = policy(
        {"tools": ["write_file"], "otherwise": "ask"},
        {"tools": ["write_*", "edit_file"], "otherwise": "deny"},
        otherwise="auto",
    )
    tools = ("write_file", "write_all", "edit_file", "bash")
    assert [one.decide(tool, {}).mode for tool in tools] == ["ask", "deny", "deny", "auto"]


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        ("git push origin", "deny"),
        ("git push", "deny"),
        ("git commit -m x", "ask"),
        ("git status", "auto"),
        ("git log", "ask"),
        ("git status; git push", "deny"),
        ("git status && git commit", "ask"),
    ],
)
def test_inside_a_rule_deny_comes_before_ask_before_allow(command: str, mode: str) -> None:
    """Seed-facts 5 row 6: deny, then ask, then allow; a rule that allows asks about the rest."""
    rule = {"deny": ["git push *"], "ask": ["git commit *"], "allow": ["git status *", "git commit *"]}
    assert bash(command, rule) == mode


@pytest.mark.parametrize(
    ("rule", "default", "mode"),
    [
        ({"deny": ["rm *"]}, "auto", "auto"),
        ({"deny": ["rm *"]}, "deny", "deny"),
        ({"deny": ["rm *"], "otherwise": "auto"}, "deny", "auto"),
        ({"allow": ["ls *"]}, "auto", "ask"),
        ({"allow": ["ls *"]}, "deny", "deny"),
        ({"allow": ["ls *"], "otherwise": "deny"}, "auto", "deny"),
        ({"allow": ["ls *"], "otherwise": "auto"}, "deny", "auto"),
    ],
)
def test_what_no_pattern_decides_is_otherwise(rule: dict[str, Any], default: str, mode: str) -> None:
    assert policy({"tools": ["bash"], **rule}, otherwise=default).decide("bash", {"command": "date"}).mode == mode


@pytest.mark.parametrize("profile", MODES)
@pytest.mark.parametrize("session", MODES)
async def test_of_two_policies_the_stricter_holds(profile: str, session: str) -> None:
    """Seed-facts 12 row 6: a session only tightens: auto < ask < deny."""
    both = Permissions((session_policy(profile), session_policy(session)))
    strictest = max(profile, session, key=MODES.index)
    assert (await both.decide("bash", {}, {})).mode == strictest


def test_a_ruling_says_whether_the_pattern_is_known_to_match() -> None:
    """An approver is not told that a call is what it may not be."""
    rule = PermissionRule(tools=("bash",), deny=("curl *",), ask=("rm *",))
    assert rule.decide("bash", {"command": "rm x"}, "auto") == Ruling("ask", "rm *")
    assert rule.decide("bash", {"command": "sh -c ls"}, "auto") == Ruling("ask", "curl *", certain=False)


async def test_deny_patterns_are_judged_on_the_original_arguments_too() -> None:
    """Seed-facts 11 row 2: a hook's rewrite does not hide what was asked; ask and allow look at the final ones."""
    rules = Permissions((policy({"tools": ["bash"], "deny": ["rm *"], "ask": ["mv *"], "allow": ["ls *"]}),))
    removed: Arguments = {"command": "rm x"}
    moved: Arguments = {"command": "mv x y"}
    listed: Arguments = {"command": "ls"}
    assert (await rules.decide("bash", removed, listed)).mode == "deny"
    assert (await rules.decide("bash", moved, listed)).mode == "auto"
    assert (await rules.decide("bash", listed, moved)).mode == "ask"
    assert (await rules.decide("bash", listed, removed)).mode == "deny"


@pytest.mark.parametrize(
    ("pattern", "arguments", "mode"),
    [
        ({"file_path": "*.env"}, {"file_path": "a/b.env"}, "deny"),
        ({"file_path": ".env"}, {"file_path": "x/.././.env"}, "deny"),
        ({"file_path": "*.env", "limit": "1*"}, {"file_path": "a.env", "limit": 10}, "deny"),
        ({"file_path": "*.env", "limit": "1*"}, {"file_path": "a.env"}, "auto"),
        ({"file_path": "*.ENV"}, {"file_path": "a.env"}, "auto"),
        ({"flag": "true"}, {"flag": True}, "deny"),
    ],
)
def test_argument_patterns_are_globs_over_the_whole_text(
    pattern: dict[str, str], arguments: dict[str, Any], mode: str
) -> None:
    assert policy({"tools": ["read_file"], "deny": [pattern]}).decide("read_file", arguments).mode == mode


def test_argument_pattern_allows_no_path_that_climbs() -> None:
    one = policy({"tools": ["read_file"], "allow": [{"file_path": "docs/*"}], "otherwise": "deny"})
    paths = ("docs/a/b.md", "docs/../.env", "docs")
    assert [one.decide("read_file", {"file_path": path}).mode for path in paths] == ["auto", "deny", "deny"]


@pytest.mark.parametrize(
    "rule",
    [
        {"tools": ["bash"]},
        {"tools": [], "otherwise": "deny"},
        {"tools": ["read_file"], "deny": ["curl *"]},
        {"tools": ["bash"], "deny": ["  "]},
        {"tools": ["bash"], "deny": [{}]},
        {"tools": ["bash"], "otherwise": "allow"},
        {"tools": ["bash"], "denied": ["curl *"]},
    ],
    ids=repr,
)
def test_a_rule_that_says_nothing_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        PermissionRule.model_validate(rule)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"tools": ["Bash"], "otherwise": "deny"}, "'Bash' matches no tool; did you mean 'bash'?"),
        ({"tools": ["bash", "writ_*"], "otherwise": "deny"}, "'writ_*' matches no tool; did you mean 'write_file'?"),
        (
            {"tools": ["read_file"], "deny": [{"path": "*.env"}]},
            "no tool of read_file has an argument 'path'; did you mean 'file_path'?",
        ),
        ({"tools": ["tickets__close"], "deny": [{"reason": "*"}]}, ""),
        ({"tools": ["*"], "deny": [{"file_path": "*.env"}]}, ""),
    ],
)
def test_a_rule_that_would_never_apply_is_refused(tmp_path: Path, rule: dict[str, Any], said: str) -> None:
    settings = settings_of(permissions={"careful": {"rules": [rule]}})
    if not said:
        check_configuration(settings, tmp_path)
        return
    with pytest.raises(SettingsError) as refused:
        check_configuration(settings, tmp_path)
    assert refused.value.message == f"permissions.careful: {said}"


@pytest.mark.parametrize("glob", ["(a+)+$", "*a*a*a*a*a*a*a*b", "[a-z]*[a-z]*[a-z]*!", "?*?*?*?*?*b"])
@pytest.mark.parametrize("letters", [40, 1_000_000])
def test_no_pattern_is_slow(glob: str, letters: int) -> None:
    """A57: what would be a slow regular expression is text, or a glob, which takes linear time."""
    one = policy({"tools": ["*"], "deny": [{"code": glob}, glob]})
    started = time.perf_counter()
    assert one.decide("python", {"code": "a" * letters}).mode == "auto"
    one.decide("bash", {"command": "a" * letters})
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("nest", ['echo "$(', "$(", "(", "{ ", "`", "$((", "<<E\n", "{a,", "if ", "${x:-"])
def test_no_script_is_slow_to_read(nest: str) -> None:
    """A57: the deepest nesting that fits is read, or given up, in time."""
    started = time.perf_counter()
    read_script((nest * MAX_SCRIPT_CHARACTERS)[:MAX_SCRIPT_CHARACTERS])
    assert time.perf_counter() - started < 2  # 0.1 s on an idle machine


@pytest.mark.needs("local")
async def test_other_requests_live_while_the_worst_script_is_read(state_dir: Path) -> None:
    """A57: reading takes no turn of the event loop's."""
    rules = {"careful": {"rules": [{"tools": ["bash"], "deny": ["curl *"]}]}}
    profiles = {"default": {"permission": "careful"}}
    server_settings = {"approval_wait_seconds": 0.01}
    script = ('echo "$(' * MAX_SCRIPT_CHARACTERS)[:MAX_SCRIPT_CHARACTERS]
    async with served(state_dir, permissions=rules, profiles=profiles, server=server_settings) as server:
        session = await server.session()
        slowest = 0.0
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(functools.partial(server.call, session, "bash", command=script))
            for _ in range(20):
                started = anyio.current_time()
                assert (await server.anonymous.get("/healthz")).status_code == 200
                slowest = max(slowest, anyio.current_time() - started)
        answers = [
            one["status"] for one in (await server.agent.get(f"/v1/sessions/{session['id']}/calls")).json()["calls"]
        ]
    assert answers == ["pending"] * 8
    assert slowest < 2  # under 0.1 s on an idle machine


# commands


@pytest.mark.parametrize(
    ("words", "pattern", "matches"),
    [
        (["git", "push"], "git push *", True),
        (["git", "push", "-f", "x"], "git push *", True),
        (["git", "-C", "x", "push"], "git push *", False),
        (["git", "-C", "x", "push"], "git * push", True),
        (["git", "pushed"], "git push*", True),
        (["git", "push", "x"], "git push*", False),
        (["git"], "git ?*", False),
        ([], "*", True),
        (["git", None], "git push *", True),
        ([None, "push"], "git push", True),
        (["git", None, "x"], "git push -f x", True),
        (["git", None], "ls *", False),
    ],
)
def test_a_star_of_its_own_is_any_number_of_words(words: list[str | None], pattern: str, matches: bool) -> None:
    assert words_match(words, pattern.split()) is matches


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        ("curl x", "deny"),
        ("c''url x", "deny"),
        ("c\\url x", "deny"),
        ("/usr/bin/curl x", "deny"),
        ("env A=1 curl x", "deny"),
        ("timeout 5 nice -n 3 /usr/bin/curl x", "deny"),
        ("ls | xargs curl", "deny"),
        ("echo $(curl x)", "deny"),
        ("if true; then curl x; fi", "deny"),
        ("f() { curl x; }", "deny"),
        ("cat <<E\n$(curl x)\nE", "deny"),
        ("$CURL x", "ask"),
        ("eval 'curl x'", "ask"),
        ("bash -c 'curl x'", "ask"),
        ("echo Y3VybA== | base64 -d | sh", "ask"),
        ("env $X y", "ask"),
        ("'", "ask"),
        ("true; " * MAX_SCRIPT_CHARACTERS, "ask"),
        ("echo curl x", "auto"),
        ("echo $X", "auto"),
        ("сurl x", "auto"),
    ],
    ids=lambda text: text[:40],
)
def test_denied_commands_are_found_however_they_are_spelt(command: str, mode: str) -> None:
    """A59: quotes, paths, runners; what cannot be read may be anything, and is asked about."""
    assert bash(command, {"deny": ["curl *"]}) == mode


@pytest.mark.parametrize(
    "command",
    [
        "ok",
        "ok a b",
        "ok 'a b' \"c\" d\\ e",
        "ok a | ok b",
        "ok a && ok b || ok c; ok d\nok e &",
        "(ok a; ok b)",
        "ok a 2>&1 | ok",
        "ok a >&2",
        "ok < file",
        "ok 'a*b' '$x' \"it's\"",
    ],
)
def test_plain_commands_are_allowed(command: str) -> None:
    assert bash(command, {"allow": ["ok *"]}) == "auto"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "# nothing",
        "no",
        "ok; no",
        "./ok",
        "/usr/bin/ok",
        "X=1 ok",
        "PATH=x",
        "ok > file",
        "ok >> file",
        "ok 2> file",
        "ok &> file",
        "ok >& file",
        "ok <> file",
        "ok $X",
        "ok $(ok)",
        "ok `ok`",
        "ok *.txt",
        "ok {a,b}",
        "ok ~",
        "ok $'a'",
        "ok $((1))",
        "$X",
        "eval ok",
        "for PATH in x; do ok; done",
        "while ok; do ok; done",
        "if ok; then ok; fi",
        "case x in x) ok;; esac",
        "f() { ok; }; f",
        "ok() { ok; }; ok",
        "{ ok; }",
        "! ok",
        "time ok",
        "coproc ok",
        "(( $(no) ))",
        "ok; (( $(no) ))",
        "[[ 'a[$(no)]' -eq 1 ]]",
        "ok <<E\n$(no)\nE",
        "ok <<< $(no)",
        "ok <(no)",
        "ok \r",
        "ok 'a",
        "ok \0",
        "ok \ud800",
        "оk",
        "ok\u00a0a",
    ],
)
def test_what_is_more_than_plain_commands_is_not_allowed(command: str) -> None:
    """A59: each word must be known, and the commands must be all that the script does."""
    assert bash(command, {"allow": ["ok *"]}) == "ask"


@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_runners_never_match_by_a_star(runner: str) -> None:
    assert bash(f"{runner} ok", {"allow": ["*", f"{runner} *", f"{runner} o?"]}) == "ask"


def test_a_runner_is_allowed_by_its_very_words() -> None:
    assert bash("timeout 5 make test", {"allow": ["timeout 5 make test"]}) == "auto"


PIECES = st.sampled_from(
    [
        *("ok", "canary", "a", "'", '"', "\\", "$", "`", "$(", ")", "(", "((", "))", "{", "}", "[", "]", "[[", "]]"),
        *(" ", " ", " ", "\n", "\t", "\r", ";", "&", "|", "&&", "||", "<", ">", "<<E\n", "<<<", "2>&1", ">&2", "<("),
        *("E\n", "#", "!", "=", "X=1", "PATH=.", "for ", " in ", "do ", "done", "if ", "then ", "fi", "case ", "esac"),
        *("while ", "time ", "coproc ", "f()", "function ", "eval ", "exec ", "env ", "command ", "xargs ", "trap "),
        *("printf ", "test ", "-v ", "'a[$(canary)]'", "a[$(canary)]", "$((", "${x:=", "$'", '$"', "*", "?", "~"),
        *("\u00a0", "\v", "\f", "\u2028", "\\\n", "' '", '" "', "-eq ", "1", "alias ", "source ", ". ", "\x7f"),
    ]
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two programs: `ok` does nothing, `canary` leaves a mark."""
    folder = tmp_path_factory.mktemp("programs")
    for name, body in (("ok", ":"), ("canary", f": > {folder}/mark")):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "a").write_text("canary\n")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
@example("(( $(canary) ))", False)
@example("ok;[[ 'a[$(canary)]' -eq 1 ]]", True)
@example("for PATH in .; do ok; done", True)
def test_nothing_unread_is_ever_allowed(programs: Path, script: str, everything: bool) -> None:
    """A59: whatever bash makes of a script that is allowed, it runs no command that no pattern names."""
    allowed = ["*"] if everything else ["ok *"]
    found = read_script(script)
    if not found.runs_only(allowed) or (everything and "canary" in str(found.commands)):
        return
    environment = {"PATH": str(programs), "LANG": "C.UTF-8"}
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run(
        [bash, "-c", script],
        cwd=programs,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert not os.path.exists(programs / "mark")
    assert sorted(os.listdir(programs)) == ["a", "canary", "ok"]
