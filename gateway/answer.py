"""From what a tool wrote and how it ended to the ToolResult that hooks and agents see."""

from gateway.models import STREAMS, Fault, TextBlock, ToolCall, ToolResult
from gateway.spool import Spools
from gateway.text import is_text, joined
from gateway.tools.tool import Outcome


async def build_result(call: ToolCall, outcome: Outcome, spools: Spools, limit: int) -> ToolResult:
    """A result of bounded size: each stream whole up to `limit` bytes, else its head and tail."""
    blocks, notes, truncated = [], list(outcome.notes), False
    for stream in STREAMS:
        spool = spools[stream]
        if not spool.total:
            continue
        head, tail = await spool.head_and_tail(limit)
        blocks.append(TextBlock(text=joined(head, tail, spool.total), stream=stream))
        truncated = truncated or bool(tail)
        if not is_text(head):
            notes.append(f"{stream} is not valid UTF-8: shown with replacement characters")
    return ToolResult(
        id=call.id,
        call_id=call.call_id,
        tool=call.tool,
        status=outcome.status,
        content=tuple(blocks),
        structured=outcome.structured,
        exit_code=outcome.exit_code,
        error=_fault(outcome),
        truncated=truncated,
        notes=tuple(notes),
    )


def _fault(outcome: Outcome) -> Fault | None:
    if outcome.code is None:
        return None
    return Fault(code=outcome.code, message=outcome.message, remedy=outcome.remedy)
