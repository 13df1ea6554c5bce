"""CommandHook: an executable that was written as a hook of Claude Code, run at our tool points.

What it reads and may answer is Claude Code's contract (https://code.claude.com/docs/en/hooks, as of 2026). Where that
lets a call pass when the hook fails, we do not: whatever is not an answer is a broken hook.
"""

import json
import os
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from gateway.errors import SettingsError
from gateway.hooks.hook import After, Ask, Before, Continue, Hook, HookContext, Skip
from gateway.models import TextBlock, ToolCall, ToolResult
from gateway.processes import Ran, run
from gateway.tools.jobs import JOB_TOOLS
from gateway.tools.sandbox import SANDBOX_TOOLS
from sandboxes import WORKSPACE

Event = Literal["PreToolUse", "PostToolUse", "PostToolUseFailure"]
POINTS: Final[Mapping[str, str]] = {
    "PreToolUse": "pre_tool_call",
    "PostToolUse": "post_tool_call",
    "PostToolUseFailure": "post_tool_call",
}
BLOCKED: Final = 2
MOST_SHOWN: Final = 4000
_ALIASES: Final = {tool.definition.name: tool.aliases[0] for tool in (*SANDBOX_TOOLS, *JOB_TOOLS) if tool.aliases}
"""The first of a tool's other spellings is Claude Code's."""


class HookFailed(Exception):
    """The executable did not answer as the contract says."""


class CommandHook(Hook):
    """Runs `command` on the host for each call (`PreToolUse`), or for each result that is a success (`PostToolUse`) or
    is none (`PostToolUseFailure`), with tools and arguments as Claude Code calls them, paths absolute.

    `command` is a shell line, or a list without a shell; it runs in `cwd` (from where the gateway was started) with an
    empty environment, beside CLAUDE_PROJECT_DIR and the variables of the gateway that `env` names. A time over the
    hook's limit kills it and all that it started. Raises SettingsError for a program or a variable that is not there.
    """

    def __init__(
        self, command: str | Sequence[str], *, event: Event = "PreToolUse", env: Sequence[str] = (), cwd: str = "."
    ) -> None:
        if event not in POINTS:
            raise SettingsError(f"CommandHook: no such event {event!r}", f"There are {', '.join(POINTS)}.")
        self.command = command if isinstance(command, str) else tuple(command)
        self.event = event
        self.env = tuple(env)
        self.cwd = cwd
        self._folder = Path(cwd).resolve()
        self._argv = _argv(self.command, self._folder)
        missing = [name for name in self.env if name not in os.environ]
        if missing:
            raise SettingsError(f"CommandHook: env: {missing[0]} is not set", "Set it, or take it out.")

    @property
    def name(self) -> str:
        words = self.command.split() if isinstance(self.command, str) else self.command
        return f"CommandHook {posixpath.basename(words[0])}"

    def overrides(self, method: str) -> bool:
        return method == POINTS[self.event] if method in POINTS.values() else super().overrides(method)

    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        ran = await self._run(ctx, {})
        if ran.exit_code == BLOCKED:
            return Skip(_said(ran))
        return _before(_answer(ran, self.event), call)

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> After:
        if (result.status == "ok") != (self.event == "PostToolUse"):
            return Continue()
        response = {"tool_response": _response(ctx.call, result)} if result.status == "ok" else {"error": result.text}
        ran = await self._run(ctx, response)
        if ran.exit_code == BLOCKED:
            return Continue(result=_noted(result, _said(ran)))
        return _after(_answer(ran, self.event), result)

    async def _run(self, ctx: HookContext, more: Mapping[str, Any]) -> Ran:
        tool, arguments = _spelt(ctx.call)
        message = {
            "session_id": ctx.session.id,
            "transcript_path": "",
            "cwd": WORKSPACE,
            "permission_mode": "default",
            "hook_event_name": self.event,
            "tool_name": tool,
            "tool_input": arguments,
            "tool_use_id": ctx.call.id,
            **more,
        }
        environment = {name: os.environ[name] for name in self.env} | {"CLAUDE_PROJECT_DIR": str(self._folder)}
        ran = await run(self._argv, stdin=json.dumps(message).encode(), env=environment, cwd=self._folder)
        if ran.exit_code not in (0, BLOCKED):
            raise HookFailed(f"{self.name}: exit code {ran.exit_code}: {_said(ran)}")
        return ran


def _argv(command: str | Sequence[str], folder: Path) -> Sequence[str]:
    if not command or not command[0].strip():
        raise SettingsError("CommandHook: an empty command", "Name an executable.")
    if isinstance(command, str):
        return ("/bin/sh", "-c", command)
    program = str(folder / command[0]) if "/" in command[0] else command[0]
    found = shutil.which(program)
    if found is None:
        raise SettingsError(f"CommandHook: no executable {program}", "Check its path, and chmod +x it.")
    return (found, *command[1:])


