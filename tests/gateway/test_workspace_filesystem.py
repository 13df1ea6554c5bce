"""`sandgate://<session>/workspace/...`: the files of a session's sandbox through fsspec, read and written."""

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest

from gateway.client import Client, Session
from gateway.filesystem import SandgateFileSystem
from tests.gateway.conftest import Served
from tests.gateway.test_filesystem import environment, in_thread, read  # noqa: F401 - a fixture

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

ODD = "a b/ü\n%2e'.txt"


@pytest.fixture
async def session(server: Served, environment: None) -> AsyncIterator[Session]:  # noqa: F811
    async with Client() as client, client.session() as one:
        yield one


def at(session: Session, path: str = "") -> str:
    return f"sandgate://{session.id}/workspace{'/' if path else ''}{path}"


async def test_file_is_written_and_read(session: Session) -> None:
    def write() -> None:
        with fsspec.open(at(session, "out/table.csv"), "w") as file:
            file.write("a,b\n" * 1000)

    await in_thread(write)
    assert (await session.call("bash", {"command": "wc -l < out/table.csv"})).text == "1000"
    assert await in_thread(read, at(session, "out/table.csv")) == b"a,b\n" * 1000


async def test_large_file_goes_both_ways_in_parts(session: Session, tmp_path: Path) -> None:
    fs, data = SandgateFileSystem(), os.urandom(20_000_000)
    (tmp_path / "here").write_bytes(data)
    await in_thread(fs.put_file, str(tmp_path / "here"), at(session, "there"))
    await in_thread(fs.get_file, at(session, "there"), str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    parts = await in_thread(fs.cat_ranges, [at(session, "there")] * 3, [0, 10, -5], [4, 20, None])
    assert parts == [data[:4], data[10:20], data[-5:]]


async def test_write_that_breaks_leaves_the_file_as_it_was(session: Session) -> None:
    fs = SandgateFileSystem()
    await in_thread(fs.pipe_file, at(session, "a"), b"before")

    def write() -> None:
        with fs.open(at(session, "a"), "wb", block_size=4) as file:
            file.write(b"much more than a block")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await in_thread(write)
    assert await in_thread(fs.cat_file, at(session, "a")) in (b"before", b"much more than a block")


async def test_new_file_may_be_asked_for(session: Session, tmp_path: Path) -> None:
    fs = SandgateFileSystem()
    await in_thread(lambda: fs.pipe_file(at(session, "a"), b"1", mode="create"))
    (tmp_path / "x").write_bytes(b"2")
    for again in (
        lambda: fs.pipe_file(at(session, "a"), b"2", mode="create"),
        lambda: fs.put_file(str(tmp_path / "x"), at(session, "a"), mode="create"),
        lambda: fs.open(at(session, "a"), "xb"),
    ):
        with pytest.raises(FileExistsError):
            await in_thread(again)
    assert await in_thread(fs.cat_file, at(session, "a")) == b"1"


async def test_folders_are_listed_walked_and_removed(session: Session) -> None:
    fs = SandgateFileSystem()
    await session.call("bash", {"command": "mkdir -p d/e; echo 1 > d/e/f; echo 22 > d/g; touch d/empty"})
    await session.write_file(ODD, b"")
    top = f"{session.id}/workspace"
    assert await in_thread(fs.ls, at(session), False) == [f"{top}/a b", f"{top}/d"]
    found = await in_thread(lambda: fs.find(at(session), detail=True))
    assert {name.removeprefix(f"{top}/"): info["size"] for name, info in found.items()} == {
        ODD: 0,
        "d/e/f": 2,
        "d/empty": 0,
        "d/g": 3,
    }
    assert await in_thread(fs.glob, at(session, "d/*/f")) == [f"{top}/d/e/f"]
    assert (await in_thread(fs.info, at(session, "d")))["type"] == "directory"
    assert await in_thread(fs.cat_file, at(session, "d/empty")) == b""
    assert (await in_thread(fs.info, at(session, "d/empty")))["size"] == 0
    await in_thread(lambda: fs.rm(at(session, "d"), recursive=True))
    assert await in_thread(fs.exists, at(session, "d")) is False
    assert abs(datetime.now(UTC) - await in_thread(fs.modified, at(session, ODD))) < timedelta(minutes=1)


async def test_result_is_copied_into_the_workspace(session: Session) -> None:
    fs = SandgateFileSystem()
    result = await session.call("bash", {"command": "seq 1 20000 | tee printed"})
    await in_thread(fs.copy, result.references[0].reference, at(session, "copied"))
    await in_thread(fs.mv, at(session, "copied"), at(session, "moved"))
    assert (await session.call("bash", {"command": "cmp printed moved; ls"})).text == "moved\nprinted"


@pytest.mark.parametrize(
    "path", ["../x", "a/../../etc/passwd", "a//b", "./a", "a/.", "a\0b", "", "missing", "missing/x", "link", "folder"]
)
async def test_what_is_no_file_of_the_workspace_is_not_read(session: Session, path: str) -> None:
    """A planted link leads nowhere outside: it is followed inside the sandbox, or not at all."""
    await session.call("bash", {"command": "ln -s /etc/passwd link; mkdir folder"})
    with pytest.raises(OSError, match=r"(?s).*"):
        await in_thread(read, at(session, path))


async def test_closed_session_has_no_workspace(session: Session) -> None:
    fs = SandgateFileSystem()
    await in_thread(fs.pipe_file, at(session, "a"), b"1")
    await session.close()
    with pytest.raises(FileNotFoundError):
        await in_thread(fs.cat_file, at(session, "a"))
    assert await in_thread(fs.ls, f"sandgate://{session.id}/results") == []
