"""What a path of `sandgate://` names, what fsspec is told of it, and the client's errors as those of a file system."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from gateway.client import (
    ClientError,
    ConnectionLost,
    FileEntry,
    Forbidden,
    GatewayUnreachable,
    Gone,
    NotFound,
    Unauthorized,
)

AREAS: Final = ("results", "workspace")
_SESSION: Final = re.compile(r"s-[0-9a-f]{32}")
_KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The root, a session, one of its two areas, or (where `below` is not empty) something in there."""

    session: str = ""
    area: Literal["", "results", "workspace"] = ""
    below: str = ""

    @property
    def in_workspace(self) -> bool:
        return self.area == "workspace"


def place_of(path: str) -> Place:
    """Where a stripped path leads; FileNotFoundError for what no gateway would have, so that nothing is sent."""
    if not path:
        return Place()
    session, _, rest = path.partition("/")
    area, slash, below = rest.partition("/")
    legal = _SESSION.fullmatch(session) is not None
    match area:
        case "":
            legal = legal and not rest
        case "results":
            legal = legal and (not slash or _KEY.fullmatch(below) is not None)
        case "workspace":
            legal = legal and (not slash or not ({"", ".", ".."} & set(below.split("/")) or "\0" in below))
        case _:
            legal = False
    if not legal:
        raise FileNotFoundError(errno.ENOENT, "not of the form sandgate://<session>/results/<key>", path)
    return Place(session, area, below)  # type: ignore[arg-type]  # one of the three, by the match above


def file_place(path: str) -> Place:
    """The same for what may be a file: IsADirectoryError for the folders above."""
    place = place_of(path)
    if not place.below:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return place


def writable_place(path: str) -> Place:
    """The same for what may be written: only files of a workspace."""
    place = place_of(path)
    if not (place.in_workspace and place.below):
        read_only(path)
    return place


def folder_info(name: str) -> Info:
    return {"name": name, "size": 0, "type": "directory"}


def result_info(name: str, size: int, media_type: str, sha256: str) -> Info:
    return {"name": name, "size": size, "type": "file", "media_type": media_type, "sha256": sha256, "ETag": sha256}


def entry_info(workspace: str, entry: FileEntry) -> Info:
    """An entry of a workspace; a link counts as a file, which is followed when it is read."""
    kind = "directory" if entry.kind == "directory" else "file"
    return {"name": f"{workspace}/{entry.path}", "size": entry.size, "type": kind, "mtime": entry.modified}


def children(path: str, files: Iterable[Info]) -> list[Info]:
    """What stands directly below `path`: files, and the folders that the names of others imply."""
    found: dict[str, Info] = {}
    for file in files:
        if file["name"].startswith(f"{path}/"):
            name, _, deeper = file["name"][len(path) + 1 :].partition("/")
            found.setdefault(name, folder_info(f"{path}/{name}") if deeper else file)
    return [found[name] for name in sorted(found)]


@contextmanager
def as_oserror(path: str) -> Iterator[None]:
    """The client's errors as those of a file system."""
    try:
        yield
    except Gone as error:
        raise FileNotFoundError(errno.ENOENT, f"expired: {error}", path) from error
    except NotFound as error:
        raise FileNotFoundError(errno.ENOENT, error.message, path) from error
    except (Unauthorized, Forbidden) as error:
        raise PermissionError(errno.EACCES, str(error), path) from error
    except (GatewayUnreachable, ConnectionLost) as error:
        raise ConnectionError(str(error)) from error
    except ClientError as error:
        raise OSError(errno.EIO, str(error), path) from error


def read_only(path: str) -> NoReturn:
    raise PermissionError(errno.EROFS, "stored results do not change", path)
