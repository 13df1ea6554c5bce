"""The values that travel: tool calls, their results, sessions. Frozen, and strict about unknown fields."""

import time
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Status = Literal[
    "ok",
    "exit",
    "failed",
    "signal",
    "timeout",
    "oom",
    "pids",
    "disk",
    "denied",
    "skipped",
    "pending",
    "expired",
    "invalid",
    "hook",
    "cancelled",
    "interrupted",
    "sandbox_lost",
    "engine",
    "internal",
]
STATUSES: Final = get_args(Status)
NOT_AN_ERROR: Final = frozenset({"ok", "exit", "skipped"})
"""MCP's `is_error` is true for every other status."""

OUTPUT_STATUSES: Final = frozenset({"ok", "exit", "failed", "signal", "timeout", "oom"})
"""Statuses with a program's output: only these are ever offloaded."""

DID_NOT_RUN: Final = frozenset({"skipped", "denied", "pending", "expired", "invalid"})
"""Statuses of calls whose tool was never started. A `hook` may have broken before or after."""

Stream = Literal["stdout", "stderr"]
Part = Literal["stdout", "stderr", "structured", "media"]
"""What of a result can be stored: a program's streams, the structured content, an image or sound."""
STREAMS: Final = get_args(Stream)
Source = Literal["builtin", "function", "command", "hook", "upstream"]
Arguments = dict[str, JsonValue]


class Wire(BaseModel):
    """Base of what crosses HTTP or is read from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TextBlock(Wire):
    """Text in MCP's shape; `stream` says which of a program's streams it was."""

    type: Literal["text"] = "text"
    text: str
    stream: Stream | None = None


class MediaBlock(Wire):
    """An image or sound in MCP's shape; `data` is base64."""

    type: Literal["image", "audio"]
    data: str
    mimeType: Annotated[str, Field(max_length=200)]

    @property
    def stream(self) -> None:
        """No program printed it."""
        return None

    @property
    def text(self) -> str:
        """What a reader of text is told."""
        return f"[{self.type}: {self.size:,} bytes of {self.mimeType}]"

    @property
    def size(self) -> int:
        return len(self.data) * 3 // 4 - self.data[-2:].count("=")


Block = Annotated[TextBlock | MediaBlock, Field(discriminator="type")]


class Reference(Wire):
    """A stored result: `reference` is opened by `fsspec.open`; `store_uri` only where the profile shows it."""

    reference: str
    stream: Part = "stdout"
    bytes: int
    media_type: str
    sha256: str
    store_uri: str | None = None


class Fault(Wire):
    """Why a call did not end as asked. `code` is one of seed-facts 7.1 where the tool itself failed."""

    code: str
    message: str
    remedy: str = ""


class ToolResult(Wire):
    """The answer to a call. `id` is ours (unique in the session), `call_id` the caller's own."""

    id: str
    call_id: str | None = None
    tool: str
    status: Status
    content: tuple[Block, ...] = ()
    structured: JsonValue = None
    exit_code: int | None = None
    error: Fault | None = None
    truncated: bool = False
    references: tuple[Reference, ...] = ()
    notes: tuple[str, ...] = ()
    duration_ms: float = 0.0
    hooks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What a model should see."""
        parts = [block.text for block in self.content]
        if self.error is not None:
            message = self.error.message if self.error.message.endswith((".", "!", "?")) else f"{self.error.message}."
            parts.append(f"{self.status}: {message} {self.error.remedy}".rstrip())
        parts += [f"note: {note}" for note in self.notes]
        if self.status == "exit":
            parts.append(f"exit code {self.exit_code}")
        return "\n".join(part.removesuffix("\n") for part in parts if part)

    @property
    def is_error(self) -> bool:
        return self.status not in NOT_AN_ERROR


class CallRequest(Wire):
    """A tool call as a client sends it."""

    tool: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: Arguments = Field(default_factory=dict)
    call_id: Annotated[str, Field(max_length=2000)] | None = None
    turn_id: Annotated[str, Field(max_length=200)] | None = None
    hook_context: dict[str, JsonValue] = Field(default_factory=dict)


class ToolCall(Wire):
    """A call on its way: `arguments` are in force now, `original_arguments` are what was asked."""

    id: str
    session_id: str
    sequence: int
    tool: str
    source: Source
    arguments: Arguments
    original_arguments: Arguments
    requested_tool: str
    call_id: str | None = None
    turn_id: str | None = None
    hook_context: dict[str, JsonValue] = Field(default_factory=dict)


class ToolDefinition(Wire):
    """What a model is told about a tool. `parameters` is a JSON schema (2020-12) of an object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str
    parameters: dict[str, Any]
    source: Source = "builtin"
    read_only: bool = False
    destructive: bool = True
    open_world: bool = False


