"""Results: ranges, lines and search, each compared with the plain way to do it."""

import hashlib
import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stores import (
    GrepLine,
    GrepPage,
    KeyRefused,
    LineIndex,
    LinesPage,
    NotFound,
    PatternRefused,
    ResultStore,
    Store,
    StoredResult,
    StoreUnavailable,
)
from stores import grep as searching
from stores.grep import grep
from stores.lines import page

pytestmark = pytest.mark.anyio


class Bytes:
    """A reader over bytes, whose small fetches put borders everywhere."""

    def __init__(self, data: bytes, fetch_bytes: int = 7) -> None:
        self._data = data
        self.size = len(data)
        self.fetch_bytes = fetch_bytes

    def read(self, start: int, length: int) -> bytes:
        assert 0 <= start <= start + length <= self.size
        return self._data[start : start + length]

    def close(self) -> None: ...


class Zeros(Bytes):
    """One line that nobody could hold in memory."""

    def __init__(self, size: int) -> None:
        super().__init__(b"", 1 << 20)
        self.size = size
        self.largest = 0

    def read(self, start: int, length: int) -> bytes:
        self.largest = max(self.largest, length)
        return bytes(length)


@pytest.fixture
def results(store: Store) -> ResultStore:
    return ResultStore(store)


def lines_of(data: bytes) -> list[bytes]:
    whole = data.split(b"\n")
    return whole if whole[-1] else whole[:-1]


def ascii_only(pattern: str) -> re.RegexFlag:
    """RE2's classes and word borders know ASCII only."""
    return re.ASCII if "\\" in pattern else re.NOFLAG


texts = st.lists(st.sampled_from([b"\n", b"a", b"bb", b"\xff", "é".encode(), b"\r", b"xyz"]), max_size=40).map(b"".join)


async def test_put_read_list_delete(results: ResultStore) -> None:
    digest = hashlib.sha256(b"output").hexdigest()
    assert await results.put("s1", "k", b"output", "text/plain") == StoredResult("k", 6, digest, "text/plain")
    assert [chunk async for chunk in results.read("s1", "k", 1, 4)] == [b"utp"]
    assert [entry.key for entry in await results.list("s1")] == ["k"]
    assert await results.size("s1", "k") == 6
    await results.delete("s1", "k")
    assert await results.list("s1") == ()


async def test_sessions_do_not_see_each_other_a39(results: ResultStore) -> None:
    await results.put("s1", "k", b"output", "text/plain")
    with pytest.raises(NotFound):
        await results.lines("s2", "k", 1, 1)
    with pytest.raises(NotFound):
        await results.grep("s2", "k", "x")
    with pytest.raises(KeyRefused):
        await results.size("s2", "../s1/k")
    with pytest.raises(KeyRefused):
        await results.size("s2/../s1", "k")
    await results.delete_session("s2")
    assert await results.size("s1", "k") == 6


async def test_delete_session_deletes_all_of_it(results: ResultStore) -> None:
    await results.put("s1", "a", b"1", "text/plain")
    await results.put("s1", "files/b", b"1", "text/plain")
    await results.delete_session("s1")
    assert await results.list("s1") == ()


async def test_lines_and_grep_read_the_stored_result(results: ResultStore) -> None:
    await results.put("s1", "k", b"one\ntwo\nthree\n", "text/plain")
    assert await results.lines("s1", "k", 2, 3) == LinesPage(("two", "three"), 2, 3, 3, False, 4, 14)
    assert await results.grep("s1", "k", "T[wh]", ignore_case=True) == GrepPage(
        (GrepLine(2, "two", True, False, 4), GrepLine(3, "three", True, False, 8)), False
    )


def test_lines_beyond_the_end_are_none_and_the_total_is_told() -> None:
    assert page(Bytes(b"a\nb"), 3, 5, 100) == LinesPage((), 3, 2, 2, False, 3, 3)
    assert page(Bytes(b"a\nb\n"), 9, 9, 100) == LinesPage((), 9, 8, 2, False, 4, 4)
    assert page(Bytes(b""), 1, 9, 100) == LinesPage((), 1, 0, 0, False, 0, 0)


def test_lines_that_do_not_fit_are_left_for_the_next_page() -> None:
    assert page(Bytes(b"aaaa\nbbbb\ncccc\n"), 1, 3, 12) == LinesPage(("aaaa", "bbbb"), 1, 2, None, True, 0, 10)


