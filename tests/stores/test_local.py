"""The local folder: modes, links, hard links, leftovers."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import fsspec
import pytest

from stores import AlreadyExists, KeyRefused, NotFound, QuotaExceeded, Store, StoreUnavailable
from stores.local import PARTIAL, LocalBackend

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def test_nothing_is_made_before_the_first_write(local: Store, root: Path) -> None:
    assert await local.list() == ()
    await local.scoped("s").delete_all()
    with pytest.raises(NotFound):
        await local.delete("k")
    assert not root.exists()


async def test_files_are_private_whatever_the_umask_a42(local: Store, root: Path, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(b"1")
    before = os.umask(0)
    try:
        spool.chmod(0o666)
        await local.put("s/a/k", b"1")
        await local.put_file("s/linked", spool, sha256=hashlib.sha256(b"1").hexdigest(), size=1)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(root.parent)): path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
    assert modes == {
        "root": 0o700,
        f"root/{PARTIAL}": 0o700,
        "root/s": 0o700,
        "root/s/a": 0o700,
        "root/s/a/k": 0o600,
        "root/s/linked": 0o600,
    }


async def test_put_file_links_on_the_same_file_system(local: Store, root: Path, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(b"1")
    await local.put_file("k", spool, sha256="known", size=1)
    assert (root / "k").samefile(spool)


async def test_put_file_copies_and_compares_where_no_link_is_possible(
    local: Store, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(b"1")
    monkeypatch.setattr(LocalBackend, "adopt", lambda *_: False)
    with pytest.raises(StoreUnavailable):
        await local.put_file("k", spool, sha256="wrong", size=1)
    await local.put_file("k", spool, sha256=hashlib.sha256(b"1").hexdigest(), size=1)
    assert (root / "k").read_bytes() == b"1"
    assert not (root / "k").samefile(spool)


async def test_adopt_says_where_a_link_is_impossible(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "cross-device")

    (tmp_path / "spool").write_bytes(b"1")
    monkeypatch.setattr(os, "link", refuse)
    assert LocalBackend(root).adopt("k", tmp_path / "spool") is False


async def test_put_needs_hard_links(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreUnavailable, match="hard links"):
        await local.put("k", b"1")


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        (errno.ENOSPC, StoreUnavailable, "disk full"),
        (errno.EDQUOT, QuotaExceeded, "disk quota"),
        (errno.EROFS, StoreUnavailable, "not permitted"),
    ],
)
async def test_a_failing_disk_is_told_and_leaves_nothing_a43(
    local: Store, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception], message: str
) -> None:
    def fail(self: object, chunk: bytes) -> None:
        raise OSError(code, "told by the disk")

    monkeypatch.setattr("stores.local._LocalDraft.append", fail)
    with pytest.raises(expected, match=message):
        await local.put("k", b"1")
    assert list((root / PARTIAL).iterdir()) == []


async def test_a_linked_file_is_missing_to_readers(local: Store, root: Path, outside: Path) -> None:
    await local.put("s/k", b"1")
    (root / "s" / "planted").symlink_to(outside / "secret")
    with pytest.raises(NotFound):
        await whole(local.read("s/planted"))
    with pytest.raises(NotFound):
        await local.delete("s/planted")
    assert [entry.key for entry in await local.list()] == ["s/k"]


async def test_a_linked_folder_is_missing_to_readers_f76(local: Store, root: Path, outside: Path) -> None:
    await local.put("k", b"1")
    (root / "s").symlink_to(outside, target_is_directory=True)
    with pytest.raises(NotFound):
        await whole(local.read("s/secret"))
    with pytest.raises(NotFound):
        await local.delete("s/secret")
    assert await local.scoped("s").list() == ()
    assert [entry.key for entry in await local.list()] == ["k"]


async def test_a_linked_folder_is_not_written_through_f76(local: Store, root: Path, outside: Path) -> None:
    await local.put("k", b"1")
    (root / "s").symlink_to(outside, target_is_directory=True)
    with pytest.raises(KeyRefused):
        await local.put("s/new", b"1")
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def test_a_link_at_the_key_is_not_replaced(local: Store, root: Path, outside: Path) -> None:
    await local.put("k", b"1")
    (root / "planted").symlink_to(outside / "new")
    with pytest.raises(AlreadyExists):
        await local.put("planted", b"1")
    assert not (outside / "new").exists()


async def test_delete_all_removes_links_and_not_what_they_name(local: Store, root: Path, outside: Path) -> None:
    await local.put("s/k", b"1")
    (root / "s" / "planted").symlink_to(outside, target_is_directory=True)
    (root / "linked").symlink_to(outside, target_is_directory=True)
    await local.scoped("s").delete_all()
    await local.scoped("linked").delete_all()
    assert sorted(path.name for path in root.iterdir()) == [PARTIAL]
    assert (outside / "secret").read_bytes() == b"secret"


async def test_the_root_itself_may_be_a_link(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(outside, target_is_directory=True)
    store = Store.from_uri(str(tmp_path / "link"))
    await store.put("k", b"1")
    assert (outside / "k").read_bytes() == b"1"


async def test_a_planted_pipe_does_not_block_readers(local: Store, root: Path) -> None:
    await local.put("k", b"1")
    os.mkfifo(root / "pipe")
    with pytest.raises(NotFound):
        await whole(local.read("pipe"))


async def test_a_key_below_a_stored_key_is_refused(local: Store) -> None:
    await local.put("k", b"1")
    with pytest.raises(KeyRefused):
        await local.put("k/below", b"2")
    await local.put("folder/below", b"1")
    with pytest.raises(AlreadyExists):
        await local.put("folder", b"2")


async def test_what_is_being_read_survives_its_deletion(local: Store) -> None:
    await local.put("k", b"x" * 600_000)
    chunks = local.read("k")
    first = await anext(chunks)
    await local.delete("k")
    assert len(first) + len(await whole(chunks)) == 600_000


async def test_a_killed_gateway_leaves_whole_objects_only_a44(local: Store, root: Path) -> None:
    program = """
