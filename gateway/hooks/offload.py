"""Offloading: always the last step on a result's way back. What is too large for a model goes to the session's store,
and a pointer with a preview takes its place."""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import anyio.to_thread

from gateway.errors import SettingsError
from gateway.journal import ResultRow
from gateway.matching import rank
from gateway.models import OUTPUT_STATUSES, STREAMS, DecisionRecord, Reference, Stream, TextBlock, ToolCall, ToolResult
from gateway.spool import Spool, Spools
from gateway.text import decode_head, decode_tail, is_text
from stores import NeverOffload, OffloadPolicy, ResultStore, StoreError, pointer, preview, result_key

logger = logging.getLogger(__name__)


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


class Offload:
    """Stores what the rules say, under `sandgate://<session>/results/<key>`."""

    def __init__(
        self, rules: Rules, results: ResultStore, *, preview_characters: int, retention_seconds: float
    ) -> None:
        self._rules = rules
        self._results = results
        self._preview = preview_characters
        self._retention = retention_seconds

    def may_store(self, tool: str) -> bool:
        """Whether the whole output of this tool may be wanted later, so that it must be kept until then."""
        return not isinstance(self._rules.policy(tool), NeverOffload)

    async def apply(self, call: ToolCall, result: ToolResult, spools: Spools, *, show_uri: bool) -> Offloaded:
        """Store each stream that its policy names; a store that fails leaves the result as it is, with a note."""
        if result.status not in OUTPUT_STATUSES:
            return Offloaded(result)
        offloaded = Offloaded(result)
        for stream in STREAMS:
            if spools[stream].total and await self._wanted(call.tool, spools[stream]):
                offloaded = await self._store(call, offloaded, stream, spools[stream], show_uri=show_uri)
        return offloaded

    async def _wanted(self, tool: str, spool: Spool) -> bool:
        policy = self._rules.policy(tool)
        if spool.path is None:
            return policy.should_offload(tool, SpoolSize(spool), None)
        return await anyio.to_thread.run_sync(policy.should_offload, tool, SpoolSize(spool), None)

    async def _store(
        self, call: ToolCall, done: Offloaded, stream: Stream, spool: Spool, *, show_uri: bool
    ) -> Offloaded:
        started = time.perf_counter()
        try:
            row = await self.keep(call, stream, spool)
        except StoreError as error:
            logger.warning("call %s of session %s: result not stored: %s", call.id, call.session_id, error)
            note = f"{stream} could not be stored ({error.message}); what is shown here is all that is left"
            return Offloaded(
                done.result.model_copy(update={"notes": (*done.result.notes, note)}),
                done.rows,
                (*done.decisions, _record("store failed", error.message, started)),
            )
        uri = self._results.store_uri(call.session_id, row.key) if show_uri else None
        reference = Reference(
            reference=f"sandgate://{call.session_id}/results/{row.key}",
            stream=stream,
            bytes=row.bytes,
            media_type=row.media_type,
            sha256=row.sha256,
            store_uri=uri,
        )
        block = TextBlock(text=await self._pointer(reference, spool), stream=stream)
        result = done.result.model_copy(
            update={
                "content": _replaced(done.result.content, stream, block),
                "references": (*done.result.references, reference),
                "notes": done.result.notes + _cut_note(stream, spool),
            }
        )
        return Offloaded(result, (*done.rows, row), (*done.decisions, _record("stored", row.key, started)))

    async def keep(self, call: ToolCall, stream: Stream, spool: Spool) -> ResultRow:
        """Put one stream's bytes into the session's store; the row is for the journal. Raises StoreError."""
        key = result_key(call.sequence, call.tool, stream)
        text = is_text(await spool.read(0, 64 * 1024))
        media_type = "text/plain; charset=utf-8" if text else "application/octet-stream"
        if spool.path is not None:
            await self._results.put_file(
                call.session_id, key, spool.path, media_type, sha256=spool.sha256, size=spool.kept
            )
        else:
            await self._results.put(call.session_id, key, await spool.read(0, spool.kept), media_type)
        now = time.time()
        return ResultRow(
            session_id=call.session_id,
            key=key,
            call_id=call.id,
            stream=stream,
            bytes=spool.kept,
            media_type=media_type,
            sha256=spool.sha256,
            created=now,
            expires=now + self._retention,
        )

    async def _pointer(self, reference: Reference, spool: Spool) -> str:
        head, tail = await spool.head_and_tail(max(8 * self._preview, 8))
        text = preview(decode_head(head), decode_tail(tail), max_characters=self._preview, cut=bool(tail))
        return pointer(
            reference.reference,
            stream=reference.stream,
            bytes=reference.bytes,
            media_type=reference.media_type,
            preview=text,
        )


def _replaced(content: Sequence[TextBlock], stream: Stream, block: TextBlock) -> tuple[TextBlock, ...]:
    """The content with one stream's text replaced, unless the pointer is longer than what it stands for."""
    return tuple(block if one.stream == stream and len(block.text) < len(one.text) else one for one in content)


def _cut_note(stream: Stream, spool: Spool) -> tuple[str, ...]:
    if not spool.truncated:
        return ()
    return (f"{stream}: the first {spool.kept:,} of {spool.total:,} bytes are stored, the session's limit",)


def _record(decision: str, reason: str, started: float) -> DecisionRecord:
    return DecisionRecord(
        hook="offload",
        point="post_tool_call",
        decision=decision,
        reason=reason,
        duration_ms=round((time.perf_counter() - started) * 1000, 3),
    )
