"""Bounded output keeps both ends and counts the rest."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import Capture


def drive(capture: Capture, chunks: list[bytes]) -> None:
    for chunk in chunks:
        try:
            capture.write(chunk).send(None)
        except StopIteration:
            continue
        raise AssertionError("a capture never waits")


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 100))
def test_head_and_tail_are_the_ends(chunks: list[bytes], max_bytes: int) -> None:
    capture = Capture(max_bytes)
    drive(capture, chunks)
    whole = b"".join(chunks)
    half = max_bytes - max_bytes // 2
    assert capture.total == len(whole)
    assert capture.truncated == (len(whole) > max_bytes)
    assert capture.head == whole[:half]
    rest = whole[half:]
    assert capture.tail == rest[len(rest) - min(len(rest), max_bytes // 2) :]
    if not capture.truncated:
        assert capture.head + capture.tail == whole
        assert capture.text() == whole.decode(errors="replace")


@given(st.text(max_size=200), st.integers(8, 64))
def test_text_never_shows_a_cut_character(text: str, max_bytes: int) -> None:
    """R22: at every place of the cut."""
    capture = Capture(max_bytes)
    drive(capture, [text.encode()])
    if "\ufffd" not in text:
        assert "\ufffd" not in capture.text()


def test_text_says_how_much_is_missing() -> None:
    """R31: the answer at the end is there."""
    capture = Capture(10)
    drive(capture, [b"first", b"x" * 5000, b"final"])
    assert capture.text() == "first\n[... 5,000 bytes left out ...]\nfinal"


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    """R21."""
    capture = Capture(100)
    drive(capture, [b"a\xff", b"b"])
    assert capture.text() == "a\ufffdb"


@pytest.mark.parametrize("size", [1, 3000, 256 * 1024])
def test_memory_is_bounded_and_the_tail_right_for_many_megabytes(size: int) -> None:
    """A19, R24, R31."""
    max_bytes = 10_000 if size == 1 else 100_000
    data = random.Random(1).randbytes(8 << 20 if size > 1 else 60_000)
    capture = Capture(max_bytes)
    tracemalloc.start()
    for at in range(0, len(data), size):
        drive(capture, [data[at : at + size]])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert capture.tail == data[-max_bytes // 2 :]
    assert peak < 3 * max_bytes + 3 * size + 20_000


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Capture(-1)
