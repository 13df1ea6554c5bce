"""Foreign errors become ours, once."""

import errno

import pytest

from stores import AlreadyExists, NotFound, QuotaExceeded, StoreError, StoreUnavailable
from stores.errors import translated


@pytest.mark.parametrize(
    ("foreign", "writing", "ours"),
    [
        (FileExistsError(), True, AlreadyExists),
        (FileNotFoundError(), False, NotFound),
        (FileNotFoundError(), True, StoreUnavailable),
        (OSError(errno.ENOSPC, ""), True, StoreUnavailable),
        (OSError(errno.EDQUOT, ""), True, QuotaExceeded),
        (PermissionError(errno.EACCES, ""), False, StoreUnavailable),
        (OSError("without a number"), False, StoreUnavailable),
        (OSError(errno.EIO, ""), False, StoreUnavailable),
        (TimeoutError(), False, StoreUnavailable),
        (NotImplementedError(), True, StoreUnavailable),
        (ImportError(), False, StoreUnavailable),
        (RuntimeError(), False, StoreUnavailable),
    ],
)
def test_foreign_errors_become_ours(foreign: Exception, writing: bool, ours: type[StoreError]) -> None:
    with pytest.raises(StoreError) as raised, translated(writing=writing):
        raise foreign
    assert type(raised.value) is ours
    assert raised.value.__cause__ is foreign


def test_our_own_errors_pass() -> None:
    ours = NotFound("x")
    with pytest.raises(NotFound) as raised, translated():
        raise ours
    assert raised.value is ours


@pytest.mark.parametrize("foreign", [OSError(errno.EIO, "canary"), RuntimeError("canary"), OSError("canary")])
def test_messages_quote_nothing_of_the_far_side_a55(foreign: Exception) -> None:
    with pytest.raises(StoreError) as raised, translated():
        raise foreign
    assert "canary" not in raised.value.message + raised.value.remedy
