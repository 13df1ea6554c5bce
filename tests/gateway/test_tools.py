"""The built-in tools, function tools and command tools, against a real sandbox."""

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import SettingsError
from gateway.gateway import Gateway
from gateway.sessions import Session
from gateway.tools.functions import FunctionTool
from gateway.tools.sandbox import filled
from tests.gateway.conftest import called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


@pytest.fixture
async def session(gateway: Gateway) -> Session:
    files = {
        "a.py": "import os\nprint('TODO')\n",
        "sub/b.py": "# todo: later\n",
        "sub/c.txt": "TODO\n",
        ".hidden/d.py": "TODO\n",
    }
    return await opened(gateway, seed=[{"path": path, "text": text} for path, text in files.items()])


async def failed(gateway: Gateway, session: Session, tool: str, **arguments: Any) -> str:
    result = await called(gateway, session, tool, **arguments)
    assert result.status == "failed", result
    assert result.error is not None
    return result.error.code


async def test_python_runs_with_the_standard_library(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "python", code="import json, sqlite3; print(json.dumps([1]))")
    assert result.text == "[1]"


async def test_read_file_pages_numbered_lines(gateway: Gateway, session: Session) -> None:
    await called(gateway, session, "bash", command="seq 1 5000 > many")
    first = await called(gateway, session, "read_file", file_path="many")
    assert first.notes == ("lines 1-2000 of 5000; go on with offset=2001",)
    page = await called(gateway, session, "read_file", file_path="/workspace/many", offset=4999, limit=10)
    assert page.text == "  4999\t4999\n  5000\t5000"


async def test_failure_codes_of_reading(gateway: Gateway, session: Session) -> None:
    """seed-facts 12 row 16."""
    await called(
        gateway, session, "bash", command="printf '\\377' > bytes; truncate -s 20M big; mkfifo pipe; mkdir dir"
    )
    codes = {
        path: await failed(gateway, session, "read_file", file_path=path)
        for path in ("absent", "bytes", "big", "pipe", "dir", "../../etc/passwd", "/etc/passwd", "/proc/1/environ")
    }
    assert codes == {
        "absent": "missing_file",
        "bytes": "invalid_encoding",
        "big": "content_too_large",
        "pipe": "invalid_path",
        "dir": "invalid_path",
        "../../etc/passwd": "invalid_path",
        "/etc/passwd": "invalid_path",
        "/proc/1/environ": "invalid_path",
    }


async def test_links_are_followed_only_within_the_sandboxs_folders(gateway: Gateway, session: Session) -> None:
    """A27."""
    await called(gateway, session, "bash", command="ln -s a.py inside; ln -s /etc/passwd outside; ln -s outside twice")
    assert "TODO" in (await called(gateway, session, "read_file", file_path="inside")).text
    assert await failed(gateway, session, "read_file", file_path="outside") == "invalid_path"
    assert await failed(gateway, session, "read_file", file_path="twice") == "invalid_path"


async def test_write_file_makes_parents_and_replaces(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "write_file", file_path="x/y/z.txt", content="héllo")
    assert (result.text, result.structured) == ("wrote 6 bytes to x/y/z.txt", {"bytes": 6})
    await called(gateway, session, "write_file", file_path="x/y/z.txt", content="")
    assert (await called(gateway, session, "bash", command="wc -c < x/y/z.txt")).text == "0"


async def test_write_through_a_linked_folder_is_refused(gateway: Gateway, session: Session) -> None:
    """A37."""
    await called(gateway, session, "bash", command="ln -s /tmp out")
    assert await failed(gateway, session, "write_file", file_path="out/x", content="y") == "invalid_path"


async def test_edit_replaces_exactly_one_place(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "edit_file", file_path="a.py", old_string="os", new_string="sys")
    assert (result.text, result.structured) == ("1 replacement in a.py", {"replacements": 1})
    assert (await called(gateway, session, "bash", command="head -1 a.py")).text == "import sys"


