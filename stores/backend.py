"""What a store needs of the place where its bytes are. Everything here blocks, and runs in worker threads."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stores.errors import QuotaExceeded

CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What was stored: its size, and the SHA-256 of its bytes in hexadecimal."""

    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One line of a listing; `modified` is seconds since the epoch where the place knows."""

    key: str
    bytes: int
    modified: float | None = None


class Reader(Protocol):
    """An object opened for reading; what is open stays readable where the place can do that."""

    @property
    def size(self) -> int: ...

    @property
    def fetch_bytes(self) -> int:
        """How much to ask for at once: a request far away costs more than its bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Return exactly `length` bytes, which must lie within `size`."""
        ...

    def close(self) -> None: ...


class Draft(ABC):
    """An object being written, seen by nobody until it is published, gone when it is discarded."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, chunk: bytes) -> None:
        """Append. Raises QuotaExceeded at the first byte over the bound."""
        self.size += len(chunk)
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise QuotaExceeded(f"more than {self._max_bytes} bytes")
        self._hash.update(chunk)
        self.append(chunk)

    @abstractmethod
    def append(self, chunk: bytes) -> None: ...

    @abstractmethod
    def publish(self, name: str) -> None:
        """Make it readable under the name, all at once. Raises FileExistsError where the name is taken."""

    @abstractmethod
    def discard(self) -> None:
        """Free what the draft held; after `publish` the object stays. Safe to call twice."""


class Backend(ABC):
    """One place for bytes. Names and prefixes are checked keys, or empty where that means everything.

    May raise anything; the store translates.
    """

    kind: str

    @abstractmethod
    def draft(self, max_bytes: int | None) -> Draft: ...

    @abstractmethod
    def adopt(self, name: str, path: Path) -> bool:
        """Store a local file without passing its bytes through a draft; False where that is impossible."""

    @abstractmethod
    def open(self, name: str) -> Reader: ...

    @abstractmethod
    def list(self, prefix: str) -> Iterator[StoredKey]:
        """Yield what is below the prefix, by whole names, in any order."""

    @abstractmethod
    def delete(self, name: str) -> None: ...

    @abstractmethod
    def delete_all(self, prefix: str) -> None: ...

    @abstractmethod
    def uri(self, name: str) -> str | None: ...

    def not_enforced(self) -> tuple[str, ...]:
        """Name the promises of a store that this place cannot keep."""
        return ()

    def close(self) -> None:
        """Forget what must not outlive the store: by default nothing."""
        return


def blocks(reader: Reader, start: int = 0, block_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the object from `start` to its end, in order."""
    step = max(reader.fetch_bytes, block_bytes or 0)
    for position in range(start, reader.size, step):
        yield reader.read(position, min(step, reader.size - position))
