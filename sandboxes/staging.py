"""How a starting sandbox is given what it needs: host paths that its uid can reach, and bytes as descriptors."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_STAGES: Final = ("/mnt", "/media", "/tmp")  # noqa: S108


class Stage:
    """Where host paths are for a sandbox's uid: below a folder that the launcher covers, or where they are."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sources: list[tuple[str, Path]] = []

    def show(self, path: Path) -> str:
        return self._put(str(len(self.sources)), path)

    def program(self, program: Path) -> str:
        """Show bubblewrap with the libraries of its wheel, which it looks for beside its package."""
        package = program.parent.parent
        libraries = package.with_name(f"{package.name}.libs")
        if not libraries.is_dir():
            return str(program) if program.is_relative_to("/usr") else self.show(program)
        self._put(libraries.name, libraries)
        return f"{self._put(package.name, package)}/{program.parent.name}/{program.name}"

    def _put(self, name: str, path: Path) -> str:
        if not self.folder:
            return str(path)
        self.sources.append((name, path.resolve()))
        return f"{self.folder}/{name}"


def stage_folder() -> str:
    return next(folder for folder in _STAGES if Path(folder).is_dir())


@contextlib.contextmanager
def memfd(data: bytes) -> Iterator[int]:
    """A sealed descriptor with some bytes, at their start."""
    fd = os.memfd_create("sandgate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        )
        yield fd
    finally:
        os.close(fd)
