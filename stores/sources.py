"""Files at any fsspec URI, to be read once: what a workspace is seeded from. Everything here blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import fsspec
from fsspec import AbstractFileSystem

from stores.errors import QuotaExceeded, StoreUnavailable, translated

MAX_FILES: Final = 100_000
_BLOCK_BYTES: Final = 1 << 20
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST: Final = ("file", "local")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a folder; `path` is relative, and as hostile as the place that lists it."""

    path: str
    size: int
    filesystem: AbstractFileSystem
    place: str

    def open(self) -> IO[bytes]:
        """Open it for reading. Raises NotFound, StoreUnavailable."""
        with translated():
            opened: IO[bytes] = self.filesystem.open(self.place, "rb")
            return opened


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a folder at a URI. Every method may raise NotFound and StoreUnavailable."""

    uri: str
    filesystem: AbstractFileSystem
    place: str

    @classmethod
    def at(cls, uri: str) -> "Source":
        """Find who reads the URI; nothing is asked of the place yet. Credentials come from the environment.

        Raises StoreUnavailable where fsspec does not know the protocol, or a package for it is missing.
        """
        scheme = _SCHEME.match(uri)
        if scheme is None or scheme[1].lower() in _HOST:
            raise StoreUnavailable(
                "not the address of another place", "write s3://bucket/prefix, https://host/file, ..."
            )
        try:
            with translated():
                filesystem, place = fsspec.url_to_fs(uri, skip_instance_cache=True)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, ValueError):
                raise StoreUnavailable(f"{scheme[1]}:// is not known to fsspec") from error
            raise
        return cls(uri, filesystem, place)

    @property
    def name(self) -> str:
        """The last part of the address: what a single file is called."""
        return self.place.rstrip("/").rpartition("/")[2].partition("?")[0] or "file"

    def exists(self) -> bool:
        """Whether anything is there."""
        with translated():
            return bool(self.filesystem.exists(self.place))

    def is_folder(self) -> bool:
        """Whether files are below it; a page of the web is always a file."""
        if self.filesystem.protocol == ("http", "https"):
            return False
        with translated():
            return bool(self.filesystem.isdir(self.place))

    def files(self) -> Iterator[SourceFile]:
        """What is below a folder, in the order of names. Raises QuotaExceeded over 100,000 files."""
        with translated():
            found: dict[str, dict[str, Any]] = self.filesystem.find(self.place, detail=True)
        if len(found) > MAX_FILES:
            raise QuotaExceeded(f"{len(found):,} files; at most {MAX_FILES:,}")
        top = f"{self.place.rstrip('/')}/"
        for place, info in sorted(found.items()):
            if info.get("type") == "file" and place.startswith(top):
                yield SourceFile(place.removeprefix(top), int(info.get("size") or 0), self.filesystem, place)

    def copy(self, into: IO[bytes], max_bytes: int) -> None:
        """Read a single file whole. Raises QuotaExceeded at the first byte over the bound."""
        copied = 0
        with translated(), self.filesystem.open(self.place, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                copied += len(block)
                if copied > max_bytes:
                    raise QuotaExceeded(f"more than {max_bytes:,} bytes")
                into.write(block)
