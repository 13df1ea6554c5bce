"""Hook: code of the operator's that sees each call before its tool runs and each result on its way back."""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from pydantic import JsonValue

from gateway.inputs import SessionInput
from gateway.models import (
    Arguments,
    Content,
    LlmAnswer,
    LlmCall,
    Stream,
    TokenUsage,
    ToolCall,
    ToolDefinition,
    ToolResult,
    TurnAnswer,
    TurnRequest,
)
from sandboxes import Executed

Input = TypeVar("Input", bound=SessionInput)

NO_REASON = "skipped by a hook that gave no reason"
NO_QUESTION = "may this run?"


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on; what is not given stays unchanged. `arguments` only before a tool, `result` only after it,
    `user_content` only before a turn."""

    arguments: Arguments | None = None
    result: ToolResult | None = None
    user_content: Content | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not run the tool; the reason is what the agent reads. The call's status is `skipped`, not an error."""

    reason: str = NO_REASON


@dataclass(frozen=True, slots=True)
class Ask:
    """Let a person decide, perhaps about other `arguments`. The hooks after it still run; then one approval shows the
    final arguments and all questions. Only before a tool."""

    question: str = NO_QUESTION
    arguments: Arguments | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the agent's turn here; nothing more of it is asked."""

    reason: str = "stopped by a hook that gave no reason"


@dataclass(frozen=True, slots=True)
class Accept:
    """Let an answer stand; a `replacement` (only for a model's answer) takes the place of its content."""

    replacement: Content | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """Ask the model again, with this feedback; bounded, see `gateway.agent_points`."""

    feedback: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a model's answer, and end the turn."""

    reason: str


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
    """Which session a hook or a function tool is called for. `labels` and `hook_context` are the caller's words."""

    id: str
    turn_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    given_inputs: Mapping[str, SessionInput] = field(default_factory=dict, repr=False)
    given_context: Mapping[str, JsonValue] = field(default_factory=dict, repr=False)

    @property
    def inputs(self) -> dict[str, JsonValue]:
        """The session's inputs by id; a copy of your own."""
        return {id: value.model_dump(mode="json") for id, value in self.given_inputs.items()}

    @property
    def hook_context(self) -> dict[str, JsonValue]:
        """What the session was opened with, and the call's own keys beside it; a copy of your own."""
        return copy.deepcopy(dict(self.given_context))

    def input(self, kind: type[Input]) -> Input:
        """One input; a copy of your own. KeyError where nobody declares it."""
        value = self.given_inputs[kind.input_id].model_copy(deep=True)
        assert isinstance(value, kind)  # parsed by the only class of that id
        return value


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """The agent's turn so far. `step_count` is how many answers of the model were accepted, `tool_call_counts` how
    many calls of each tool were made, `token_usage` what the agent reported."""

    id: str
    step_count: int = 0
    tool_call_counts: Mapping[str, int] = field(default_factory=dict)
    token_usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What a hook may look at, at the points of an agent's turn. One hook object serves all sessions at once: key your
    data by `session.id`."""

    session: SessionInfo
    turn: TurnInfo
    tools: tuple[ToolDefinition, ...]
    sandbox: HookSandbox


@dataclass(frozen=True, slots=True)
class HookContext:
    """The same, at the points of a call. `turn` is None where the call belongs to none that is open.

    `body` is the whole output, at `post_tool_call` only; the result itself is cut to 1 MiB a stream.
    """

    session: SessionInfo
    call: ToolCall
    tools: tuple[ToolDefinition, ...]
    sandbox: HookSandbox
    turn: TurnInfo | None = None
    body: Body | None = None


AnyDecision = Continue | Skip | Ask | Stop | Accept | Retry | Reject
BeforeTurn = Continue | Skip
BeforeLlm = Continue | Skip | Stop
AfterLlm = Accept | Retry | Reject
AfterTurn = Accept | Retry
Before = Continue | Skip | Ask
"""What `pre_tool_call` may answer."""
After = Continue
"""What `post_tool_call` may answer."""
AGENT_POINTS: Final[Mapping[str, type]] = {
    "pre_agent_turn": TurnRequest,
    "pre_llm_call": LlmCall,
    "post_llm_call": LlmAnswer,
    "post_agent_turn": TurnAnswer,
}
POINTS: Final[Mapping[str, type]] = {**AGENT_POINTS, "pre_tool_call": ToolCall, "post_tool_call": ToolResult}
"""The methods that are asked for a decision, and what each is given beside the context."""
FILTER: Final = "filter_output"


class Hook:
    """Override what you need; only overridden methods are called. A method may be sync (it then runs in a worker
    thread) or async, and may declare session inputs as further parameters (here they stand as `inputs` and `named`, so
    that type checkers take them; nothing else is ever given). Whatever is not a decision of its point, an
    exception or a time over the limit is a broken hook: before the tool it does not run, after it the result is
    withheld, and at the points of an agent's turn the turn ends.

    The gateway runs no agent: the four points of a turn are asked where an agent offers them, for every turn, whatever
    tools the hook is for.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Tools of the hook's own: functions with annotations and a docstring, run in the gateway."""

    @property
    def name(self) -> str:
        """What results and records call this hook."""
        return type(self).__name__

    def pre_agent_turn(
        self, ctx: TurnContext, request: TurnRequest, *inputs: Any, **named: Any
    ) -> BeforeTurn | Awaitable[BeforeTurn]:
        """Once, before the agent begins. Skip ends the turn, and its reason is the answer."""
        return Continue()

    def pre_llm_call(
        self, ctx: TurnContext, call: LlmCall, *inputs: Any, **named: Any
    ) -> BeforeLlm | Awaitable[BeforeLlm]:
        """Before the model is asked. The reason of Skip takes the place of its answer; Stop ends the turn."""
        return Continue()

    def post_llm_call(
        self, ctx: TurnContext, answer: LlmAnswer, *inputs: Any, **named: Any
    ) -> AfterLlm | Awaitable[AfterLlm]:
        """When the model has answered, before its tool calls are made."""
        return Accept()

    def post_agent_turn(
        self, ctx: TurnContext, answer: TurnAnswer, *inputs: Any, **named: Any
    ) -> AfterTurn | Awaitable[AfterTurn]:
        """When the agent would end its turn; Retry makes it go on."""
        return Accept()

    def pre_tool_call(self, ctx: HookContext, call: ToolCall, *inputs: Any, **named: Any) -> Before | Awaitable[Before]:
        """Decide about a call whose arguments are valid; rewritten ones are validated again."""
        return Continue()

    def post_tool_call(
        self, ctx: HookContext, result: ToolResult, *inputs: Any, **named: Any
    ) -> After | Awaitable[After]:
        """See, and perhaps replace, a result. Runs for failures too, not for calls that were skipped."""
        return Continue()

    def filter_output(
        self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes], *inputs: Any, **named: Any
    ) -> AsyncIterator[bytes]:
        """Change bytes as they flow; what comes out is what store, stream, preview and journal get."""
        return chunks

    def warm_up(self) -> Awaitable[None] | None:
        """Prepare, once, before the first call; at most 60 s. What it raises stops the start."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Give back what `warm_up` took, once, after the last call; at most 10 s. What it raises is logged."""
        return None

    def overrides(self, method: str) -> bool:
        """Whether this hook has its own `method`."""
        return getattr(type(self), method) is not getattr(Hook, method) or method in vars(self)
