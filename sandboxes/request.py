"""Requests as a slot reads them: fields without NUL, paths inside, arguments that the kernel would take."""

import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Final

from sandboxes.errors import CommandRefused, FileRefused
from sandboxes.sandbox import HOME, WORKSPACE

ROOTS: Final = (WORKSPACE, HOME, "/tmp")  # noqa: S108
_ONE_ARGUMENT: Final = 131_072
_ALL_ARGUMENTS: Final = (2 << 20) - 4096


def inside(path: str) -> str:
    """Return the absolute form of a path; FileRefused `invalid_path` where it ends outside of the three roots."""
    full = posixpath.normpath(posixpath.join(WORKSPACE, path))
    full = "/" + full.lstrip("/")
    if "\0" in path or not _encodable(path) or not any(full == root or full.startswith(root + "/") for root in ROOTS):
        raise FileRefused(
            f"{path!r} is not a place that the file tools reach",
            f"use a path below {', '.join(ROOTS)}",
            code="invalid_path",
        )
    return full


def _encodable(text: str) -> bool:
    """Whether the kernel can be given this text: surrogates that stand for no byte cannot."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def request(*fields: str) -> bytes:
    """Join fields by NUL; none may contain one."""
    return b"\0".join(os.fsencode(field) for field in fields)


def run_request(argv: Sequence[str], cwd: str, env: Mapping[str, str], *, operation: bytes = b"run") -> bytes:
    """Return the request for a program, or raise CommandRefused with the errno that the kernel would give.

    `operation` is the word for a slot, perhaps with fields of its own.
    """
    items = [f"{name}={value}" for name, value in env.items()]
    if not argv or any("\0" in text for text in (*argv, *items)) or any("=" in name or not name for name in env):
        raise CommandRefused("not a command: empty, or with a zero byte or a bad variable name", code="EINVAL")
    if not all(map(_encodable, (*argv, *items))):
        raise CommandRefused("a lone surrogate is no text", "send valid Unicode", code="EINVAL")
    words = [os.fsencode(text) for text in (*argv, *items)]
    if max(map(len, words)) >= _ONE_ARGUMENT or sum(map(len, words)) + 9 * len(words) > _ALL_ARGUMENTS:
        raise CommandRefused(
            "arguments and environment are too long", "pass the data by a file or standard input", code="E2BIG"
        )
    return b"\0".join((operation, os.fsencode(inside(cwd)), str(len(argv)).encode(), *words))
