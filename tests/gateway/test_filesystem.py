"""`sandgate://` through fsspec and pandas, against a real gateway. fsspec blocks, so it runs in worker threads here."""

import gc
import io
import json
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import fsspec
import fsspec.asyn
import pandas
import pytest

from gateway.client import Client, Session
from gateway.filesystem import SandgateFileSystem
from tests.gateway.conftest import Served
from tests.gateway.test_client import listening, token_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

T = TypeVar("T")
TABLE = "number,square\n" + "".join(f"{i},{i * i}\n" for i in range(5000))
PRINT_TABLE = "import sys; sys.stdout.write('number,square\\n' + ''.join(f'{i},{i * i}\\n' for i in range(5000)))"


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(function, *arguments)


@pytest.fixture
async def environment(server: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The two variables, as a user sets them; file systems made meanwhile are dropped, and close by themselves."""
    monkeypatch.setenv("SANDGATE_URL", server.url)
    monkeypatch.setenv("SANDGATE_TOKEN", token_of(server))
    yield
    SandgateFileSystem.clear_instance_cache()
    await in_thread(gc.collect)


@pytest.fixture
async def session(server: Served, environment: None) -> AsyncIterator[Session]:
    """A session with one stored result: `TABLE`."""
    async with Client() as client, client.session(collect=["out/**"]) as one:
        await one.call("python", {"code": PRINT_TABLE})
        yield one


def reference_of(session: Session) -> str:
    return f"sandgate://{session.id}/results/0001-python-stdout"


def read(reference: str, **options: Any) -> bytes:
    with fsspec.open(reference, "rb", **options) as file:
        data: bytes = file.read()
    return data


# readers


async def test_reference_is_opened_by_fsspec(session: Session) -> None:
    assert await in_thread(read, reference_of(session)) == TABLE.encode()


async def test_reference_is_read_by_pandas(session: Session) -> None:
    table = await in_thread(pandas.read_csv, reference_of(session))
    assert (len(table), int(table["square"].sum())) == (5000, sum(i * i for i in range(5000)))


async def test_reference_is_read_through_a_cache(session: Session) -> None:
    assert await in_thread(read, f"simplecache::{reference_of(session)}") == TABLE.encode()
    assert await in_thread(read, f"filecache::{reference_of(session)}") == TABLE.encode()


async def test_result_outlives_its_session(session: Session) -> None:
    await session.close()
    assert await in_thread(read, reference_of(session)) == TABLE.encode()


async def test_parts_of_a_file_are_read_in_any_order(session: Session) -> None:
    def seek() -> list[bytes]:
        with fsspec.open(reference_of(session), block_size=100) as file:
            parts = [file.read(10)]
            for offset, whence in ((-7, io.SEEK_END), (20_000, io.SEEK_SET), (5, io.SEEK_SET)):
                file.seek(offset, whence)
                parts.append(file.read(7))
            return parts

    whole = TABLE.encode()
    assert await in_thread(seek) == [whole[:10], whole[-7:], whole[20_000:20_007], whole[5:12]]


async def test_range_is_that_of_a_slice(session: Session) -> None:
    fs, whole = SandgateFileSystem(), TABLE.encode()
    for start, end in [
        (None, None),
        (0, 5),
        (10, 20),
        (-5, None),
        (-10, -3),
        (5, -5),
        (None, 4),
        (7, 7),
        (10**9, None),
        (5, 10**9),
        (-(10**9), 3),
    ]:
        assert await in_thread(fs.cat_file, reference_of(session), start, end) == whole[start:end], (start, end)


async def test_ranges_of_many_files_are_read_at_once(session: Session) -> None:
    fs, name, whole = SandgateFileSystem(), reference_of(session), TABLE.encode()
    parts = await in_thread(fs.cat_ranges, [name, name, f"{name}x"], [0, 100, 0], [10, 110, 1])
    assert parts[:2] == [whole[:10], whole[100:110]]
    assert isinstance(parts[2], FileNotFoundError)


async def test_async_use_in_the_callers_loop(session: Session) -> None:
    fs = SandgateFileSystem(asynchronous=True)
    assert await fs._cat_file(reference_of(session), 0, 6) == b"number"
    await fs.aclose()
    assert await fs._cat_file(reference_of(session), 0, 6) == b"number"
    await fs.aclose()


async def test_file_is_fetched_whole(session: Session, tmp_path: Path) -> None:
    fs = SandgateFileSystem()
    await in_thread(fs.get_file, reference_of(session), str(tmp_path / "new" / "table.csv"))
    assert (tmp_path / "new" / "table.csv").read_text() == TABLE


# looking


async def test_info_names_size_type_and_digest(session: Session) -> None:
    fs, (stored,) = SandgateFileSystem(), await session.results()
    info = await in_thread(fs.info, reference_of(session))
    assert info == {
        "name": f"{session.id}/results/0001-python-stdout",
        "type": "file",
        "size": len(TABLE),
        "media_type": stored.media_type,
        "sha256": stored.sha256,
        "ETag": stored.sha256,
    }
    assert await in_thread(fs.ls, f"sandgate://{session.id}/results") == [info]


async def test_session_is_listed_from_its_top(session: Session) -> None:
    fs = SandgateFileSystem()
    assert await in_thread(fs.ls, "sandgate://", False) == [session.id]
    assert await in_thread(fs.ls, f"sandgate://{session.id}", False) == [
        f"{session.id}/results",
        f"{session.id}/workspace",
    ]
    assert await in_thread(fs.ls, f"sandgate://{session.id}/results/", False) == [
        f"{session.id}/results/0001-python-stdout"
    ]
    assert await in_thread(fs.isdir, f"sandgate://{session.id}")


async def test_collected_files_stand_in_folders(session: Session, tmp_path: Path) -> None:
    """A key may contain slashes; fsspec sees folders."""
    await session.call("bash", {"command": "mkdir -p out/deep; echo a > out/a; echo b > out/deep/b"})
    await session.close()
    fs, top = SandgateFileSystem(), f"sandgate://{session.id}/results"
    found = [name.removeprefix(f"{session.id}/results/") for name in await in_thread(fs.glob, f"{top}/*/files/**")]
    folder = next(name for name in found if name.endswith("/out/a")).removesuffix("/a")
    assert {f"{folder}/a", f"{folder}/deep/b"} <= set(found)
    assert await in_thread(fs.isdir, f"{top}/{folder}")
    assert await in_thread(read, f"{top}/{folder}/deep/b") == b"b\n"
    await in_thread(lambda: fs.get(f"{top}/{folder}/", str(tmp_path / "got"), recursive=True))
    assert (tmp_path / "got" / "deep" / "b").read_text() == "b\n"
    with pytest.raises(IsADirectoryError):
        await in_thread(read, f"{top}/{folder}")


async def test_glob_finds_results(session: Session) -> None:
    fs = SandgateFileSystem()
    assert await in_thread(fs.glob, f"sandgate://{session.id}/results/*-stdout") == [
        f"{session.id}/results/0001-python-stdout"
    ]
    assert await in_thread(fs.glob, f"sandgate://{session.id}/results/*.csv") == []


async def test_time_of_storing_is_told(session: Session) -> None:
    fs = SandgateFileSystem()
    when = await in_thread(fs.modified, reference_of(session))
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert await in_thread(fs.created, reference_of(session)) == when


async def test_info_is_asked_once(session: Session) -> None:
    """Results do not change, and readers such as duckdb ask many times."""
    fs = SandgateFileSystem()
    first = await in_thread(fs.info, reference_of(session))
    assert fs._client is not None
    await in_thread(fsspec.asyn.sync, fs.loop, fs._client.aclose)
    assert await in_thread(fs.info, reference_of(session)) == first


# refusals


FORGED = [
    "s-{other}/results/0001-python-stdout",
    "{own}/results/9999-x-stdout",
    "{own}/files/etc/passwd",
    "{own}/results/../../{own}/results/0001-python-stdout",
    "{own}/results/x/../0001-python-stdout",
    "../{own}/results/0001-python-stdout",
    "/{own}/results/0001-python-stdout",
    "{own}/results//0001-python-stdout",
    "{own}/results/%2e%2e/x",
    "{own}/results/.partial",
    "{own}/results/0001-python-stdout?lines=1-2",
    "{own}/results/0001-python-stdout#",
    "{own}/results/a\0b",
    "user:password@host/results/x",
]


async def test_forged_reference_is_absent(session: Session) -> None:
    """A40: what no result stands behind is not there, however it is spelled."""
    for path in FORGED:
        with pytest.raises(FileNotFoundError):
            await in_thread(read, f"sandgate://{path.format(own=session.id, other='0' * 32)}")


async def test_foreign_reference_is_absent(server: Served, session: Session) -> None:
    """A39: another's result looks like one that was never there."""
    async with Client() as client, client.session() as other:
        options = {"token": other.token}
        with pytest.raises(FileNotFoundError) as foreign:
            await in_thread(lambda: read(reference_of(session), **options))
        with pytest.raises(FileNotFoundError) as absent:
            await in_thread(lambda: read(f"sandgate://s-{'0' * 32}/results/0001-python-stdout", **options))
        assert foreign.value.strerror == absent.value.strerror


async def test_expired_result_says_so(server: Served, session: Session) -> None:
    """A39: one's own expired result is told apart."""
    server.gateway.journal.mark_deleted(await server.gateway.journal.results(session.id), 1.0)
    with pytest.raises(FileNotFoundError, match="expired"):
        await in_thread(read, reference_of(session))


async def test_other_scheme_leaves_no_request(server: Served, environment: None) -> None:
    """A40: a path with another scheme is not there, and neither its host nor the gateway is asked."""
    asked = []

    async def note(connection: anyio.abc.SocketStream) -> None:
        asked.append(connection)
        await connection.aclose()

    async with listening(note) as url:
        fs = SandgateFileSystem(url=url, token="token")
        for path in (
            f"{url}/x",
            f"sandgate://{url}/x",
            "s3://bucket/key",
            "file:///etc/passwd",
            "/etc/passwd",
            "..",
            f"sandgate://{url.removeprefix('http://')}/results/x",
        ):
            for look in (fs.info, fs.cat_file, fs.ls, fs.open):
                with pytest.raises(FileNotFoundError):
                    await in_thread(look, path)
    assert asked == []


async def test_wrong_token_is_a_permission_error(server: Served, session: Session) -> None:
    with pytest.raises(PermissionError, match="token"):
        await in_thread(lambda: read(reference_of(session), token="wrong"))


async def test_missing_token_is_a_permission_error(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDGATE_TOKEN")
    with pytest.raises(PermissionError, match="sandgate token agent"):
        await in_thread(read, reference_of(session))


async def test_unreachable_gateway_is_a_connection_error(environment: None) -> None:
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:1"):
        await in_thread(lambda: read(f"sandgate://s-{'0' * 32}/results/x", url="http://127.0.0.1:1"))


WRITES: dict[str, Callable[[Any, str], object]] = {
    "open": lambda fs, path: fs.open(path, "wb"),
    "open text": lambda fs, path: fs.open(path, "w"),
    "append": lambda fs, path: fs.open(path, "ab"),
    "exclusive": lambda fs, path: fs.open(path, "xb"),
    "pipe": lambda fs, path: fs.pipe(path, b"x"),
    "touch": lambda fs, path: fs.touch(path),
    "rm": lambda fs, path: fs.rm(path),
    "rm_file": lambda fs, path: fs.rm_file(path),
    "cp_file": lambda fs, path: fs.cp_file(path, f"{path}2"),
    "copy": lambda fs, path: fs.copy(path, f"{path}2"),
    "mv": lambda fs, path: fs.mv(path, f"{path}2"),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "makedirs": lambda fs, path: fs.makedirs(path),
    "rmdir": lambda fs, path: fs.rmdir(path),
    "put": lambda fs, path: fs.put(__file__, path),
}


async def test_writing_is_a_permission_error(session: Session) -> None:
    fs, not_refused = SandgateFileSystem(), []
    for name, write in WRITES.items():
        try:
            await in_thread(write, fs, reference_of(session))
            not_refused.append(name)
        except PermissionError:
            pass
    assert not_refused == []
    assert [one.reference for one in await session.results()] == [reference_of(session)]


# the token, and the end


async def test_pickle_leaves_the_token_out(server: Served, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SandgateFileSystem(url=server.url, token=token_of(server))
    with await in_thread(fs.open, reference_of(session)) as file:
        for pickled in (pickle.dumps(fs), pickle.dumps(file), fs.to_json().encode()):
            assert token_of(server).encode() not in pickled
            assert server.url.encode() in pickled
    again = pickle.loads(pickle.dumps(fs))
    assert await in_thread(again.cat_file, reference_of(session)) == TABLE.encode()
    monkeypatch.delenv("SANDGATE_TOKEN")
    with pytest.raises(PermissionError):
        await in_thread(again.cat_file, reference_of(session))


async def test_json_leads_back_to_the_same_place(server: Served, environment: None) -> None:
    fs = SandgateFileSystem(url=server.url, token="secret")
    assert json.loads(fs.to_json())["url"] == server.url
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) == SandgateFileSystem(url=server.url)


async def test_connections_close_when_the_file_system_is_dropped(session: Session) -> None:
    """Warnings are errors here: a connection that was left open would fail the test."""
    fs = SandgateFileSystem(skip_instance_cache=True)
    await in_thread(fs.cat_file, reference_of(session))
    client = fs._client
    assert client is not None
    del fs
    await in_thread(gc.collect)
    assert client._http.is_closed


async def test_process_that_used_it_ends_without_a_word(session: Session) -> None:
    """Nothing is imported or closed by hand: the entry point finds it, and the connections close at exit."""
    code = "import sys, pandas; print(len(pandas.read_csv(sys.argv[1])))"
    done = await anyio.run_process([sys.executable, "-W", "error::ResourceWarning", "-c", code, reference_of(session)])
    assert (done.stdout, done.stderr) == (b"5000\n", b"")


async def test_changed_environment_is_followed(
    server: Served, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec keeps file systems for the life of the process; what is known of one token is not told to another."""
    fs = SandgateFileSystem()
    await in_thread(fs.info, reference_of(session))
    async with Client() as client, client.session() as other:
        assert other.token is not None
        monkeypatch.setenv("SANDGATE_TOKEN", other.token)
        with pytest.raises(FileNotFoundError):
            await in_thread(fs.info, reference_of(session))


async def test_many_threads_share_one_file_system(session: Session) -> None:
    fs, found = SandgateFileSystem(), []

    def work() -> None:
        found.append(fs.cat_file(reference_of(session)))

    def all_at_once() -> None:
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    await in_thread(all_at_once)
    assert found == [TABLE.encode()] * 16