def test_a_line_that_does_not_fit_alone_is_cut_at_a_character() -> None:
    data = ("é" * 10 + "\n").encode()
    assert page(Bytes(data), 1, 1, 5) == LinesPage(("éé",), 1, 1, None, True, 0, 4)


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert page(Bytes(b"a\xffb\r\n"), 1, 1, 100).lines == ("a\ufffdb\r",)


@pytest.mark.parametrize(("first", "last", "max_bytes"), [(0, 1, 1), (2, 1, 1), (1, 1, 0)])
def test_lines_refuse_a_page_of_nothing(first: int, last: int, max_bytes: int) -> None:
    with pytest.raises(ValueError):
        page(Bytes(b"a"), first, last, max_bytes)


@given(texts, st.integers(1, 12), st.integers(0, 12))
def test_lines_are_those_of_a_plain_split(data: bytes, first: int, more: int) -> None:
    expected = [line.decode("utf-8", "replace") for line in lines_of(data)[first - 1 : first + more]]
    found = page(Bytes(data), first, first + more, 1000)
    assert list(found.lines) == expected
    assert (found.last - found.first + 1, found.total) == (len(expected), len(lines_of(data)))


@given(st.lists(st.integers(0, 3 << 20), max_size=6), st.lists(st.integers(1, 2 << 20), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_index_leads_to_the_same_lines(gaps: list[int], cuts: list[int]) -> None:
    """However the bytes came in, and whatever is between the ends of lines."""
    data = b"".join(b"x" * gap + b"\n" for gap in gaps) + b"last"
    index, position = LineIndex(), 0
    for cut in itertools.cycle(cuts):
        index.add(data[position : position + cut])
        position += cut
        if position >= len(data):
            break
    again = LineIndex.from_bytes(index.to_bytes())
    for first in range(1, len(gaps) + 3):
        reader = Bytes(data, 1 << 20)
        assert page(reader, first, first + 1, 1000, again) == page(reader, first, first + 1, 1000)


@given(texts, st.integers(1, 9))
def test_pages_that_follow_each_other_give_every_byte(data: bytes, max_bytes: int) -> None:
    number, offset = 1, 0
    while offset < len(data):
        found = page(Bytes(data), number, 99, max_bytes)
        assert found.start_offset == offset
        if found.end_offset > offset and data[found.end_offset - 1 : found.end_offset] != b"\n":
            break  # a line cut by the bound goes on by offset, or it was the last
        number, offset = found.last + 1, found.end_offset


def test_lines_of_one_huge_line_take_bounded_memory() -> None:
    reader = Zeros(1 << 30)
    found = page(reader, 1, 1, 1000)
    assert (len(found.lines[0]), found.truncated, reader.largest) == (1000, True, 1000)


def test_grep_of_one_huge_line_takes_bounded_memory() -> None:
    reader = Zeros(1 << 28)
    assert grep(reader, "x", max_matches=1, max_bytes=1000) == GrepPage((), False)
    assert reader.largest == 1 << 20
    found = grep(reader, r"\x00", max_matches=5, max_bytes=1000)
    assert [(line.number, len(line.text), line.cut) for line in found.lines] == [(1, 1000, True)]


@pytest.mark.parametrize(
    "pattern", ["a", "^a", "b$", "^$", "", "x*", "a.*b", r"\bxyz\b", "[^a]", "é|xyz", r"\s", "(a)(b)?"]
)
@given(data=texts)
def test_grep_finds_the_lines_of_a_plain_loop(pattern: str, data: bytes) -> None:
    text = data.replace(b"\xff", b"_")
    expected = [n for n, line in enumerate(lines_of(text), 1) if re.search(pattern, line.decode(), ascii_only(pattern))]
    index = LineIndex()
    index.add(text)
    found = grep(Bytes(text), pattern, max_matches=1000, max_bytes=100_000, index=index)
    assert [line.number for line in found.lines] == expected
    assert [line.text for line in found.lines] == [lines_of(text)[number - 1].decode() for number in expected]
    assert all(text[line.offset :].startswith(line.text.encode()) for line in found.lines)


@given(texts, st.integers(1, 3))
def test_grep_gives_context_each_line_once(data: bytes, context: int) -> None:
    text = data.replace(b"\xff", b"_")
    whole = [line.decode() for line in lines_of(text)]
    matched = {number for number, line in enumerate(whole, 1) if "bb" in line}
    near = {n + d for n in matched for d in range(-context, context + 1)} & set(range(1, len(whole) + 1))
    found = grep(Bytes(text), "bb", max_matches=1000, max_bytes=100_000, context=context)
    assert [(line.number, line.text, line.matched) for line in found.lines] == [
        (number, whole[number - 1], number in matched) for number in sorted(near)
    ]
    assert all(text[line.offset :].startswith(line.text.encode()) for line in found.lines)


def test_grep_ends_at_its_limits() -> None:
    data = b"match\n" * 10
    assert [line.number for line in grep(Bytes(data), "m", max_matches=3, max_bytes=1000).lines] == [1, 2, 3]
    assert grep(Bytes(data), "m", max_matches=3, max_bytes=1000).truncated
    assert not grep(Bytes(data), "m", max_matches=10, max_bytes=1000).truncated
    assert [line.number for line in grep(Bytes(data), "m", max_matches=9, max_bytes=11).lines] == [1, 2]
    assert [line.number for line in grep(Bytes(data), "m", max_matches=9, max_bytes=1).lines] == [1]


def test_grep_shows_a_long_line_around_its_match() -> None:
    data = ("é" * 5000 + "needle" + "é" * 5000 + "\nnext\n").encode()
    (line,) = grep(Bytes(data, 1000), "needle", max_matches=9, max_bytes=10_000).lines
    assert (line.number, line.cut, line.matched) == (1, True, True)
    assert "needle" in line.text
    assert "\ufffd" not in line.text
    assert len(line.text.encode()) <= 1000
    assert data[line.offset :].startswith(line.text.encode())


def test_grep_passes_over_bytes_that_are_not_utf8() -> None:
    (line,) = grep(Bytes(b"\xff\xfe\n\xffneedle\xff\n"), "needle", max_matches=9, max_bytes=100).lines
    assert (line.number, line.text) == (2, "\ufffdneedle\ufffd")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", r"missing \)"),
        ("(?=a)", "invalid perl operator"),
        (r"(a)\1", "invalid escape sequence"),
        ("a{5000}", "invalid repetition size"),
        ("x" * 2001, "at most 2000"),
        ("\udcff", "Unicode"),
        (r"a\nb", "one line"),
        ("a\nb", "one line"),
        (r"\Aa", r"use \^ and \$"),
        (r"a\z", r"use \^ and \$"),
        ("(?i-m)^a", r"use \^ and \$"),
    ],
)
def test_grep_refuses_a_pattern_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(PatternRefused, match=reason):
        grep(Bytes(b"a"), pattern, max_matches=1, max_bytes=1)