Content = str | tuple[dict[str, JsonValue], ...]
"""What users and models say: text, or blocks in the shape of the agent's own API."""


class TokenUsage(Wire):
    """Tokens of one answer, or of a whole turn, as the agent reports them."""

    input_tokens: Annotated[int, Field(ge=0)] = 0
    output_tokens: Annotated[int, Field(ge=0)] = 0

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(
            input_tokens=self.input_tokens + other.input_tokens, output_tokens=self.output_tokens + other.output_tokens
        )


class TurnRequest(Wire):
    """What a user asks of an agent: the beginning of a turn, as `pre_agent_turn` sees it."""

    user_content: Annotated[Content, Field(min_length=1)]


class LlmCall(Wire):
    """A model is about to be asked, as `pre_llm_call` sees it; what the agent does not report is None."""

    model: str | None = None
    messages: tuple[JsonValue, ...] | None = None


class LlmAnswer(Wire):
    """What a model answered, as `post_llm_call` sees it; `tool_calls` in the shape of the agent's own API."""

    content: Content | None = None
    tool_calls: tuple[JsonValue, ...] = ()
    finish_reason: str | None = None
    usage: TokenUsage = TokenUsage()


class TurnAnswer(Wire):
    """What the agent would tell its user, as `post_agent_turn` sees it."""

    content: Content | None = None


TurnWord = Literal["continue", "skip", "stop", "accept", "retry", "reject", "hook"]
TurnOutcome = Literal["completed", "skipped", "stopped", "rejected", "hook"]


class TurnDecision(Wire):
    """What the hooks say at one point of a turn. `content` is in force: the user's at `continue`, the model's at
    `accept`. `reason` is why not, at `retry` what the model should be told. `outcome` is set where the turn has ended.
    """

    turn_id: str
    decision: TurnWord
    content: Content | None = None
    reason: str = ""
    outcome: TurnOutcome | None = None


class SeedFile(Wire):
    """One inline file of a session's seed: exactly one of `text` and `base64`; `path` is below the workspace."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    text: str | None = None
    base64: str | None = None
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644


class SeedUri(Wire):
    """A folder, a file, a tar or a git bundle below a place that the profile's `seed_from` names, put at `to`."""

    model_config = ConfigDict(serialize_by_alias=True)

    source: Annotated[str, Field(alias="from", min_length=1, max_length=1100)]
    to: Annotated[str, Field(max_length=4096)] = "."


LEAST_MEMORY: Final = 32 << 20
LEAST_CPUS: Final = 0.01
LEAST_OPEN_FILES: Final = 32
"""Below these a sandbox does not start, or nothing starts in it."""


class LimitsRequest(Wire):
    """Narrower limits for one session; sizes in bytes. Wider than the profile's is refused."""

    call_seconds: Annotated[float, Field(gt=0)] | None = None
    max_call_seconds: Annotated[float, Field(gt=0)] | None = None
    memory: Annotated[int, Field(ge=LEAST_MEMORY)] | None = None
    cpus: Annotated[float, Field(ge=LEAST_CPUS)] | None = None
    processes: Annotated[int, Field(gt=0)] | None = None
    open_files: Annotated[int, Field(ge=LEAST_OPEN_FILES)] | None = None
    workspace_size: Annotated[int, Field(gt=0)] | None = None
    output: Annotated[int, Field(gt=0)] | None = None
    parallel_calls: Annotated[int, Field(gt=0)] | None = None
    results_size: Annotated[int, Field(gt=0)] | None = None


Network = Literal["none", "open"]
Label = Annotated[str, Field(max_length=200)]


class SessionRequest(Wire):
    """What a client may ask of a new session; everything stays within the profile."""

    profile: str = "default"
    tools: tuple[str, ...] | None = None
    limits: LimitsRequest | None = None
    network: Network | None = None
    env: dict[str, str] = Field(default_factory=dict)
    permission: JsonValue = None
    seed: Annotated[tuple[SeedFile | SeedUri, ...], Field(max_length=10_000)] = ()
    collect: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    inputs: dict[str, JsonValue] = Field(default_factory=dict)
    hook_context: dict[str, JsonValue] = Field(default_factory=dict)
    labels: Annotated[dict[Label, Label], Field(max_length=50)] = Field(default_factory=dict)
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None


