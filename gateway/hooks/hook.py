"""Hook: code of the operator's that sees each call before its tool runs and each result on its way back."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from gateway.models import Arguments, Stream, ToolCall, ToolDefinition, ToolResult
from sandboxes import Executed

NO_REASON = "skipped by a hook that gave no reason"


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on; what is not given stays unchanged. `arguments` only before a tool, `result` only after it."""

    arguments: Arguments | None = None
    result: ToolResult | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not run the tool; the reason is what the agent reads. The call's status is `skipped`, not an error."""

    reason: str = NO_REASON


class HookSandbox(Protocol):
    """The session's sandbox as hooks and function tools see it; made at the first use."""

    @property
    def is_executable(self) -> bool: ...

    @property
    def workspace(self) -> str | None: ...

    async def execute(
        self, command: str, *, cwd: str | None = None, timeout_seconds: float = 60, env: Mapping[str, str] | None = None
    ) -> Executed: ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes: ...

    async def write_file(self, path: str, content: bytes) -> None: ...


class Body(Protocol):
    """The whole output of a call, however large; `read` gives the bytes `start..end` of one stream."""

    def size(self, stream: Stream) -> int: ...

    async def read(self, stream: Stream, start: int, end: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Which session a hook is called for."""

    id: str
    turn_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, JsonValue] = field(default_factory=dict)
    hook_context: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HookContext:
    """What a hook may look at. One hook object serves all sessions at once: key your data by `session.id`.

    `body` is the whole output, at `post_tool_call` only; the result itself is cut to 1 MiB a stream.
    """

    session: SessionInfo
    call: ToolCall
    tools: tuple[ToolDefinition, ...]
    sandbox: HookSandbox
    body: Body | None = None


Before = Continue | Skip
HOOK_METHODS = ("pre_tool_call", "post_tool_call", "filter_output")


class Hook:
    """Override what you need; only overridden methods are called. Both tool methods may be sync (they then run in a
    worker thread) or async. Whatever is not a decision of its point, an exception or a time over the limit is a broken
    hook: before the tool it does not run, after it the result is withheld.
    """

    @property
    def name(self) -> str:
        """What results and records call this hook."""
        return type(self).__name__

    def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before | Awaitable[Before]:
        """Decide about a call whose arguments are valid; rewritten ones are validated again."""
        return Continue()

    def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue | Awaitable[Continue]:
        """See, and perhaps replace, a result. Runs for failures too, not for calls that were skipped."""
        return Continue()

    def filter_output(self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Change bytes as they flow; what comes out is what store, stream, preview and journal get."""
        return chunks

    def overrides(self, method: str) -> bool:
        """Whether this hook has its own `method`."""
        return getattr(type(self), method) is not getattr(Hook, method) or method in vars(self)
