"""CommandHook: executables written as hooks of Claude Code, unchanged; and what is none of their answers closes."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.adapters.claude_code import CommandHook
from gateway.build import hook_settings
from gateway.errors import SettingsError
from gateway.gateway import Gateway
from gateway.hooks.registered import Registered
from gateway.models import ToolResult
from gateway.sessions import Session
from tests.gateway.conftest import called, opened, running
from tests.sandboxes.support import gone

pytestmark = pytest.mark.anyio
USE = "gateway.adapters.claude_code:CommandHook"
LOCAL = pytest.mark.needs("local")

# As they are found in projects: a validator in Python, a guard in shell, a rewriter, a formatter, a logger.

VALIDATOR = """\
#!/usr/bin/env python3
import json, re, sys

RULES = [(r"\\bgrep\\b(?!.*\\|)", "Use rg instead of grep"), (r"\\bfind\\s+\\S+\\s+-name\\b", "Use rg --files instead")]
try:
    data = json.load(sys.stdin)
except json.JSONDecodeError as error:
    print(f"Error: {error}", file=sys.stderr)
    sys.exit(1)
if data.get("tool_name") != "Bash":
    sys.exit(0)
issues = [text for pattern, text in RULES if re.search(pattern, data.get("tool_input", {}).get("command", ""))]
for issue in issues:
    print(f"- {issue}", file=sys.stderr)
sys.exit(2 if issues else 0)
"""
GUARD = """\
#!/bin/sh
input=$(cat)
case "$input" in
  *'"tool_name": "Write"'*|*'"tool_name": "Edit"'*) ;;
  *) exit 0 ;;
esac
if echo "$input" | grep -qE '"file_path": "[^"]*/\\.env"'; then
  echo '{"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "deny",
         "permissionDecisionReason": "secrets are not edited here"}}'
fi
"""
REWRITER = """\
#!/usr/bin/env python3
import json, sys
data = json.load(sys.stdin)
updated = {**data["tool_input"], "command": "echo rewritten; " + data["tool_input"]["command"], "timeout": 5000}
print(json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "allow",
                                         "updatedInput": updated}, "suppressOutput": True}))
"""
FORMATTER = """\
#!/usr/bin/env python3
import json, sys
data = json.load(sys.stdin)
path = data["tool_input"]["file_path"]
if path.endswith(".py") and data["tool_response"]["success"]:
    print(json.dumps({"decision": "block", "reason": f"{path}: run the formatter"}))
"""
LOGGER = """\
#!/usr/bin/env python3
import json, os, sys
data = json.load(sys.stdin)
with open("log", "a") as log:
    print(json.dumps({"data": data, "env": sorted(os.environ), "cwd": os.getcwd()}), file=log)
"""


def script(folder: Path, text: str) -> str:
    """An executable file."""
    path = folder / "hook"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def hooks(*entries: dict[str, Any], **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"use": USE, "options": options, **more} for options in entries)


async def bash(gateway: Gateway, session: Session, command: str) -> ToolResult:
    return await called(gateway, session, "bash", command=command)


# what is written for Claude Code


@LOCAL
async def test_exit_code_2_skips_with_what_it_said(tmp_path: Path, state_dir: Path) -> None:
    """issue: a validator in Python, unchanged; the agent reads its reasons, whatever name it has for the tool."""
    async with running(state_dir, hooks=hooks({"command": [script(tmp_path, VALIDATOR)]})) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "Bash", command="grep x f; find . -name y")
        assert (result.status, result.error and result.error.message) == (
            "skipped",
            "- Use rg instead of grep\n- Use rg --files instead",
        )
        assert (await bash(gateway, session, "echo fine")).text == "fine"
        assert (await called(gateway, session, "ls", path=".")).status == "ok"


@LOCAL
@pytest.mark.parametrize("path", [".env", "/workspace/.env", "a/../.env"])
async def test_a_denial_as_json_skips(tmp_path: Path, state_dir: Path, path: str) -> None:
    """A guard in shell that looks for the end of an absolute path, as Claude Code gives it."""
    async with running(state_dir, hooks=hooks({"command": script(tmp_path, GUARD)})) as gateway:
        session = await opened(gateway)
        refused = await called(gateway, session, "write_file", file_path=path, content="x")
        assert (refused.status, refused.error and refused.error.message) == ("skipped", "secrets are not edited here")
        assert (await called(gateway, session, "write_file", file_path="x.env", content="x")).status == "ok"


@LOCAL
async def test_updated_input_is_what_runs(tmp_path: Path, state_dir: Path) -> None:
    """In Claude Code's spelling on both ways, milliseconds too."""
    async with running(state_dir, hooks=hooks({"command": [script(tmp_path, REWRITER)]}, tools=["bash"])) as gateway:
        session = await opened(gateway)
        assert (await bash(gateway, session, "echo it")).text == "rewritten\nit"
        record = await gateway.call_record(session, "c-0001")
    assert record.arguments == {"command": "echo rewritten; echo it", "timeout_s": 5}