SessionState = Literal["open", "closing", "closed", "expired"]


class CollectReport(Wire):
    """What one collection took. `complete` is False when something that matched was left out; `skipped` says what."""

    to: str
    files: int
    bytes: int
    complete: bool
    manifest: str | None = None
    skipped: tuple[str, ...] = ()
    error: str | None = None


class CloseReport(Wire):
    """The answer to closing: what was collected, what failed. The sandbox is gone in any case."""

    id: str
    state: SessionState
    reason: str
    collected: tuple[CollectReport, ...] = ()
    failed: tuple[str, ...] = ()


class SessionRecord(Wire):
    """A session as its owner sees it; never its token. `memory`, `cpu_seconds` and `jobs` (how many run in the
    background) are of its live sandbox; None where it has none, or does not tell."""

    id: str
    profile: str
    kind: str
    state: SessionState
    network: Network
    created: float
    last_used: float
    expires: float
    idle_seconds: float
    calls: int = 0
    running: int = 0
    channel: str | None = None
    channel_reason: str | None = None
    memory: int | None = None
    cpu_seconds: float | None = None
    jobs: int | None = None
    not_enforced: tuple[str, ...] = ()
    limits: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    close_report: CloseReport | None = None


class OpenedSession(Wire):
    """The answer to opening: the only time that the token is shown."""

    id: str
    token: str
    session: SessionRecord


class DecisionRecord(Wire):
    """What one hook, rule or the offloading said about a call, how long it took, and when it was said (seconds since
    1970)."""

    hook: str
    point: str
    decision: str
    reason: str = ""
    duration_ms: float = 0.0
    at: float = Field(default_factory=time.time)


class Question(Wire):
    """What a hook, or the permission rules, want a person to decide."""

    asked_by: str
    question: str


ApprovalState = Literal["waiting", "allowed", "denied", "expired"]
ApprovalScope = Literal["once", "session"]


class Approval(Wire):
    """A call that a person must let run. It stands for one session, tool and final arguments, whichever call asks.

    `arguments` are whole while it waits, then as in a CallRecord; `original_arguments` are there where a hook changed
    them. Times in seconds since 1970: after `expires` nobody can decide, or use what was decided once; `used` says when
    a call got the decision. `revision` grows with every change of any approval.
    """

    id: str
    session_id: str
    call_id: str
    tool: str
    arguments: JsonValue
    original_arguments: JsonValue = None
    questions: tuple[Question, ...]
    state: ApprovalState
    scope: ApprovalScope = "once"
    edited_arguments: JsonValue = None
    reason: str = ""
    created: float
    expires: float
    decided: float | None = None
    used: float | None = None
    revision: int


class ApprovalDecision(Wire):
    """An answer: only `"allow"` lets the call run, any other `decision` is a rejection.

    With `scope` = `session` the same call of the session asks no more. `arguments` run in the place of those that were
    asked about; the agent is told `reason`.
    """

    decision: JsonValue
    scope: ApprovalScope = "once"
    arguments: Arguments | None = None
    reason: Annotated[str, Field(max_length=2000)] = ""


class TurnRecord(Wire):
    """One turn of an agent: what was counted, and what hooks decided at its points; its calls are in their own
    records. `step_count` is how many answers of the model were accepted."""

    id: str
    session_id: str
    started: float
    ended: float | None = None
    outcome: TurnOutcome | None = None
    reason: str = ""
    step_count: int = 0
    tool_call_counts: dict[str, int] = Field(default_factory=dict)
    token_usage: TokenUsage = TokenUsage()
    decisions: tuple[DecisionRecord, ...] = ()


class CallRecord(Wire):
    """One call in the journal; `arguments` over 64 KiB appear as digest, size and the first 4 KiB."""

    id: str
    session_id: str
    sequence: int
    call_id: str | None
    turn_id: str | None
    tool: str
    requested_tool: str
    source: str | None
    status: Status | None
    accepted: float
    finished: float | None
    original_arguments: JsonValue
    arguments: JsonValue
    exit_code: int | None = None
    error: Fault | None = None
    raw_digest: str | None = None
    final_digest: str | None = None
    references: tuple[Reference, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