async def test_edit_is_refused_unless_unique(gateway: Gateway, session: Session) -> None:
    await called(gateway, session, "write_file", file_path="f", content="a a a")
    edit = {"file_path": "f", "old_string": "a", "new_string": "b"}
    assert await failed(gateway, session, "edit_file", **edit) == "search_replace_failed"
    assert await failed(gateway, session, "edit_file", **{**edit, "old_string": "zz"}) == "search_replace_failed"
    assert (await called(gateway, session, "edit_file", **edit, replace_all=True)).structured == {"replacements": 3}


async def test_edit_keeps_the_mode(gateway: Gateway, session: Session) -> None:
    await called(gateway, session, "bash", command="echo 'echo old' > run; chmod 755 run")
    await called(gateway, session, "edit_file", file_path="run", old_string="old", new_string="new")
    assert (await called(gateway, session, "bash", command="./run; stat -c %a run")).text == "new\n755"


async def test_glob_matches_any_depth(gateway: Gateway, session: Session) -> None:
    async def found(pattern: str, **more: str) -> set[str]:
        return set((await called(gateway, session, "glob", pattern=pattern, **more)).text.split())

    assert await found("**/*.py") == {"a.py", "sub/b.py", ".hidden/d.py"}
    assert await found("*.py") == {"a.py"}
    assert await found("sub/**") == {"sub/b.py", "sub/c.txt"}
    assert await found("*.txt", path="sub") == {"c.txt"}


async def test_grep_shows_path_line_and_text(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "grep", pattern="TODO")
    assert set(result.text.splitlines()) == {"./.hidden/d.py:1:TODO", "./a.py:2:print('TODO')", "./sub/c.txt:1:TODO"}
    ignoring = await called(gateway, session, "grep", pattern="todo", glob="*.py", ignore_case=True, path="sub")
    assert ignoring.text == "sub/b.py:1:# todo: later"


async def test_grep_says_when_nothing_or_too_much_matches(gateway: Gateway, session: Session) -> None:
    assert (await called(gateway, session, "grep", pattern="absent")).notes == ("no match",)
    await called(gateway, session, "bash", command="seq 1 1000 > many")
    many = await called(gateway, session, "grep", pattern=".", path="many", max_matches=3)
    assert many.content[0].text == "many:1:1\nmany:2:2\nmany:3:3\n"
    assert many.notes == ("more matches were left out; narrow the pattern or the path",)


async def test_grep_with_a_bad_expression_fails_and_says_why(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "grep", pattern="(")
    assert (result.status, result.error and result.error.code) == ("failed", "command_failed")
    assert "unclosed group" in result.text


@pytest.mark.parametrize(("tool", "argument"), [("bash", "command"), ("read_file", "file_path"), ("grep", "pattern")])
async def test_text_that_is_no_unicode_is_refused(gateway: Gateway, session: Session, tool: str, argument: str) -> None:
    """A lone surrogate stands for no byte."""
    result = await called(gateway, session, tool, **{argument: "\ud800"})
    assert result.status in ("invalid", "failed")
    assert result.error is not None
    assert result.error.code in ("invalid_arguments", "invalid_path")


async def test_names_are_arguments_never_options(gateway: Gateway, session: Session) -> None:
    """A30."""
    await called(gateway, session, "write_file", file_path="--pre=sh", content="needle")
    assert "needle" in (await called(gateway, session, "grep", pattern="needle", path="--pre=sh")).text
    assert "needle" in (await called(gateway, session, "read_file", file_path="--pre=sh")).text


async def test_arguments_too_long_for_the_kernel_are_invalid(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "bash", command="#" + "x" * 200_000)
    assert (result.status, result.error and result.error.code) == ("invalid", "invalid_arguments")


async def test_command_that_begins_with_a_dash_is_a_command(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "bash", command="-n; echo hi")
    assert result.content[0].text == "hi\n"


async def test_wrong_argument_names_are_named(gateway: Gateway, session: Session) -> None:
    result = await called(gateway, session, "read_file", path="a.py")
    assert result.error is not None
    assert "'path' was unexpected" in result.error.message
    assert "'file_path' is a required property" in result.error.message


async def test_bash_reads_end_of_file_at_once(gateway: Gateway, session: Session) -> None:
    """R13."""
    assert (await called(gateway, session, "bash", command="cat; echo end")).text == "end"


