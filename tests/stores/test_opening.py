"""From a URI to a store, and what is no store."""

from pathlib import Path

import fsspec
import pytest

from stores import KeyRefused, NotFound, Store, StoreUnavailable
from tests.stores import objects

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
        "nosuch://bucket/x", "/tmp/\0", "objects://", "objects://bucket/a*",
    ],
)  # fmt: skip
def test_what_names_no_single_place_is_refused(uri: str) -> None:
    objects.register()
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
    one, other = Store.from_uri("memory://x"), Store.from_uri("memory://x")
    await one.scoped("s").put("k", b"one")
    await other.scoped("s").put("k", b"other")
    assert [chunk async for chunk in one.scoped("s").read("k")] == [b"one"]
    assert [chunk async for chunk in other.scoped("s").read("k")] == [b"other"]
    assert fsspec.filesystem("memory").find("") == []


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

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(StoreUnavailable) as refused:
        Store.from_uri("s3://bucket/prefix")
    assert "sandgate[s3]" in refused.value.remedy


async def test_forged_keys_cause_no_request_a40() -> None:
    objects.register()
    store = Store.from_uri("objects://bucket/root")
    filesystem = store._backend._fs  # type: ignore[attr-defined]
    for key in ("../other/k", "objects://other/k", "/k", "k*"):
        with pytest.raises(KeyRefused):
            await store.scoped("s").size(key)
    assert filesystem.requests == []
    await store.put("k", b"")
    assert filesystem.requests == ["bucket/root/k"]


async def test_a_silent_far_side_is_told_by_its_type_only_a55(monkeypatch: pytest.MonkeyPatch) -> None:
    objects.register()

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret-key-canary")

    monkeypatch.setattr(objects.ObjectsFileSystem, "_pipe_file", fail)
    probe = await Store.from_uri("objects://bucket/root").probe()
    assert (probe.works, probe.reason) == (False, "the store failed (RuntimeError)")


async def test_probe_names_a_store_that_writes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    objects.register()
    original = objects.ObjectsFileSystem._pipe_file

    async def ignoring(self: objects.ObjectsFileSystem, path: str, value: bytes, **_: object) -> None:
        await original(self, path, value)

    monkeypatch.setattr(objects.ObjectsFileSystem, "_pipe_file", ignoring)
    probe = await Store.from_uri("objects://bucket/root").probe()
    assert "a key can be written twice" in probe.not_enforced
