"""SessionResults: the stored results of one session, found by reference, by nobody else and not after their end."""

import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gateway.errors import Gone, NotFound, Unavailable, Unprocessable
from gateway.journal import ResultRow
from gateway.shelf import Shelf
from stores import Damaged, LineIndex, PatternRefused, StoreError
from stores import NotFound as Missing

_LINES: Final = re.compile(r"(\d{1,12})-(\d{1,12})")
_REFERENCE: Final = re.compile(r"sandgate://(s-[0-9a-f]{32})/results/([A-Za-z0-9._/-]{1,400})")


def line_range(text: str) -> tuple[int, int]:
    """What a client writes as "1-200". Raises Unprocessable."""
    found = _LINES.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise Unprocessable("lines: not a range of lines", 'Write it as "1-200", from 1.')
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class SessionResults:
    """Reads one session's results; `operator` also sees what a broken hook withheld."""

    session_id: str
    shelf: Shelf
    operator: bool = False

    async def row(self, key: str) -> ResultRow:
        """The index entry. Raises NotFound (absent, forged, withheld) or Gone (expired, deleted)."""
        row = await self.shelf.journal.result(self.session_id, key)
        if row is None or (row.withheld and not self.operator):
            raise NotFound("no such result", "List the session's results.")
        if row.deleted is not None or row.expires < time.time():
            raise Gone("this result has expired", "Run the call again.")
        return row

    async def find(self, reference: str) -> ResultRow:
        """The entry that a whole reference, or a bare key, stands for; another session's is absent."""
        whole = _REFERENCE.fullmatch(reference)
        if whole is None and "://" in reference:
            raise NotFound("no such result", "Give a reference as it stands in a result: sandgate://...")
        if whole is not None and whole[1] != self.session_id:
            raise NotFound("no such result", "List the session's results.")
        return await self.row(whole[2] if whole else reference)

    async def size(self, reference: str) -> int:
        return (await self.find(reference)).bytes

    async def read(self, reference: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes `start..end` in chunks; of the whole result the last chunk comes only when the digest is right."""
        row = await self.find(reference)
        whole = start == 0 and (end is None or end >= row.bytes)
        with _as_problems():
            chunks = (
                self.shelf.store.read_whole(self.session_id, row.key, row.sha256)
                if whole
                else self.shelf.store.read(self.session_id, row.key, start, end)
            )
            async for chunk in chunks:
                yield chunk

    async def lines(self, reference: str, first: int, last: int, max_bytes: int) -> tuple[str, bool]:
        """Lines `first..last` (from 1, both included), and whether `max_bytes` cut them."""
        if not 1 <= first <= last:
            raise Unprocessable(f"lines: {first}-{last} is no range", 'Write it as "1-200", from 1.')
        row = await self.find(reference)
        with _as_problems():
            page = await self.shelf.store.lines(
                self.session_id,
                row.key,
                first,
                last,
                max_bytes=max_bytes,
                index=LineIndex.from_bytes(row.line_index),
            )
        return "\n".join(page.lines), page.truncated

    async def grep(self, reference: str, pattern: str, max_bytes: int) -> tuple[str, bool]:
        """Matching lines as `number:text`. Linear-time expressions (RE2); raises Unprocessable for others."""
        row = await self.find(reference)
        with _as_problems():
            index = LineIndex.from_bytes(row.line_index)
            page = await self.shelf.store.grep(self.session_id, row.key, pattern, max_bytes=max_bytes, index=index)
        return "".join(f"{line.number}:{line.text}\n" for line in page.lines), page.truncated

    async def delete(self, reference: str) -> None:
        """Delete one result; whoever asks for it again is told that it is gone."""
        await self.shelf.delete([await self.find(reference)])

    async def put(self, key: str, source: AsyncIterable[bytes] | bytes, media_type: str, expires: float) -> ResultRow:
        """Store something that no call printed (a collected file), and index it."""
        index = LineIndex()
        stored = await self.shelf.put(self.session_id, key, _indexed(source, index), media_type)
        row = ResultRow(
            session_id=self.session_id,
            key=key,
            call_id=None,
            stream="stdout",
            bytes=stored.bytes,
            media_type=media_type,
            sha256=stored.sha256,
            created=time.time(),
            expires=expires,
            line_index=index.to_bytes(),
        )
        self.shelf.journal.add_result(row)
        return row

    async def forget_below(self, prefix: str) -> None:
        """Delete what nobody was ever told of, such as the part of a collection that a crash has ended."""
        rows = await self.shelf.journal.results(self.session_id)
        await self.shelf.unindex([row for row in rows if row.key.startswith(f"{prefix}/")])


async def _indexed(source: AsyncIterable[bytes] | bytes, index: LineIndex) -> AsyncIterator[bytes]:
    if isinstance(source, bytes):
        index.add(source)
        yield source
        return
    async for chunk in source:
        index.add(chunk)
        yield chunk


@contextmanager
def _as_problems() -> Iterator[None]:
    """What a store raises while it is read, as its reader is told."""
    try:
        yield
    except (Missing, Damaged) as error:
        raise Gone(f"this result's bytes are gone: {error.message}", "Run the call again.") from error
    except PatternRefused as error:
        raise Unprocessable(error.message, error.remedy, code="invalid_pattern") from error
    except StoreError as error:
        raise Unavailable(f"the store: {error.message}", error.remedy, code="store_unavailable") from error