async def test_heredocs_and_quotes_arrive_as_they_are(gateway: Gateway, session: Session) -> None:
    """R10."""
    command = "cat <<'EOF'\n$HOME \"quoted\" 'single' `tick`\nEOF\ncat <<EOF\n$((1 + 1))\nEOF\n"
    assert (await called(gateway, session, "bash", command=command)).text == "$HOME \"quoted\" 'single' `tick`\n2"


async def test_cwd_stays_inside(gateway: Gateway, session: Session) -> None:
    """A12."""
    assert (await called(gateway, session, "bash", command="pwd", cwd="sub")).text == "/workspace/sub"
    for cwd in ("/", "..", "/etc", "absent", "a.py"):
        assert (await called(gateway, session, "bash", command="pwd", cwd=cwd)).status == "failed"


def test_template_replaces_names_once_and_leaves_braces() -> None:
    argv = ("awk", "{print $1}", "--file={path}", "{path}", "{flag}", "{count}")
    assert filled(argv, {"path": "{count} x", "count": 3}, ("path", "flag", "count")) == [
        "awk",
        "{print $1}",
        "--file={count} x",
        "{count} x",
        "3",
    ]


async def test_command_tool_runs_in_the_sandbox(state_dir: Path) -> None:
    tool = {
        "name": "first_lines",
        "description": "Show lines.",
        "argv": ["head", "-n", "{count}", "{path}"],
        "parameters": {"path": {"type": "string"}, "count": {"type": "integer", "default": 1}},
    }
    async with running(state_dir, tools=[tool]) as gateway:
        session = await opened(gateway, seed=[{"path": "f", "text": "1\n2\n3\n"}])
        result = await called(gateway, session, "first_lines", path="f; echo no", count=2)
        assert (result.status, result.exit_code) == ("exit", 1)
        assert (await called(gateway, session, "first_lines", path="f", count=2)).text == "1\n2"
        assert (await called(gateway, session, "first_lines", count="two")).status == "invalid"
        [record, *_] = await gateway.journal.calls(session.id)
        assert record.source == "command"


async def test_missing_program_of_a_command_tool_is_told(state_dir: Path) -> None:
    async with running(state_dir, tools=[{"name": "gone", "argv": ["no-such-program"]}]) as gateway:
        result = await called(gateway, await opened(gateway), "gone")
    assert (result.status, result.error and result.error.code) == ("failed", "command_failed")


async def test_function_tool_runs_in_the_gateway(tmp_path: Path, state_dir: Path) -> None:
    (tmp_path / "tools_beside_the_file.py").write_text(
        "def add(left: int, right: int = 1) -> int:\n    '''Add two numbers.'''\n    return left + right\n"
        "async def shell(command: str, ctx):\n    '''Run inside.'''\n"
        "    done = await ctx.hook_sandbox.execute(command)\n    return done.stdout\n"
        "def breaks() -> None:\n    '''Break.'''\n    raise RuntimeError('secret')\n"
    )
    tools = [{"use": f"tools_beside_the_file:{name}"} for name in ("add", "shell", "breaks")]
    async with running(state_dir, tmp_path, tools=tools) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "add", left=2)).text == "3"
        assert (await called(gateway, session, "add", left="two")).status == "invalid"
        assert (await called(gateway, session, "shell", command="pwd")).text == "/workspace"
        broken = await called(gateway, session, "breaks")
    assert (broken.status, broken.error and broken.error.code) == ("failed", "capability_execution_failed")
    assert "secret" not in broken.text


def test_function_without_annotations_is_refused() -> None:
    def vague(thing):  # type: ignore[no-untyped-def]
        """Vague."""

    with pytest.raises(SettingsError, match="has no annotation"):
        FunctionTool.of(vague)


async def test_two_tools_of_one_name_are_refused(state_dir: Path) -> None:
    with pytest.raises(SettingsError, match="two tools are called 'bash'"):
        async with running(state_dir, tools=[{"name": "bash", "argv": ["sh"]}]):
            pass
