"""A small object store as an asynchronous fsspec file system: flat keys, whole puts, exclusive create."""

from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem


class ObjectsFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Behaves as S3 does: folders are only prefixes, deleting what is not there is fine, ranges must not be empty."""

    protocol = "objects"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        self.requests.append(path)
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        for name, data in self.objects.items():
            if name.startswith(f"{path}/"):
                child, below, _rest = name.removeprefix(f"{path}/").partition("/")
                kind = "directory" if below else "file"
                found[child] = {"name": f"{path}/{child}", "size": 0 if below else len(data), "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [entry["name"] for entry in found.values()]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data = self.objects[self._strip_protocol(path)][start:end]
        if not data:
            raise OSError(22, "InvalidRange")
        return data

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.requests.append(path)
        path = self._strip_protocol(path)
        if mode == "create" and path in self.objects:
            raise OSError(22, "PreconditionFailed")
        self.objects[path] = bytes(value)

    async def _put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **_: Any) -> None:
        await self._pipe_file(rpath, Path(lpath).read_bytes(), mode)

    async def _rm_file(self, path: str, **_: Any) -> None:
        self.objects.pop(self._strip_protocol(path), None)


def register() -> None:
    fsspec.register_implementation("objects", ObjectsFileSystem, clobber=True)
