"""Results of sessions, each session's in a scope of its own. What exists and when it expires, the journal knows."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stores.backend import StoredKey, StoredObject
from stores.errors import Damaged
from stores.grep import GrepPage, grep
from stores.lines import LineIndex, LinesPage, page
from stores.store import Probe, Source, Store

MAX_MATCHES: Final = 250
PAGE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A stored result: size in bytes, SHA-256 in hexadecimal, and the media type it was announced with."""

    key: str
    bytes: int
    sha256: str
    media_type: str


class ResultStore:
    """Keeps results of sessions over one store. No method reaches another session than the one it is given.

    A session id is one segment of a key. Every method raises KeyRefused before the store is asked, and may raise
    StoreUnavailable; those that name a stored result raise NotFound.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def kind(self) -> str:
        """The store's protocol: `file`, `memory`, `s3`, ..."""
        return self._store.kind

    async def put(
        self, session_id: str, key: str, source: Source, media_type: str, *, max_bytes: int | None = None
    ) -> StoredResult:
        """Store a result whole or not at all; see `Store.put`. Raises AlreadyExists, QuotaExceeded."""
        stored = await self._scope(session_id).put(key, source, max_bytes=max_bytes)
        return _result(stored, media_type)

    async def put_file(
        self, session_id: str, key: str, path: Path, media_type: str, *, sha256: str, size: int
    ) -> StoredResult:
        """Store a finished local file, by a hard link where that is possible; see `Store.put_file`."""
        stored = await self._scope(session_id).put_file(key, path, sha256=sha256, size=size)
        return _result(stored, media_type)

    def read(self, session_id: str, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes `start..end` in chunks of at most 256 KiB; see `Store.read`."""
        return self._scope(session_id).read(key, start, end)

    async def read_whole(self, session_id: str, key: str, sha256: str) -> AsyncIterator[bytes]:
        """Yield all of it, the last chunk only when the digest is right: whoever has the end has what was stored.

        Raises Damaged.
        """
        digest, held = hashlib.sha256(), b""
        async for chunk in self.read(session_id, key):
            digest.update(chunk)
            if held:
                yield held
            held = chunk
        if digest.hexdigest() != sha256:
            raise Damaged("what is stored is not what was put there", "run the call again")
        if held:
            yield held

    async def lines(
        self,
        session_id: str,
        key: str,
        first: int,
        last: int,
        *,
        max_bytes: int = PAGE_BYTES,
        index: LineIndex | None = None,
    ) -> LinesPage:
        """Return the lines `first..last`, 1-based and inclusive, at most `max_bytes` stored bytes of them.

        Memory is bounded by `max_bytes`, whatever the result and its lines are. Without an index all that is before
        the first line is read.
        """
        return await self._scope(session_id).scan(key, lambda reader: page(reader, first, last, max_bytes, index))

    async def grep(
        self,
        session_id: str,
        key: str,
        pattern: str,
        *,
        max_matches: int = MAX_MATCHES,
        max_bytes: int = PAGE_BYTES,
        ignore_case: bool = False,
        context: int = 0,
        index: LineIndex | None = None,
    ) -> GrepPage:
        """Return the lines that an RE2 pattern matches; see `stores.grep.grep`.

        Raises PatternRefused, and StoreUnavailable where google-re2 is not installed.
        """
        return await self._scope(session_id).scan(
            key,
            lambda reader: grep(
                reader,
                pattern,
                max_matches=max_matches,
                max_bytes=max_bytes,
                ignore_case=ignore_case,
                context=context,
                index=index,
            ),
        )

    async def size(self, session_id: str, key: str) -> int:
        """Return a result's size in bytes."""
        return await self._scope(session_id).size(key)

    async def list(self, session_id: str) -> tuple[StoredKey, ...]:
        """Return what is stored for the session, in the order of keys; nothing is an empty tuple."""
        return await self._scope(session_id).list()

    async def delete(self, session_id: str, key: str) -> None:
        """Delete one result."""
        await self._scope(session_id).delete(key)

    async def delete_session(self, session_id: str) -> None:
        """Delete all that is stored for the session; nothing there is fine."""
        await self._scope(session_id).delete_all()

    def store_uri(self, session_id: str, key: str) -> str | None:
        """Return `file://` or `s3://...`, for those who have access to the store itself; None for memory."""
        return self._scope(session_id).uri(key)

    async def probe(self) -> Probe:
        """Try the store for real; see `Store.probe`."""
        return await self._store.probe()

    async def aclose(self) -> None:
        """Close the store; results in memory are gone."""
        await self._store.aclose()

    def _scope(self, session_id: str) -> Store:
        return self._store.scoped(session_id)


def _result(stored: StoredObject, media_type: str) -> StoredResult:
    return StoredResult(stored.key, stored.bytes, stored.sha256, media_type)
