"""What every kind of store does."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from stores import (
    AlreadyExists,
    KeyRefused,
    NotFound,
    QuotaExceeded,
    Store,
    StoredObject,
    StoreUnavailable,
)
from stores.remote import SINGLE_PUT_BYTES

pytestmark = pytest.mark.anyio

FORGED = ["", "..", "../s2/x", "/etc/passwd", "file:///etc/passwd", "s3://other/x", "a//b", "a/./b", ".partial", "a*"]


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def keys(store: Store) -> list[str]:
    return [entry.key for entry in await store.list()]


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_put_then_read_gives_the_same_bytes(store: Store) -> None:
    data = bytes(range(256)) * 5000
    assert await store.put("a/b", data) == StoredObject("a/b", len(data), digest(data))
    assert await whole(store.read("a/b")) == data


async def test_put_streams_from_an_iterator(store: Store) -> None:
    assert await store.put("k", pieces(b"one ", b"", b"two")) == StoredObject("k", 7, digest(b"one two"))
    assert await whole(store.read("k")) == b"one two"


async def test_put_stores_a_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert await store.put("k", tmp_path / "f") == StoredObject("k", 3_000_000, digest(b"x" * 3_000_000))


async def test_put_follows_no_link_at_the_source(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        await store.put("k", tmp_path / "link")
    assert await keys(store) == []


async def test_put_of_nothing_stores_an_empty_object(store: Store) -> None:
    assert await store.put("k", b"") == StoredObject("k", 0, digest(b""))
    assert await whole(store.read("k")) == b""
    assert await whole(store.read("k", 3)) == b""


async def test_put_of_much_is_stored_whole(store: Store) -> None:
    chunk = b"0123456789abcdef" * 65536
    stored = await store.put("k", pieces(*[chunk] * 10))
    assert stored.bytes > SINGLE_PUT_BYTES
    assert hashlib.sha256(await whole(store.read("k"))).hexdigest() == stored.sha256


async def test_put_refuses_a_taken_key(store: Store) -> None:
    await store.put("k", b"first")
    with pytest.raises(AlreadyExists):
        await store.put("k", b"second")
    assert await whole(store.read("k")) == b"first"


async def test_put_at_once_under_one_key_lets_one_win(store: Store) -> None:
    outcomes: list[bool] = []

    async def put(number: int) -> None:
        try:
            await store.put("k", str(number).encode())
            outcomes.append(True)
        except AlreadyExists:
            outcomes.append(False)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(put, number)
    assert sorted(outcomes) == [False] * 19 + [True]


async def test_put_is_seen_by_nobody_before_it_is_whole(store: Store) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 1_000_000
        assert await store.list() == ()
        with pytest.raises(NotFound):
            await store.size("k")
        yield b"y"

    await store.put("k", source())
    assert await store.size("k") == 1_000_001


async def test_put_leaves_nothing_when_its_source_breaks(store: Store, tmp_path: Path) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 1_000_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.put("s/k", source())
    assert await store.list() == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_put_leaves_nothing_when_cancelled(store: Store, tmp_path: Path) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 1_000_000
        scope.cancel()
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        await store.put("k", source())
    assert await store.list() == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_put_ends_at_its_bound(store: Store) -> None:
    assert (await store.put("fits", b"12345", max_bytes=5)).bytes == 5
    with pytest.raises(QuotaExceeded):
        await store.put("k", pieces(b"123", b"456"), max_bytes=5)
    assert await keys(store) == ["fits"]


async def test_put_file_stores_it_and_leaves_the_path(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.write_bytes(b"output")
    assert await store.put_file("k", path, sha256=digest(b"output"), size=6) == StoredObject("k", 6, digest(b"output"))
    assert path.read_bytes() == b"output"
    path.unlink()
    assert await whole(store.read("k")) == b"output"


async def test_put_file_refuses_a_taken_key_another_size_and_links(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.write_bytes(b"output")
    (tmp_path / "link").symlink_to(path)
    await store.put("taken", b"")
    with pytest.raises(AlreadyExists):
        await store.put_file("taken", path, sha256=digest(b"output"), size=6)
    with pytest.raises(StoreUnavailable):
        await store.put_file("k", path, sha256=digest(b"output"), size=7)
    with pytest.raises(StoreUnavailable):
        await store.put_file("k", tmp_path / "link", sha256=digest(b"output"), size=6)
    assert await keys(store) == ["taken"]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, None, b"0123456789"), (3, None, b"3456789"), (3, 5, b"34"), (0, 0, b""), (5, 3, b""), (10, None, b""),
     (8, 99, b"89"), (99, 100, b"")],
)  # fmt: skip
async def test_read_gives_a_range(store: Store, start: int, end: int | None, expected: bytes) -> None:
    await store.put("k", b"0123456789")
    assert await whole(store.read("k", start, end)) == expected


async def test_read_gives_chunks_of_at_most_256_kib(store: Store) -> None:
    await store.put("k", b"x" * 1_000_000)
    assert max([len(chunk) async for chunk in store.read("k")]) == 256 * 1024


async def test_read_refuses_a_negative_range(store: Store) -> None:
    with pytest.raises(ValueError, match="range"):
        store.read("k", -1)


async def test_missing_keys_are_not_found(store: Store) -> None:
    await store.put("a/b", b"")
    for missing in ("k", "a", "a/c", "a/b/c"):
        with pytest.raises(NotFound):
            await whole(store.read(missing))
        with pytest.raises(NotFound):
            await store.size(missing)
        with pytest.raises(NotFound):
            await store.delete(missing)


async def test_list_gives_keys_in_order_with_sizes(store: Store) -> None:
    for key in ("b", "a/z", "a-b", "a/b/c"):
        await store.put(key, key.encode())
    found = [(entry.key, entry.bytes) for entry in await store.list()]
    assert found == [("a-b", 3), ("a/b/c", 5), ("a/z", 3), ("b", 1)]


async def test_delete_frees_the_key(store: Store) -> None:
    await store.put("k", b"1")
    await store.delete("k")
    assert await store.list() == ()
    await store.put("k", b"2")
    assert await whole(store.read("k")) == b"2"


async def test_delete_all_empties_its_scope_only(store: Store) -> None:
    await store.scoped("s1").put("a/b", b"1")
    await store.scoped("s1").put("c", b"1")
    await store.scoped("s10").put("a", b"2")
    await store.scoped("s1").delete_all()
    await store.scoped("s1").delete_all()
    assert await keys(store) == ["s10/a"]


async def test_delete_all_is_refused_without_a_scope(store: Store) -> None:
    await store.put("k", b"")
    with pytest.raises(KeyRefused):
        await store.delete_all()
    assert await keys(store) == ["k"]


async def test_scopes_share_no_key_k55(store: Store) -> None:
    """seed-facts 12 row 19."""
    one, other = store.scoped("s1"), store.scoped("s2")
    await one.put("k", b"one")
    await other.put("k", b"other")
    assert await whole(one.read("k")) == b"one"
    assert await whole(other.read("k")) == b"other"
    assert await keys(one) == ["k"]
    assert await keys(one.scoped("k")) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../s2", ".s", "s*", "s2/"])
async def test_scope_names_are_one_segment(store: Store, name: str) -> None:
    with pytest.raises(KeyRefused):
        store.scoped(name)


@pytest.mark.parametrize("key", FORGED)
async def test_forged_keys_are_refused_by_every_method_a40(store: Store, key: str, tmp_path: Path) -> None:
    scope = store.scoped("s1")
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(KeyRefused):
        await scope.put(key, b"")
    with pytest.raises(KeyRefused):
        await scope.put_file(key, tmp_path / "f", sha256=digest(b""), size=0)
    with pytest.raises(KeyRefused):
        scope.read(key)
    with pytest.raises(KeyRefused):
        await scope.scan(key, lambda reader: reader.size)
    with pytest.raises(KeyRefused):
        await scope.size(key)
    with pytest.raises(KeyRefused):
        await scope.delete(key)
    with pytest.raises(KeyRefused):
        scope.uri(key)


async def test_scan_works_on_the_opened_object(store: Store) -> None:
    await store.put("k", b"0123456789")
    assert await store.scan("k", lambda reader: (reader.size, reader.read(2, 3))) == (10, b"234")


async def test_scan_stops_at_its_next_read_when_cancelled(store: Store) -> None:
    await store.put("k", b"0123456789")
    ended = anyio.Event()
    reading = anyio.Event()

    def endless(reader: object) -> None:
        try:
            while True:
                reader.read(0, 1)  # type: ignore[attr-defined]
                anyio.from_thread.run_sync(reading.set)
        finally:
            anyio.from_thread.run_sync(ended.set)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.scan, "k", endless)
            await reading.wait()
            tasks.cancel_scope.cancel()
        await ended.wait()


async def test_scan_lets_errors_of_the_work_rise(store: Store) -> None:
    await store.put("k", b"")
    with pytest.raises(ZeroDivisionError):
        await store.scan("k", lambda reader: 1 // reader.size)


async def test_probe_leaves_nothing(store: Store) -> None:
    probe = await store.probe()
    assert (probe.kind, probe.works, probe.reason, probe.remedy) == (store.kind, True, "", "")
    assert await store.list() == ()


async def test_aclose_of_a_scope_closes_nothing(store: Store) -> None:
    await store.scoped("s").put("k", b"1")
    await store.scoped("s").aclose()
    assert await keys(store) == ["s/k"]