def _spelt(call: ToolCall) -> tuple[str, dict[str, Any]]:
    """Tool and arguments as Claude Code calls them."""
    if call.source == "upstream":
        return f"mcp__{call.tool}", call.arguments
    alias = _ALIASES.get(call.tool)
    if alias is None:
        return call.tool, call.arguments
    arguments = alias.reversed(call.arguments)
    if isinstance(path := arguments.get("file_path"), str):
        arguments["file_path"] = posixpath.normpath(posixpath.join(WORKSPACE, path))
    return alias.name, arguments


def _response(call: ToolCall, result: ToolResult) -> Any:
    """A result as Claude Code's own tool would give it, where hooks are known to look into it."""
    path = _spelt(call)[1].get("file_path")
    match call.tool:
        case "bash":
            return {**_streams(result), "interrupted": False, "isImage": False}
        case "write_file" | "edit_file":
            return {"filePath": path, "success": True}
        case "read_file":
            return {"type": "text", "file": {"filePath": path, "content": result.text}}
    return result.text if result.structured is None else result.structured


def _streams(result: ToolResult) -> dict[str, str]:
    texts = {"stdout": "", "stderr": ""}
    for block in result.content:
        texts[block.stream or "stdout"] += block.text
    return texts


def _said(ran: Ran) -> str:
    return ran.stderr.text().strip()[-MOST_SHOWN:]


def _answer(ran: Ran, event: str) -> dict[str, Any]:
    """The JSON on standard output; other text there means nothing. Raises HookFailed where it is no answer."""
    text = ran.stdout.text().strip()
    if ran.stdout.truncated:
        raise HookFailed(f"it wrote over {ran.stdout.max_bytes:,} bytes")
    if not text.startswith("{"):
        return {}
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise HookFailed(f"what it wrote begins with {{ and is no JSON: {error}") from error
    specific = answer.get("hookSpecificOutput", {})
    if not isinstance(specific, dict) or specific.get("hookEventName", event) != event:
        raise HookFailed(f"hookSpecificOutput is not of {event}")
    return {**answer, "hookSpecificOutput": specific}


def _before(answer: dict[str, Any], call: ToolCall) -> Before:
    specific = answer.get("hookSpecificOutput", {})
    if answer.get("continue", True) is not True:
        return Skip(_text(answer.get("stopReason", "")))
    reason = _text(specific.get("permissionDecisionReason", answer.get("reason", "")))
    arguments = _ours(specific["updatedInput"], call) if "updatedInput" in specific else None
    match specific.get("permissionDecision", answer.get("decision")):
        case "deny" | "block":
            return Skip(reason)
        case "ask":
            return Ask(reason, arguments)
        case None | "allow" | "approve" | "defer":
            return Continue(arguments=arguments)
        case decision:
            raise HookFailed(f"the decision {decision!r}: not understood here")


def _ours(arguments: Any, call: ToolCall) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise HookFailed("updatedInput is no object")
    alias = _ALIASES.get(call.tool)
    return arguments if alias is None or call.source == "upstream" else alias.translate(arguments)


def _after(answer: dict[str, Any], result: ToolResult) -> After:
    specific = answer.get("hookSpecificOutput", {})
    if answer.get("decision") not in (None, "block"):
        raise HookFailed(f"decision {answer['decision']!r}: not understood here")
    output = specific.get("updatedToolOutput", specific.get("updatedMCPToolOutput"))
    changed = result if output is None else result.model_copy(update={"content": _content(output)})
    notes = [answer.get("reason", "")] if answer.get("decision") == "block" else []
    notes += [answer.get("stopReason", "")] if answer.get("continue", True) is not True else []
    notes.append(specific.get("additionalContext", ""))
    for note in notes:
        changed = _noted(changed, _text(note))
    return Continue() if changed is result else Continue(result=changed)


def _content(output: Any) -> tuple[TextBlock, ...]:
    match output:
        case str():
            return (TextBlock(text=output, stream="stdout"),)
        case {"stdout": str() as stdout, "stderr": str() as stderr}:
            blocks = (TextBlock(text=stdout, stream="stdout"), TextBlock(text=stderr, stream="stderr"))
            return tuple(block for block in blocks if block.text)
    return (TextBlock(text=json.dumps(output), stream="stdout"),)


def _noted(result: ToolResult, note: str) -> ToolResult:
    return result.model_copy(update={"notes": (*result.notes, note)}) if note.strip() else result


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise HookFailed(f"a {type(value).__name__} where a text should be")
    return value[:MOST_SHOWN]