@pytest.mark.parametrize("pattern", [r"[^\n]+", r"\\n", r"\\A", "[]a]", "(?s)a.b", r"[\]\n]"])
def test_grep_takes_what_only_looks_refused(pattern: str) -> None:
    assert grep(Bytes(b"\n"), pattern, max_matches=1, max_bytes=1) == GrepPage((), False)


def test_grep_never_matches_across_lines() -> None:
    assert grep(Bytes(b"a\nb\n", 100), "(?s)a.b", max_matches=1, max_bytes=10) == GrepPage((), False)


@pytest.mark.parametrize(("max_matches", "context"), [(0, 0), (1, -1), (1, 51)])
def test_grep_refuses_limits_out_of_range(max_matches: int, context: int) -> None:
    with pytest.raises(ValueError):
        grep(Bytes(b"a"), "a", max_matches=max_matches, max_bytes=1, context=context)


def test_grep_is_linear_whatever_the_pattern() -> None:
    started = time.monotonic()
    grep(Bytes(b"x" * (4 << 20), 1 << 20), "(x+x+)+y$", max_matches=1, max_bytes=1)
    assert time.monotonic() - started < 5


async def test_grep_without_its_package_is_told(results: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await results.put("s1", "k", b"1", "text/plain")
    monkeypatch.setitem(__import__("sys").modules, "re2", None)
    with pytest.raises(StoreUnavailable) as refused:
        await results.grep("s1", "k", "x")
    assert "sandgate[server]" in refused.value.remedy
    assert searching.MAX_CONTEXT == 50


async def test_store_uri_is_the_stores_own(results: ResultStore) -> None:
    uri = results.store_uri("s1", "k")
    match results.kind:
        case "memory":
            assert uri is None
        case kind:
            assert uri is not None
            assert uri.startswith(f"{kind}://")
            assert uri.endswith("/root/s1/k")


async def test_probe_and_close_are_the_stores(results: ResultStore) -> None:
    assert (await results.probe()).works
    await results.aclose()
