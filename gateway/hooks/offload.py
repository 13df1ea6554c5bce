"""Offloading: always the last step on a result's way back. What is too large for a model goes to the session's store,
and a pointer with a preview takes its place."""

import base64
import functools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import anyio.to_thread

from gateway.errors import SettingsError
from gateway.hooks.hook import HookContext
from gateway.journal import ResultRow
from gateway.matching import rank
from gateway.models import (
    OUTPUT_STATUSES,
    STREAMS,
    Block,
    DecisionRecord,
    MediaBlock,
    Part,
    Reference,
    TextBlock,
    ToolCall,
    ToolResult,
)
from gateway.shelf import Content, Shelf, SpooledFile
from gateway.spool import Spool, Spools
from gateway.text import decode_head, decode_tail, is_text
from stores import (
    AlwaysOffload,
    Measured,
    NeverOffload,
    OffloadOverBytes,
    OffloadOverChars,
    OffloadOverLines,
    OffloadPolicy,
    ResultSize,
    StoreError,
    is_pointer,
    pointer,
    preview,
    result_key,
)
from stores.pointer import HOW_TO_READ

logger = logging.getLogger(__name__)

READ_TOOL: Final = "read_result"
POINTER_BYTES: Final = 64 * 1024
"""No pointer is longer; what only begins like one is output."""
_OURS: Final = (AlwaysOffload, NeverOffload, OffloadOverBytes, OffloadOverChars, OffloadOverLines)
"""Policies that are quick; any other is a stranger's code, and runs in a worker thread."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A result after offloading, the rows that index what was stored, and what was decided."""

    result: ToolResult
    rows: tuple[ResultRow, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Which policy judges the results of the tools that `tools` names."""

    tools: tuple[str, ...]
    policy: OffloadPolicy


class Rules:
    """Exact name before list before glob before `*`; two rules of equal rank for one tool are refused."""

    def __init__(self, rules: Sequence[Rule], tools: Sequence[str]) -> None:
        self._rules = tuple(rules)
        self.policy = functools.lru_cache(maxsize=1024)(self._policy)  # several times a call
        for tool in tools:
            self.policy(tool)

    def _policy(self, tool: str) -> OffloadPolicy:
        """The policy for a tool; never, where no rule names it. Raises SettingsError where two do alike."""
        ranked = [(place, rule) for rule in self._rules if (place := rank(tool, rule.tools)) is not None]
        if not ranked:
            return NeverOffload()
        best = min(place for place, _ in ranked)
        first, *others = [rule for place, rule in ranked if place == best]
        if others:
            raise SettingsError(
                f"offload.rules: two rules match the tool {tool!r} equally well", "Name the tool in one of them only."
            )
        return first.policy


@dataclass
class SpoolSize:
    """How large one stream is; characters and lines are counted only when a policy asks, in its worker thread."""

    spool: Spool
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = self.spool.total

    @cached_property
    def characters(self) -> int:
        return self.spool.count_characters()

    @cached_property
    def lines(self) -> int:
        return self.spool.count_lines()


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing of a result that can be stored: a program's stream, the structured content, an image or sound.

    `name` is its word in the key. `shown` is how many characters stand for it in the answer now.
    """

    part: Part
    name: str
    content: Spool | bytes
    size: Measured
    shown: int
    media_type: str | None = None
    block: MediaBlock | None = None


def pieces(result: ToolResult, spools: Spools) -> Iterator[Piece]:
    """What of a result is not empty, in the order in which it is shown."""
    for stream in STREAMS:
        spool = spools[stream]
        if spool.total:
            shown = sum(len(block.text) for block in result.content if _is_of(block, stream))
            yield Piece(stream, stream, spool, SpoolSize(spool), shown)
    for number, block in enumerate((one for one in result.content if isinstance(one, MediaBlock)), start=1):
        size = ResultSize(len(block.data), block.size, 0)
        content = base64.b64decode(block.data)
        if content:
            yield Piece("media", f"media_{number}", content, size, len(block.data), block.mimeType, block)
    if result.structured not in (None, {}, [], ""):
        text = json.dumps(result.structured, ensure_ascii=False)
        content = text.encode(errors="surrogatepass")
        size = ResultSize(len(text), len(content), 1)
        yield Piece("structured", "structured", content, size, len(text), "application/json")


class Offload:
    """Stores what the rules say, under `sandgate://<session>/results/<key>`."""

    def __init__(self, rules: Rules, shelf: Shelf, *, preview_characters: int, retention_seconds: float) -> None:
        self._rules = rules
        self._shelf = shelf
        self._preview = preview_characters
        self._retention = retention_seconds

    def may_store(self, tool: str) -> bool:
        """Whether the whole output of this tool may be wanted later, so that it must be kept until then."""
        return not isinstance(self._rules.policy(tool), NeverOffload)

    async def apply(self, ctx: HookContext, result: ToolResult, spools: Spools, *, show_uri: bool) -> Offloaded:
        """Store each piece that its policy names; a store or a policy that fails leaves it as it is, with a note."""
        if result.status not in OUTPUT_STATUSES or isinstance(self._rules.policy(ctx.call.tool), NeverOffload):
            return Offloaded(result)
        done = Offloaded(result)
        for piece in pieces(result, spools):
            started = time.perf_counter()
            try:
                if await self._wanted(ctx, piece):
                    done = await self._store(ctx, done, piece, started, show_uri=show_uri)
            except StoreError as error:
                logger.warning("call %s of session %s: result not stored: %s", ctx.call.id, ctx.call.session_id, error)
                note = f"{piece.name} could not be stored ({error.message}); what is shown here is all that is left"
                done = _failed(done, note, "store failed", error.message, started)
            except Exception as error:  # a stranger's policy: its fault is told, and the result stays
                logger.exception("the offload policy for %s raised in call %s", ctx.call.tool, ctx.call.id)
                note = f"{piece.name} is not stored: its policy is broken; what is shown here is all that is left"
                done = _failed(done, note, "policy failed", type(error).__name__, started)
        return done

    async def _wanted(self, ctx: HookContext, piece: Piece) -> bool:
        policy = self._rules.policy(ctx.call.tool)
        if isinstance(piece.content, Spool):
            if piece.size.bytes <= POINTER_BYTES and is_pointer((await piece.content.read(0, 1000)).decode("latin-1")):
                return False
            if piece.content.path is None and isinstance(policy, _OURS):
                return policy.should_offload(ctx.call.tool, piece.size, ctx)
        return await anyio.to_thread.run_sync(policy.should_offload, ctx.call.tool, piece.size, ctx)

    async def _store(
        self, ctx: HookContext, done: Offloaded, piece: Piece, started: float, *, show_uri: bool
    ) -> Offloaded:
        row = await self.keep(ctx.call, piece)
        reference = Reference(
            reference=f"sandgate://{row.session_id}/results/{row.key}",
            stream=piece.part,
            bytes=row.bytes,
            media_type=row.media_type,
            sha256=row.sha256,
            store_uri=self._shelf.store.store_uri(row.session_id, row.key) if show_uri else None,
        )
        can_read = any(tool.name == READ_TOOL for tool in ctx.tools)
        text = await self._pointer(reference, piece, HOW_TO_READ if can_read else "")
        result = _replaced(done.result, piece, text) if len(text) < piece.shown else done.result
        result = result.model_copy(
            update={"references": (*result.references, reference), "notes": result.notes + _cut_note(piece)}
        )
        return Offloaded(result, (*done.rows, row), (*done.decisions, _record("stored", row.key, started)))

    async def keep(self, call: ToolCall, piece: Piece) -> ResultRow:
        """Put one piece into the session's store; the row is for the journal. Raises StoreError."""
        key, media_type = result_key(call.sequence, call.tool, piece.name), piece.media_type
        content: Content
        if isinstance(piece.content, Spool):
            spool = piece.content
            head = await spool.read(0, 64 * 1024)
            media_type = "text/plain; charset=utf-8" if is_text(head) else "application/octet-stream"
            content = (
                SpooledFile(spool.path, spool.kept, spool.sha256) if spool.path else await spool.read(0, spool.kept)
            )
        else:
            content = piece.content
        stored = await self._shelf.put(call.session_id, key, content, media_type or "application/octet-stream")
        now = time.time()
        return ResultRow(
            session_id=call.session_id,
            key=key,
            call_id=call.id,
            stream=piece.part,
            bytes=stored.bytes,
            media_type=stored.media_type,
            sha256=stored.sha256,
            created=now,
            expires=now + self._retention,
            line_index=piece.content.lines.to_bytes() if isinstance(piece.content, Spool) else b"",
        )

    async def withhold(self, call: ToolCall, result: ToolResult, spools: Spools) -> tuple[ResultRow, ...]:
        """Keep all of a result for the operator only; what cannot be stored is gone."""
        rows = []
        for piece in pieces(result, spools):
            try:
                rows.append(replace(await self.keep(call, piece), withheld=1))
            except StoreError as error:
                logger.warning("call %s: withheld output not stored: %s", call.id, error)
        return tuple(rows)

    async def _pointer(self, reference: Reference, piece: Piece, how_to_read: str) -> str:
        text = ""
        if isinstance(piece.content, Spool):
            head, tail = await piece.content.head_and_tail(max(8 * self._preview, 8))
            text = preview(decode_head(head), decode_tail(tail), max_characters=self._preview, cut=bool(tail))
        elif piece.part == "structured":
            text = preview(piece.content.decode(errors="replace"), "", max_characters=self._preview, cut=False)
        return pointer(
            reference.reference,
            stream=piece.name,
            bytes=reference.bytes,
            media_type=reference.media_type,
            preview=text,
            how_to_read=how_to_read,
        )


def _replaced(result: ToolResult, piece: Piece, text: str) -> ToolResult:
    """The result with the text in the place of one piece."""
    if piece.part == "structured":
        content: Sequence[Block] = (*result.content, TextBlock(text=text))
        return result.model_copy(update={"content": content, "structured": None})
    if piece.part == "media":
        content = [TextBlock(text=text) if one is piece.block else one for one in result.content]
    else:
        places = [place for place, one in enumerate(result.content) if _is_of(one, piece.part)]
        content = [one for one in result.content if not _is_of(one, piece.part)]
        content.insert(places[0], TextBlock(text=text, stream=piece.part))
    return result.model_copy(update={"content": tuple(content)})


def _is_of(block: Block, part: Part) -> bool:
    """Whether a block is text of that stream; text that no program printed counts as its output."""
    return isinstance(block, TextBlock) and (block.stream or "stdout") == part


def _failed(done: Offloaded, note: str, decision: str, reason: str, started: float) -> Offloaded:
    result = done.result.model_copy(update={"notes": (*done.result.notes, note)})
    return Offloaded(result, done.rows, (*done.decisions, _record(decision, reason, started)))


def _cut_note(piece: Piece) -> tuple[str, ...]:
    spool = piece.content
    if not isinstance(spool, Spool) or not spool.truncated:
        return ()
    return (f"{piece.name}: the first {spool.kept:,} of {spool.total:,} bytes are stored, the session's limit",)


def _record(decision: str, reason: str, started: float) -> DecisionRecord:
    return DecisionRecord(
        hook="offload",
        point="post_tool_call",
        decision=decision,
        reason=reason,
        duration_ms=round((time.perf_counter() - started) * 1000, 3),
    )
