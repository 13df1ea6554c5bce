"""Shelf: everything that is stored for sessions, how much that may be, and what goes when it is too much."""

import logging
import time
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gateway.journal import Journal, ResultRow
from stores import NotFound, QuotaExceeded, ResultStore, StoredResult, StoreError

logger = logging.getLogger(__name__)

WhenFull = Literal["refuse", "oldest"]
_FULL = "Read and delete stored results, or ask the operator for more room."


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """A finished local file whose size and digest are known."""

    path: Path
    size: int
    sha256: str


Content = AsyncIterable[bytes] | bytes | SpooledFile


@dataclass
class Shelf:
    """The one way to store and to delete a result, so that sizes are known without asking.

    A session may keep its `results_size`, all together `total_bytes`. What does not fit is refused with QuotaExceeded,
    or, where `when_full` is `oldest`, stored, and the oldest results go: of the session first, then of all.
    """

    store: ResultStore
    journal: Journal
    total_bytes: int
    when_full: WhenFull = "refuse"
    _limits: dict[str, int] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)
    _all_used: int = 0

    def register(self, session_id: str, limit: int, used: int = 0) -> None:
        """Make room for a session; `used` is what an earlier process stored for it."""
        self._limits[session_id] = limit
        if used:
            self._count(session_id, used)

    def used(self, session_id: str) -> int:
        return self._used.get(session_id, 0)

    def has_stored(self, session_id: str) -> bool:
        """Whether anything was ever put here for a session, also in vain."""
        return session_id in self._used

    def room(self, session_id: str) -> int:
        """The largest result that could be stored now, in bytes."""
        limit = self._limits.get(session_id, 0)
        if self.when_full == "oldest":
            return min(limit, self.total_bytes)
        return max(0, min(limit - self.used(session_id), self.total_bytes - self._all_used))

    async def put(self, session_id: str, key: str, content: Content, media_type: str) -> StoredResult:
        """Store a result whole or not at all; the caller indexes it. Raises StoreError."""
        room = self.room(session_id)
        size = len(content) if isinstance(content, bytes) else content.size if isinstance(content, SpooledFile) else 0
        if size > room:
            raise QuotaExceeded(f"{size:,} bytes do not fit, {room:,} are left", _FULL)
        self._count(session_id, size)  # before any wait: calls that end together share what is left
        stored = size
        try:
            result = await self._put(session_id, key, content, media_type, room)
            stored = result.bytes
        except BaseException:
            stored = 0
            raise
        finally:
            self._count(session_id, stored - size)
        await self._make_room(session_id)
        return result

    async def _put(self, session_id: str, key: str, content: Content, media_type: str, room: int) -> StoredResult:
        if isinstance(content, SpooledFile):
            return await self.store.put_file(
                session_id, key, content.path, media_type, sha256=content.sha256, size=content.size
            )
        return await self.store.put(session_id, key, content, media_type, max_bytes=room)

    async def _make_room(self, session_id: str) -> None:
        if self.when_full != "oldest":
            return
        if (over := self.used(session_id) - self._limits.get(session_id, 0)) > 0:
            await self._delete_oldest(over, session_id)
        if (over := self._all_used - self.total_bytes) > 0:
            await self._delete_oldest(over, None)

    async def _delete_oldest(self, bytes: int, session_id: str | None) -> None:
        going = []
        for row in await self.journal.oldest_results(session_id):
            if bytes <= 0:
                break
            going.append(row)
            bytes -= row.bytes
        await self.delete(going)

    async def delete(self, rows: Iterable[ResultRow]) -> None:
        """Delete results; one that cannot be deleted now stays indexed, and is tried again when it has expired."""
        for row in rows:
            try:
                await self._remove(row.session_id, row.key)
            except StoreError as error:
                logger.warning("result %s of session %s not deleted: %s", row.key, row.session_id, error)
                continue
            if self.journal.mark_deleted([row], time.time()):
                self._count(row.session_id, -row.bytes)

    async def unindex(self, rows: Sequence[ResultRow]) -> None:
        """Delete results that nobody was ever told of, and free their keys. Raises StoreError."""
        for row in rows:
            await self._remove(row.session_id, row.key)
        self.journal.forget_results(rows)
        for row in rows:
            self._count(row.session_id, -row.bytes)

    async def _remove(self, session_id: str, key: str) -> None:
        with suppress(NotFound):  # whoever deletes it at the same moment means the same
            await self.store.delete(session_id, key)

    async def delete_expired(self) -> None:
        """Delete what is over its time."""
        await self.delete(await self.journal.expired_results(time.time()))

    async def delete_unindexed(self, session_id: str) -> None:
        """Delete what was stored and never indexed, by a process that ended in between: nobody has its reference."""
        try:
            known = {row.key for row in await self.journal.results(session_id)}
            for stored in await self.store.list(session_id):
                if stored.key not in known:
                    await self._remove(session_id, stored.key)
        except StoreError as error:
            logger.warning("results of session %s could not be looked at: %s", session_id, error)

    async def forget(self, session_ids: Sequence[str]) -> None:
        """Remove what is left of sessions that are on record no more."""
        for session_id in session_ids:
            self._limits.pop(session_id, None)
            self._all_used -= self._used.pop(session_id, 0)
            try:
                await self.store.delete_session(session_id)
            except StoreError as error:
                logger.warning("results of session %s could not be removed: %s", session_id, error)

    def _count(self, session_id: str, bytes: int) -> None:
        self._used[session_id] = self.used(session_id) + bytes
        self._all_used += bytes