@LOCAL
async def test_a_block_after_the_tool_is_told_to_the_agent(tmp_path: Path, state_dir: Path) -> None:
    """The tool has run; its result stays, and the reason is with it."""
    options = {"command": [script(tmp_path, FORMATTER)], "event": "PostToolUse"}
    async with running(state_dir, hooks=hooks(options, tools=["write_file"])) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "write_file", file_path="a.py", content="x")
        assert (result.status, result.notes) == ("ok", ("/workspace/a.py: run the formatter",))
        assert (await called(gateway, session, "write_file", file_path="a.txt", content="x")).notes == ()


@LOCAL
async def test_what_a_hook_is_given(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of the contract; of the gateway's environment only what `env` names; each event by itself."""
    monkeypatch.setenv("TICKETS_TOKEN", "x")
    monkeypatch.setenv("SECRET_OF_THE_GATEWAY", "x")
    command = [script(tmp_path, LOGGER)]
    events = ("PreToolUse", "PostToolUse", "PostToolUseFailure")
    entries = [{"command": command, "event": event, "cwd": str(tmp_path), "env": ["TICKETS_TOKEN"]} for event in events]
    async with running(state_dir, hooks=hooks(*entries)) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="echo out; echo err >&2", timeout_s=7)
        await called(gateway, session, "bash", command="exit 3")
        await called(gateway, session, "read_file", file_path="none")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {(tuple(sorted(set(one["env"]) - {"LC_CTYPE", "PWD"})), one["cwd"]) for one in lines} == {
        (("CLAUDE_PROJECT_DIR", "TICKETS_TOKEN"), str(tmp_path))
    }
    common = {"session_id": session.id, "transcript_path": "", "cwd": "/workspace", "permission_mode": "default"}
    call = {**common, "tool_name": "Bash", "tool_use_id": "c-0001"}
    arguments = {"command": "echo out; echo err >&2", "timeout": 7000}
    response = {"stdout": "out\n", "stderr": "err\n", "interrupted": False, "isImage": False}
    given = [one["data"] for one in lines]
    assert given[0] == {**call, "hook_event_name": "PreToolUse", "tool_input": arguments}
    assert given[1] == {
        **call, "hook_event_name": "PostToolUse", "tool_input": arguments, "tool_response": response
    }  # fmt: skip
    assert [(one["hook_event_name"], one.get("error")) for one in given[2:4]] == [
        ("PreToolUse", None),
        ("PostToolUseFailure", "exit code 3"),
    ]
    assert given[4]["tool_input"] == {"file_path": "/workspace/none"}
    assert given[5]["hook_event_name"] == "PostToolUseFailure"


def answering(**answer: Any) -> str:
    """A shell line that gives this answer."""
    return f"cat > /dev/null; echo '{json.dumps(answer)}'"


def pre(**specific: Any) -> str:
    return answering(hookSpecificOutput={"hookEventName": "PreToolUse", **specific})


BEFORE = [
    ("true", "ok", ""),
    ("exit 0", "ok", ""),
    ("echo just text", "ok", ""),
    (answering(), "ok", ""),
    (answering(systemMessage="for people", suppressOutput=True), "ok", ""),
    (answering(decision="approve"), "ok", ""),
    (pre(permissionDecision="allow"), "ok", ""),
    (pre(permissionDecision="defer", additionalContext="x"), "ok", ""),
    (answering(decision="block", reason="old form"), "skipped", "old form"),
    (pre(permissionDecision="deny"), "skipped", "gave no reason"),
    (answering(**{"continue": False, "stopReason": "enough"}), "skipped", "enough"),
    ("echo because >&2; exit 2", "skipped", "because"),
    ("exit 2", "skipped", "gave no reason"),
    ("exit 1", "hook", ""),
    ("exit 127", "hook", ""),
    ("no-such-program-anywhere", "hook", ""),
    ("kill -9 $$", "hook", ""),
    ("echo '{\"decision\": '", "hook", ""),
    (pre(permissionDecision="Deny"), "hook", ""),
    (pre(permissionDecision=["deny"]), "hook", ""),
    (pre(permissionDecision="allow", updatedInput="rm"), "hook", ""),
    (pre(permissionDecision="deny", permissionDecisionReason=1), "hook", ""),
    (pre(permissionDecision="allow", updatedInput={"cmd": "true"}), "invalid", ""),
    (answering(decision="maybe"), "hook", ""),
    (answering(hookSpecificOutput={"hookEventName": "PostToolUse", "permissionDecision": "allow"}), "hook", ""),
    (answering(hookSpecificOutput="allow"), "hook", ""),
    ("head -c 3000000 /dev/zero", "hook", ""),
]


@pytest.mark.parametrize(("command", "status", "reason"), BEFORE)
async def test_an_answer_before_the_tool(state_dir: Path, command: str, status: str, reason: str) -> None:
    """seed-facts 10.2, 9 rows 16 to 22, A58: what the contract knows does what it says; all else closes, a crash, a
    missing program, a wrong shape and a flood alike."""
    settings: dict[str, Any] = {"hooks": hooks({"command": command}), "profiles": {"default": {"kind": "virtual"}}}
    async with running(state_dir, **settings) as gateway:
        result = await bash(gateway, await opened(gateway), "echo ran")
    assert (result.status, reason in (result.error.message if result.error else "")) == (status, True)
    assert (result.text == "ran") == (status == "ok")


