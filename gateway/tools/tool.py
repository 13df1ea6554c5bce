"""Tool: what runs when a call is let through."""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import JsonValue

from gateway.hooks.hook import HookSandbox, SessionInfo
from gateway.models import Arguments, MediaBlock, Status, ToolDefinition
from sandboxes import Sandbox, Sink


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a tool ended; its text went to the sinks. `code` and `message` say why where `status` is `failed`."""

    status: Status = "ok"
    exit_code: int | None = None
    code: str | None = None
    message: str = ""
    remedy: str = ""
    structured: JsonValue = None
    media: tuple[MediaBlock, ...] = ()
    notes: tuple[str, ...] = ()


class ResultReader(Protocol):
    """Reads the session's own stored results; raises NotFound or Gone."""

    async def size(self, reference: str) -> int: ...

    def read(self, reference: str, start: int, end: int | None) -> AsyncIterator[bytes]: ...

    async def lines(self, reference: str, first: int, last: int, max_bytes: int) -> tuple[str, bool]: ...

    async def grep(self, reference: str, pattern: str, max_bytes: int) -> tuple[str, bool]: ...


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may use. `sandbox()` opens the session's sandbox at the first use. `timeout_seconds` is the limit of
    this call when it names none itself, `max_timeout_seconds` the most it may ask for. `job_offsets` is the session's:
    up to where each job's output was shown. `tell` shows a line to whoever watches the call; it is no part of the
    result."""

    session: SessionInfo
    call_id: str
    sandbox: Callable[[], Awaitable[Sandbox]]
    hook_sandbox: HookSandbox
    stdout: Sink
    stderr: Sink
    results: ResultReader
    timeout_seconds: float
    max_timeout_seconds: float
    job_offsets: MutableMapping[str, int]
    tell: Callable[[str], None]


class Tool(Protocol):
    """One tool. `run` gets arguments that fit `definition.parameters`, writes its text to the sinks, and returns.

    Raising CommandRefused, FileRefused or SandboxLost is understood; anything else is `internal`.
    """

    aliases: ClassVar[tuple["Alias", ...]] = ()

    @property
    def needs_sandbox(self) -> bool: ...

    @property
    def definition(self) -> ToolDefinition: ...

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Alias:
    """Another agent's spelling: its name for the tool, and its names for arguments (`None`: ignore that one)."""

    name: str
    arguments: tuple[tuple[str, str | None], ...] = ()
    milliseconds: tuple[str, ...] = ()

    def translate(self, arguments: Arguments) -> Arguments:
        """Our spelling of the arguments; an unknown one stays, for the schema to refuse."""
        renames = dict(self.arguments)
        ours: dict[str, Any] = {}
        for name, value in arguments.items():
            new = renames.get(name, name)
            if new is None:
                continue
            scale = name in self.milliseconds and isinstance(value, int | float)
            ours[new] = value / 1000 if scale else value  # type: ignore[operator]
        return ours

    def reversed(self, arguments: Arguments) -> Arguments:
        """The other agent's spelling of our arguments."""
        names = {ours: theirs for theirs, ours in self.arguments if ours is not None}
        theirs: dict[str, Any] = {}
        for name, value in arguments.items():
            new = names.get(name, name)
            scale = new in self.milliseconds and isinstance(value, int | float)
            theirs[new] = round(value * 1000) if scale else value  # type: ignore[operator, arg-type]
        return theirs
