"""Policies: strictly more, and nothing but whole numbers."""

from dataclasses import FrozenInstanceError

import pytest

from stores import (
    AlwaysOffload,
    NeverOffload,
    OffloadOverBytes,
    OffloadOverChars,
    OffloadOverLines,
    OffloadPolicy,
    ResultSize,
)

SIZE = ResultSize(characters=10, bytes=20, lines=3)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (AlwaysOffload(), True),
        (NeverOffload(), False),
        (OffloadOverChars(9), True),
        (OffloadOverChars(10), False),
        (OffloadOverBytes(19), True),
        (OffloadOverBytes(20), False),
        (OffloadOverLines(2), True),
        (OffloadOverLines(3), False),
    ],
)
def test_a_policy_decides_by_its_measure(policy: OffloadPolicy, expected: bool) -> None:
    """seed-facts 12 row 17."""
    assert policy.should_offload("bash", SIZE, None) is expected


@pytest.mark.parametrize("kind", [OffloadOverChars, OffloadOverBytes, OffloadOverLines])
@pytest.mark.parametrize("limit", [-1, True, 1.5, "10", None])
def test_a_limit_is_a_whole_number(kind: type[OffloadOverChars], limit: int) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        kind(limit)


def test_a_limit_of_zero_stores_all_that_is_not_empty() -> None:
    assert OffloadOverChars(0).should_offload("bash", ResultSize(1, 1, 1), None)
    assert not OffloadOverChars(0).should_offload("bash", ResultSize(0, 0, 0), None)


def test_policies_are_values() -> None:
    assert OffloadOverChars(5) == OffloadOverChars(5)
    assert hash(OffloadOverChars(5)) == hash(OffloadOverChars(5))
    with pytest.raises(FrozenInstanceError):
        OffloadOverChars(5).limit = 6  # type: ignore[misc]
