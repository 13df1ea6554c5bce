"""From a URI to a store, and what is no store."""

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from stores import NotFound, Store, StoreUnavailable
from stores.remote import FsspecBackend

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("template", ["{}", "file://{}", "local://{}", "FILE://{}"])
async def test_local_spellings_name_one_folder(template: str, tmp_path: Path) -> None:
    store = Store.from_uri(template.format(tmp_path / "root"))
    await store.put("k", b"1")
    assert (store.kind, (tmp_path / "root" / "k").read_bytes()) == ("file", b"1")


@pytest.mark.parametrize(
    "uri",
    [
        "", "file://", "file://relative/path", "file:/etc", "s3:bucket", "dir::file:///tmp", "simplecache::s3://bucket/x",
        "nosuch://bucket/x", "/tmp/\0", "s3://", "s3://bucket/a*",
    ],
)  # fmt: skip
def test_what_names_no_single_place_is_refused(uri: str) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        Store.from_uri(uri)
    assert refused.value.message


def test_wrappers_of_other_file_systems_are_refused_k53(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="wraps"):
        Store.from_uri("dir://x", {"path": str(tmp_path), "target_protocol": "file"})


@pytest.mark.parametrize("uri", ["/tmp/x", "memory://"])
def test_options_that_would_be_ignored_are_refused(uri: str) -> None:
    with pytest.raises(StoreUnavailable, match="options"):
        Store.from_uri(uri, {"auto_mkdir": True})


async def test_memory_stores_are_separate_a41_k54() -> None:
    before = fsspec.filesystem("memory").find("")
    one, other = Store.from_uri("memory://x"), Store.from_uri("memory://x")
    await one.scoped("s").put("k", b"one")
    await other.scoped("s").put("k", b"other")
    assert [chunk async for chunk in one.scoped("s").read("k")] == [b"one"]
    assert [chunk async for chunk in other.scoped("s").read("k")] == [b"other"]
    assert fsspec.filesystem("memory").find("") == before


async def test_memory_is_wiped_on_close_k54() -> None:
    store = Store.from_uri("memory://")
    await store.put("k", b"1")
    await store.aclose()
    with pytest.raises(NotFound):
        await store.size("k")


async def test_memory_has_no_uri() -> None:
    assert Store.from_uri("memory://").uri("k") is None


async def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StoreUnavailable) as refused:
        Store.from_uri("s3://bucket/prefix")
    assert "sandgate[s3]" in refused.value.remedy


class Careless(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Ignores that a name must be new, as some servers of S3 do."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        super().pipe_file(path, value)


async def test_probe_names_a_store_that_writes_twice() -> None:
    place = Careless(global_store=False, skip_instance_cache=True)
    probe = await Store(FsspecBackend(lambda: place, "/root", "s3", "s3://bucket/root")).probe()
    assert (probe.works, probe.not_enforced) == (True, ("a key can be written twice",))


async def test_uri_of_a_key_has_no_password() -> None:
    store = Store.from_uri("sftp://user:secret@host:2222/root/")
    assert store.scoped("s").uri("a/b") == "sftp://user@host:2222/root/s/a/b"


async def test_place_that_cannot_be_reached_is_told_by_its_probe() -> None:
    probe = await Store.from_uri("sftp://user:secret@127.0.0.1:1/root").probe()
    assert not probe.works
    assert "secret" not in probe.reason
