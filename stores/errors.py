"""What can go wrong with a store, and the one place where foreign errors become ours.

    StoreError
    +-- KeyRefused          not a key; nothing was asked of the store
    +-- NotFound            no such object
    +-- AlreadyExists       keys are written once
    +-- Damaged             what is stored is not what was put there
    +-- StoreUnavailable    the store does not work, or not now; nothing was stored
    +-- QuotaExceeded       more bytes than allowed; nothing was stored
    +-- PatternRefused      not a pattern that can be searched for

Messages hold no text of the far side: that may quote addresses and credentials. The cause is chained.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class StoreError(Exception):
    """Base of all; `remedy` says what the reader can do about it, or is empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class KeyRefused(StoreError):
    """The key, or the name of a scope, is not one that this program makes."""


class NotFound(StoreError):
    """Nothing is stored under the key. A planted link or folder is nothing stored."""


class AlreadyExists(StoreError):
    """The key is taken; what is stored stays as it was."""


class Damaged(StoreError):
    """The bytes that came are not those that were stored: their digest is another."""


class StoreUnavailable(StoreError):
    """The store cannot be used: configuration, permissions, network, full disk."""


class QuotaExceeded(StoreError):
    """The source, or the user's disk quota, ended the writing."""


class PatternRefused(StoreError):
    """The pattern is not in RE2's syntax, or too large."""


@contextmanager
def translated(*, writing: bool = False) -> Iterator[None]:
    """Turn whatever a file system raises inside into a StoreError.

    `writing` tells a missing object from a missing place to put it.
    """
    try:
        yield
    except StoreError:
        raise
    except FileExistsError as error:
        raise AlreadyExists("the key is taken") from error
    except FileNotFoundError as error:
        raise (_place_missing() if writing else NotFound("nothing is stored under this key")) from error
    except OSError as error:
        raise _from_errno(error) from error
    except ImportError as error:
        raise StoreUnavailable("a package for this store is missing", "install its extra, e.g. sandgate[s3]") from error
    except Exception as error:  # a stranger's file system: every client library has errors of its own
        raise StoreUnavailable(f"the store failed ({type(error).__name__})") from error


def _place_missing() -> StoreUnavailable:
    return StoreUnavailable("the store's place does not exist", "create the folder or bucket")


def _from_errno(error: OSError) -> StoreError:
    match error.errno:
        case errno.ENOSPC:
            return StoreUnavailable("disk full", "free space where the store is, or shorten retention")
        case errno.EDQUOT:
            return QuotaExceeded("disk quota reached", "raise the quota, or shorten retention")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return _not_permitted()
        case None if isinstance(error, PermissionError):
            return _not_permitted()
        case None:
            return StoreUnavailable(f"the store failed ({type(error).__name__})")
        case code:
            return StoreUnavailable(f"the store failed ({os.strerror(code)})")


def _not_permitted() -> StoreUnavailable:
    return StoreUnavailable("not permitted", "grant the gateway read and write access")
