"""From a URI of the operator's to the place that it names."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import fsspec
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.implementations.local import LocalFileSystem

from stores.backend import Backend
from stores.errors import StoreUnavailable, translated
from stores.local import LocalBackend
from stores.remote import FsspecBackend, MemoryBackend

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_LOCAL: Final = ("file", "local")
_PASSWORD: Final = re.compile(r"^([^/]*//[^/@:]*):[^/]*(@)")
_S3: Final[Mapping[str, object]] = {
    "use_listings_cache": False,
    "max_concurrency": 4,
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 0}},
}
"""s3fs tries again by itself, five times, on top of what botocore does."""
_DEFAULTS: Final = {"s3": _S3, "s3a": _S3}


def open_backend(uri: str, options: Mapping[str, object]) -> Backend:
    """Open the place, without asking it for anything yet.

    Raises StoreUnavailable where it is no address of one place: chained URLs, wrappers of other file systems
    (they follow links and hide what they wrap), relative `file://`, unknown protocols.
    """
    if "::" in uri:
        raise StoreUnavailable("chained URLs are refused", "name one place, such as s3://bucket/prefix")
    scheme = _SCHEME.match(uri)
    protocol = scheme.group(1).lower() if scheme else "file"
    if scheme and not scheme.group(2):
        raise StoreUnavailable(f"{protocol}: is not followed by //", "write file:///path, s3://bucket/prefix, ...")
    rest = uri[scheme.end() :] if scheme else uri
    if protocol in (*_LOCAL, "memory") and options:
        raise StoreUnavailable(f"a {protocol} store takes no options", "remove them")
    if protocol == "memory":
        return MemoryBackend(f"/{rest.strip('/')}")
    if protocol in _LOCAL:
        return _local(rest, relative=not scheme)
    return _remote(f"{protocol}://{rest}", protocol, options)


def _local(path: str, *, relative: bool) -> Backend:
    if not path or "\0" in path:
        raise StoreUnavailable("the store's path is empty or holds a NUL", "write file:///path")
    if not relative and not path.startswith("/"):
        raise StoreUnavailable("file:// is followed by an absolute path", "write file:///path, with three slashes")
    return LocalBackend(Path(path).expanduser().absolute())


def _remote(uri: str, protocol: str, options: Mapping[str, object]) -> Backend:
    try:
        with translated():
            filesystem = fsspec.get_filesystem_class(protocol)
            root = filesystem._strip_protocol(uri)
    except StoreUnavailable as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        raise StoreUnavailable(f"{protocol}:// is not known to fsspec") from error
    if issubclass(filesystem, ChainedFileSystem | LocalFileSystem):
        raise StoreUnavailable(f"{protocol}:// wraps another file system", "name that one itself")
    if not root.strip("/") or re.search(r"[*?\[\]]", root):
        raise StoreUnavailable(
            "the store's root is empty or holds * ? [ ]", "name a bucket, such as s3://bucket/prefix"
        )
    arguments = {**filesystem._get_kwargs_from_urls(uri), **_DEFAULTS.get(protocol, {}), **options}
    connect = functools.partial(filesystem, **arguments, skip_instance_cache=True)
    return FsspecBackend(connect, root, protocol, _PASSWORD.sub(r"\1\2", uri))
