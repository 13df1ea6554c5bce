"""From what a tool wrote and how it ended to the ToolResult that hooks and agents see."""

import json

from gateway.models import STREAMS, Block, Fault, MediaBlock, TextBlock, ToolCall, ToolResult
from gateway.spool import Spools
from gateway.text import is_text, joined
from gateway.tools.tool import Outcome


async def build_result(call: ToolCall, outcome: Outcome, spools: Spools, limit: int) -> ToolResult:
    """A result of bounded size: each stream whole up to `limit` bytes, else its head and tail."""
    blocks: list[Block] = []
    notes, truncated = list(outcome.notes), False
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
        content=(*blocks, *outcome.media),
        structured=outcome.structured,
        exit_code=outcome.exit_code,
        error=_fault(outcome),
        truncated=truncated,
        notes=tuple(notes),
    )


def bounded(result: ToolResult, limit: int, *, cut: bool) -> ToolResult:
    """The result with what stayed in it, and was not stored, cut to `limit` bytes a piece."""
    stored = {one.stream for one in result.references}
    blocks: list[Block] = []
    for block in result.content:
        bounded_block = block if (block.stream or "stdout") in stored else _bounded(block, limit)
        cut = cut or bounded_block is not block
        blocks.append(bounded_block)
    cut = cut or (result.truncated and not stored)
    if result.structured is not None and len(json.dumps(result.structured)) > limit:
        note = f"structured content over {limit:,} bytes is left out"
        cut, result = True, result.model_copy(update={"structured": None, "notes": (*result.notes, note)})
    return result.model_copy(update={"content": tuple(blocks), "truncated": cut})


def _bounded(block: Block, limit: int) -> Block:
    if isinstance(block, MediaBlock):
        return TextBlock(text=f"{block.text} left out: over {limit:,} bytes") if len(block.data) > limit else block
    if 4 * len(block.text) <= limit:
        return block
    whole, half = block.text.encode(errors="replace"), limit // 2
    if len(whole) <= limit:
        return block
    return block.model_copy(update={"text": joined(whole[:half], whole[-half:], len(whole))})


def _fault(outcome: Outcome) -> Fault | None:
    if outcome.code is None:
        return None
    return Fault(code=outcome.code, message=outcome.message, remedy=outcome.remedy)
