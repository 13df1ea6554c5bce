"""A store in a local folder: private modes, and no link below the root is ever followed.

Every step below the root is an `openat` with O_NOFOLLOW on the descriptor of the step before, so there is no
moment between looking and using. The root itself is the operator's word and may be a link.
"""

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stores.backend import CHUNK_BYTES, Backend, Draft, Reader, StoredKey
from stores.errors import KeyRefused, StoreUnavailable
from stores.keys import MAX_SEGMENTS, is_key

PARTIAL: Final = ".partial"
"""The folder of what is being written; no key begins with a dot."""

_LEFT_OVER_SECONDS: Final = 24 * 3600
_NOT_A_FOLDER: Final = (errno.ENOTDIR, errno.ELOOP)
_CANNOT_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)


class LocalBackend(Backend):
    """Files of mode 0600 in folders of mode 0700 below an absolute root, which is made at the first write.

    Writing needs a file system with hard links: a link is the one way to a name that must be new and whole.
    """

    kind = "file"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._swept = False

    def draft(self, max_bytes: int | None) -> Draft:
        with self.folder((PARTIAL,), create=True) as folder:
            self._sweep(folder)
            return _LocalDraft(self, os.dup(folder), max_bytes)

    def adopt(self, name: str, path: Path) -> bool:
        """Link the file in: the same bytes, no copy. Its mode becomes 0600."""
        path.chmod(0o600, follow_symlinks=True)
        try:
            self.link(path, name)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                return False
            raise
        return True

    def link(self, source: Path | str, name: str, source_folder: int | None = None) -> None:
        """Give an existing file the name, unless that is taken."""
        *parents, leaf = name.split("/")
        with self.folder(parents, create=True) as folder:
            os.link(source, leaf, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)

    def open(self, name: str) -> Reader:
        *parents, leaf = name.split("/")
        with self.folder(parents) as folder, _as_missing():
            # O_NONBLOCK: a planted named pipe must not stop us
            descriptor = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            return _LocalReader(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def list(self, prefix: str) -> Iterator[StoredKey]:
        with suppress(FileNotFoundError), self.folder(_parts(prefix)) as folder:
            yield from _walk(folder, f"{prefix}/" if prefix else "", MAX_SEGMENTS)

    def delete(self, name: str) -> None:
        *parents, leaf = name.split("/")
        with self.folder(parents) as folder:
            if not stat.S_ISREG(os.stat(leaf, dir_fd=folder, follow_symlinks=False).st_mode):
                raise FileNotFoundError(name)
            os.unlink(leaf, dir_fd=folder)

    def delete_all(self, prefix: str) -> None:
        *parents, leaf = prefix.split("/")
        with suppress(FileNotFoundError), self.folder(parents) as folder:
            if stat.S_ISDIR(os.stat(leaf, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(leaf, dir_fd=folder)
            else:
                os.unlink(leaf, dir_fd=folder)

    def uri(self, name: str) -> str:
        """`file://` and the plain path: fsspec decodes no percent signs."""
        return f"file://{self.root / name}"

    def not_enforced(self) -> tuple[str, ...]:
        """Contents are private whatever the root's mode; the names of sessions are only if it is 0700."""
        if stat.S_IMODE(self.root.stat().st_mode) & 0o077:
            return ("the root folder is open to other users, who can see the names of sessions (chmod 700)",)
        return ()

    @contextmanager
    def folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """Yield the descriptor of a folder below the root, closed afterwards.

        A link or a file on the way is FileNotFoundError for readers, KeyRefused with `create`.
        """
        if create:
            self._make_root()
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                below = _step(descriptor, part, create=create)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise StoreUnavailable("the root is not a folder", "name another folder") from error

    def _sweep(self, folder: int) -> None:
        """Remove, once, what a killed gateway was writing; a write under way is younger."""
        if self._swept:
            return
        self._swept = True
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_OVER_SECONDS:
                        os.unlink(entry.name, dir_fd=folder)


class _LocalDraft(Draft):
    def __init__(self, backend: LocalBackend, folder: int, max_bytes: int | None) -> None:
        super().__init__(max_bytes)
        self._backend = backend
        self._folder: int | None = folder
        self._name = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(self._name, flags, 0o600, dir_fd=folder), "wb", buffering=0)
        except BaseException:
            os.close(folder)
            raise

    def append(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]

    def publish(self, name: str) -> None:
        try:
            self._backend.link(self._name, name, self._folder)
        except OSError as error:
            if error.errno in _CANNOT_LINK:
                raise StoreUnavailable("the store's file system has no hard links", "use another folder") from error
            raise

    def discard(self) -> None:
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        try:
            self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=folder)
        finally:
            os.close(folder)


class _LocalReader:
    fetch_bytes = CHUNK_BYTES

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError
        self.size = status.st_size
        self._descriptor = descriptor

    def read(self, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, start)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), start + len(data))
            if not more:
                raise StoreUnavailable("a stored object has become shorter")
            data += more
        return data

    def close(self) -> None:
        os.close(self._descriptor)


def _step(folder: int, part: str, *, create: bool) -> int:
    if create:
        with suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=folder)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not create:
        with _as_missing():
            return os.open(part, flags, dir_fd=folder)
    try:
        return os.open(part, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_A_FOLDER:
            raise KeyRefused("a part of the key is not a folder of the store") from error
        raise


@contextmanager
def _as_missing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_A_FOLDER:
            raise FileNotFoundError from error
        raise


def _walk(folder: int, prefix: str, depth: int) -> Iterator[StoredKey]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_key(entry.name):
                continue
            if entry.is_file(follow_symlinks=False):
                yield from _entry(entry, prefix)
            elif entry.is_dir(follow_symlinks=False) and depth > 1:
                yield from _below(folder, entry.name, prefix, depth)


def _entry(entry: "os.DirEntry[str]", prefix: str) -> Iterator[StoredKey]:
    with suppress(FileNotFoundError):
        status = entry.stat(follow_symlinks=False)
        yield StoredKey(prefix + entry.name, status.st_size, status.st_mtime)


def _below(folder: int, name: str, prefix: str, depth: int) -> Iterator[StoredKey]:
    with suppress(FileNotFoundError):
        below = _step(folder, name, create=False)
        try:
            yield from _walk(below, f"{prefix}{name}/", depth - 1)
        finally:
            os.close(below)


def _parts(prefix: str) -> Sequence[str]:
    return prefix.split("/") if prefix else []
