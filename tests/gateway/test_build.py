"""From settings to a gateway: what the configuration names is looked at before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from gateway.build import build_hook, build_tool, check_configuration
from gateway.errors import SettingsError
from gateway.settings import HookSettings, ToolSettings
from tests.gateway.conftest import called, opened, running, settings_of


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"hooks": [{"use": "absent_module:X"}]}, "absent_module:X: No module named 'absent_module'"),
        ({"profiles": {"default": {"tools": ["bahs"]}}}, "'bahs' matches no tool; did you mean 'bash'?"),
        ({"profiles": {"default": {"seed": [{"from": "nope"}]}}}, "profiles.default.seed: no such file or folder"),
        ({"tools": [{"name": "t", "argv": ["echo", "{z}"]}]}, "argv has {z}, and parameters have no 'z'"),
        (
            {"offload": {"rules": [{"tools": ["*"], "when": "never"}, {"tools": ["*"], "when": "always"}]}},
            "two rules match the tool 'bash' equally well",
        ),
    ],
)
def test_configuration_that_cannot_work_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        check_configuration(settings_of(**sections), tmp_path)
    assert message in wrong.value.message


def test_hook_module_with_a_fault_is_told_in_one_line(tmp_path: Path) -> None:
    module(tmp_path, "hook_with_a_fault", "def broken(:\n")
    with pytest.raises(SettingsError, match="importing it raised SyntaxError"):
        build_hook(HookSettings(use="hook_with_a_fault:X"), tmp_path)


def test_hook_that_overrides_nothing_is_refused(tmp_path: Path) -> None:
    """A misspelt method would be no protection, and no word about it."""
    module(
        tmp_path,
        "hook_misspelt",
        "from gateway.hooks.hook import Hook\nclass X(Hook):\n    def pre_tool_cal(self): ...\n",
    )
    with pytest.raises(SettingsError, match="pre_tool_cal is no point of a hook"):
        build_hook(HookSettings(use="hook_misspelt:X"), tmp_path)


def test_class_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    module(tmp_path, "hook_renamed", "class NoPush: ...\n")
    with pytest.raises(SettingsError, match="has no NoPusch; did you mean 'NoPush'"):
        build_hook(HookSettings(use="hook_renamed:NoPusch"), tmp_path)


def test_placeholder_of_a_declared_parameter_is_fine(tmp_path: Path) -> None:
    tool = ToolSettings(name="t", argv=("awk", "{print $1}", "{path}"), parameters={"path": {"type": "string"}})
    assert build_tool(tool, tmp_path).definition.name == "t"


@pytest.mark.anyio
@pytest.mark.needs("local")
async def test_default_of_a_command_tools_parameter_is_applied(state_dir: Path) -> None:
    parameters = {"path": {"type": "string"}, "count": {"type": "integer", "default": 2}}
    tool = {"name": "first", "argv": ["head", "-n", "{count}", "--", "{path}"], "parameters": parameters}
    async with running(state_dir, tools=[tool]) as gateway:
        session = await opened(gateway, seed=[{"path": "f", "text": "1\n2\n3\n"}])
        assert (await called(gateway, session, "first", path="f")).text == "1\n2"
        assert (await called(gateway, session, "first", path="f", count=1)).text == "1"
