"""What a key may be, and how ours are made.

A key means the same on every kind of store: no file system normalizes, expands or hides anything in it.
"""

import hashlib
import re
from typing import Final

from stores.errors import KeyRefused

MAX_KEY: Final = 400
MAX_SEGMENT: Final = 120
MAX_SEGMENTS: Final = 32

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_STREAM: Final = re.compile(r"[a-z0-9_]{1,32}")
_PLAIN_TOOL: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")
_OTHER: Final = re.compile(r"[^A-Za-z0-9_-]+")
_EXTENSION: Final = re.compile(r"\.[A-Za-z0-9]{1,10}")
_MADE_UP: Final = re.compile(r"[^/.]*\.x[0-9a-f]{20}(\.[A-Za-z0-9]{1,10})?")


def check_key(key: str) -> str:
    """Return the key itself, or raise KeyRefused: a key is never repaired."""
    if len(key) > MAX_KEY:
        raise KeyRefused(f"a key has at most {MAX_KEY} characters")
    segments = key.split("/")
    if len(segments) > MAX_SEGMENTS:
        raise KeyRefused(f"a key has at most {MAX_SEGMENTS} segments")
    for segment in segments:
        check_segment(segment)
    return key


def check_segment(segment: str) -> str:
    """Return one segment of a key itself (also the name of a scope), or raise KeyRefused."""
    if len(segment) > MAX_SEGMENT:
        raise KeyRefused(f"a part of a key has at most {MAX_SEGMENT} characters")
    if not _SEGMENT.fullmatch(segment):
        raise KeyRefused("a key is made of A-Z a-z 0-9 . _ - and /, no part of it empty or beginning with a dot")
    return segment


def is_key(key: str) -> bool:
    """Return whether `check_key` would take it."""
    try:
        check_key(key)
    except KeyRefused:
        return False
    return True


def result_key(sequence: int, tool: str, stream: str) -> str:
    """Make the key of one stream of one call; unequal arguments give unequal keys.

    A tool's name that does not fit is squeezed and told apart by a hash. `stream` is a word of ours.
    """
    if sequence < 0:
        raise KeyRefused("a sequence number is not negative")
    if not _STREAM.fullmatch(stream):
        raise KeyRefused("a stream's name is made of a-z 0-9 _")
    # the dot of a squeezed name occurs in no plain one, and a stream holds no dash
    squeezed = tool if _PLAIN_TOOL.fullmatch(tool) else f"{_squeeze(tool, 38)}.{_hash(tool)}"
    return f"{sequence:04d}-{squeezed}-{stream}"


def file_key(name: str) -> str:
    """Make the key of a file with a real name; unequal names give unequal keys.

    A name that is a key stays (unless it looks like one made up here); any other becomes one segment with a
    hash of its exact characters, lone surrogates included, and its extension where that is a plain one.
    """
    if is_key(name) and not _MADE_UP.fullmatch(name):
        return name
    stem, dot, extension = name.rpartition(".")
    suffix = f"{dot}{extension}"
    if not stem or not _EXTENSION.fullmatch(suffix):
        stem, suffix = name, ""
    return f"{_squeeze(stem, 60)}.x{_hash(name)}{suffix}"


def _squeeze(name: str, length: int) -> str:
    return _OTHER.sub("_", name[:1000])[:length] or "_"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]
