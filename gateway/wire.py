"""What HTTP carries around the values of `gateway.models`: lists, files, pages, a stream's events.

Here stands what only the HTTP transport answers and its client reads; what the gateway works with is in `models`.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gateway.models import Approval, CallRecord, Reference, SessionRecord, Stream, ToolDefinition, Wire

MOST_CHARACTERS: Final = 1000
"""Of a terminal, in each direction."""
REPLACED: Final = 4001
"""The code of a terminal's WebSocket that ended because another reader came."""


class SessionList(Wire):
    """Sessions, the oldest first."""

    sessions: tuple[SessionRecord, ...]


ToolFormat = Literal["mcp", "openai", "openai-chat", "anthropic"]
"""`openai` is the Responses API's shape, `openai-chat` that of Chat Completions."""


class ToolList(Wire):
    """Tools in the shape that was asked for."""

    tools: tuple[dict[str, Any], ...]


class CallList(Wire):
    """Calls in order; ask again with `after` = the last `sequence` for more."""

    calls: tuple[CallRecord, ...]


class ApprovalList(Wire):
    """Approvals in the order of their last change; ask again with `after` = the last `revision` for more."""

    approvals: tuple[Approval, ...]


class UpstreamEntry(Wire):
    """An MCP server behind the gateway: tools that are accepted, and those that wait for the operator."""

    name: str
    where: str
    tools: tuple[ToolDefinition, ...]
    waiting: tuple[ToolDefinition, ...]


class UpstreamList(Wire):
    """All configured servers. `tools` is empty for one that no session has used yet."""

    upstreams: tuple[UpstreamEntry, ...]


class Cancelled(Wire):
    """Whether there was still something to cancel."""

    id: str
    cancelled: bool


class Accepted(Wire):
    """The first event of a stream: what the call is called here, and what its caller called it."""

    id: str
    call_id: str | None
    tool: str


class Output(Wire):
    """An event: the bytes of one stream from `offset` on; as `base64` too where they are not UTF-8."""

    stream: Stream
    offset: int
    text: str
    base64: str | None = None


class Progress(Wire):
    """An event: how many bytes each stream has had, where the bytes themselves may not be shown yet."""

    bytes: dict[Stream, int]


class FileEntry(Wire):
    """One entry of a workspace. `path`, from the workspace on, is for people: what cannot be shown in it is escaped,
    and then `path_base64` is there. `href` is the exact path, percent-encoded, for the route of the files. The client
    puts the exact path into `path`.
    """

    path: str
    href: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified: float
    path_base64: str | None = None


class FileList(Wire):
    """A folder; `complete` is False where it has more than is listed."""

    entries: tuple[FileEntry, ...]
    complete: bool


class Written(Wire):
    """What an upload wrote; of an archive `bytes` are those of its files."""

    files: int
    bytes: int


class TerminalTicket(Wire):
    """Opens one WebSocket at `path?ticket=...`, once, within `expires_seconds`."""

    ticket: str
    path: str
    expires_seconds: float


class Resize(Wire):
    """A text message to a terminal: its new size."""

    type: Literal["resize"] = "resize"
    columns: Annotated[int, Field(ge=1, le=MOST_CHARACTERS)]
    rows: Annotated[int, Field(ge=1, le=MOST_CHARACTERS)]


class TerminalEnd(Wire):
    """The last text message of a terminal whose shell has ended: by `exit` or `signal`, with its code or number."""

    type: Literal["end"] = "end"
    how: Literal["exit", "signal", "oom", "pids"]
    code: int


class StoredResultEntry(Reference):
    """A stored result in a list; times in seconds since 1970, after `expires` it is gone."""

    created: float
    expires: float


class StoredResultList(Wire):
    """The session's stored results, in the order of their keys."""

    results: tuple[StoredResultEntry, ...]


class SignedUrlRequest(Wire):
    """Of which result, a whole reference or a key of the session; and for how long, a week at most."""

    reference: Annotated[str, Field(min_length=1, max_length=1000)]
    seconds: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600


class SignedUrl(Wire):
    """Whoever has it reads the result, until `expires` (seconds since 1970) or until it is revoked."""

    url: str
    expires: float


class Page(Wire):
    """A part of a result as text; `truncated` where the page was full before the part ended."""

    text: str
    truncated: bool