async def test_asking_asks_a_person(state_dir: Path) -> None:
    """`ask` waits for an approval with the hook's question, over what `updatedInput` makes of the arguments."""
    rewritten = {"command": "echo rewritten"}
    question = {"permissionDecision": "ask", "permissionDecisionReason": "sure?", "updatedInput": rewritten}
    settings: dict[str, Any] = {"hooks": hooks({"command": pre(**question)}), "server": {"approval_wait_seconds": 0.1}}
    async with running(state_dir, profiles={"default": {"kind": "virtual"}}, **settings) as gateway:
        session = await opened(gateway)
        assert (await bash(gateway, session, "echo ran")).status == "pending"
        [approval] = await gateway.approvals.list(state="waiting")
    assert (approval.arguments, [one.question for one in approval.questions]) == (rewritten, ["sure?"])


def post(**specific: Any) -> str:
    return answering(hookSpecificOutput={"hookEventName": "PostToolUse", **specific})


AFTER = [
    ("true", "ok", "out", ()),
    (post(updatedToolOutput="other"), "ok", "other", ()),
    (post(updatedToolOutput={"stdout": "o", "stderr": "e"}), "ok", "o\ne", ()),
    (post(updatedMCPToolOutput={"a": 1}), "ok", '{"a": 1}', ()),
    (post(additionalContext="look there"), "ok", "out", ("look there",)),
    (answering(decision="block", reason="bad"), "ok", "out", ("bad",)),
    (answering(**{"continue": False, "stopReason": "enough"}), "ok", "out", ("enough",)),
    ("echo feedback >&2; exit 2", "ok", "out", ("feedback",)),
    ("exit 1", "hook", "", ()),
    (answering(decision="approve!"), "hook", "", ()),
    (post(additionalContext=3), "hook", "", ()),
]


@pytest.mark.parametrize(("command", "status", "text", "notes"), AFTER)
async def test_an_answer_after_the_tool(
    state_dir: Path, command: str, status: str, text: str, notes: tuple[str, ...]
) -> None:
    """seed-facts 9 rows 18, 20, 21: an output that is rewritten is what the agent gets, for bash too; a broken hook
    withholds it."""
    settings: dict[str, Any] = {
        "hooks": hooks({"command": command, "event": "PostToolUse"}),
        "profiles": {"default": {"kind": "virtual"}},
    }
    async with running(state_dir, **settings) as gateway:
        result = await bash(gateway, await opened(gateway), "echo out")
    assert (result.status, result.notes) == (status, notes)
    shown = "\n".join(block.text.removesuffix("\n") for block in result.content)
    assert shown == text


HANGING = f"""\\
{sys.executable} -c 'import os, time; os.setsid(); print(1, flush=True); time.sleep(4713)' &
sh -c 'sleep 4713 & sleep 4713' &
echo started > started
sleep 4713
"""


async def test_a_hook_out_of_time_is_dead_with_its_tree(state_dir: Path, tmp_path: Path) -> None:
    """A58, issue: whatever it started, in a session of its own too; the call does not run."""
    settings: dict[str, Any] = {
        "hooks": hooks({"command": HANGING, "cwd": str(tmp_path)}, timeout_seconds=2),
        "profiles": {"default": {"kind": "virtual"}},
    }
    async with running(state_dir, **settings) as gateway:
        with anyio.fail_after(30):
            result = await bash(gateway, await opened(gateway), "echo ran")
        assert (result.status, (tmp_path / "started").exists()) == ("hook", True)
        assert await gone("4713")


async def test_what_a_hook_leaves_in_the_background_holds_nobody(state_dir: Path) -> None:
    """It may go on; the call does not wait for its output."""
    settings: dict[str, Any] = {
        "hooks": hooks({"command": "sleep 5 & exit 0"}),
        "profiles": {"default": {"kind": "virtual"}},
    }
    async with running(state_dir, **settings) as gateway:
        session = await opened(gateway)
        started = anyio.current_time()
        assert (await bash(gateway, session, "echo ran")).text == "ran"
        assert anyio.current_time() - started < 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command": ["/no/such/program"]}, "no executable /no/such/program"),
        ({"command": ["./none"]}, "no executable"),
        ({"command": []}, "empty command"),
        ({"command": " "}, "empty command"),
        ({"command": "true", "event": "Stop"}, "no such event 'Stop'"),
        ({"command": "true", "env": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    """seed-facts 9 row 22: a missing executable is known at the start."""
    with pytest.raises(SettingsError, match=says):
        CommandHook(**options)


def test_it_is_data() -> None:
    """issue: the whole hook list round-trips."""
    hook = CommandHook(["true", "x"], event="PostToolUse", env=["PATH"], cwd="/")
    assert hook_settings(Registered(hook)).options == {
        "command": ["true", "x"],
        "event": "PostToolUse",
        "env": ["PATH"],
        "cwd": "/",
    }
    assert os.environ["PATH"]