import anyio, itertools, sys
from stores import Store
async def main():
    store = Store.from_uri(sys.argv[1])
    for number in itertools.count():
        await store.put(str(number), b"x" * 3_000_000)
        print(number, flush=True)
anyio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE) as child:
        assert child.stdout
        for _ in range(3):
            child.stdout.readline()
        child.kill()
    found = await local.list()
    assert len(found) >= 3
    assert {entry.bytes for entry in found} == {3_000_000}


async def test_leftovers_of_a_killed_gateway_are_swept_a44(local: Store, root: Path) -> None:
    (root / PARTIAL).mkdir(parents=True)
    for name in ("old", "young"):
        (root / PARTIAL / name).write_bytes(b"half")
    os.utime(root / PARTIAL / "old", (0, 0))
    assert await local.list() == ()
    await local.put("k", b"1")
    assert [path.name for path in (root / PARTIAL).iterdir()] == ["young"]


async def test_uri_opens_with_fsspec(tmp_path: Path) -> None:
    store = Store.from_uri(f"{tmp_path}/with space #and %20")
    await store.scoped("s").put("k", b"1")
    uri = store.scoped("s").uri("k")
    assert uri == f"file://{tmp_path}/with space #and %20/s/k"
    with fsspec.open(uri) as file:
        assert file.read() == b"1"


async def test_probe_names_an_open_root(local: Store, root: Path) -> None:
    root.mkdir(mode=0o755)
    probe = await local.probe()
    assert probe.works
    assert len(probe.not_enforced) == 1
    root.chmod(0o700)
    assert (await local.probe()).not_enforced == ()


async def test_probe_says_why_a_store_does_not_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    probe = await Store.from_uri(f"{tmp_path}/file").probe()
    assert (probe.works, probe.reason) == (False, "the root is not a folder")
    assert probe.remedy
