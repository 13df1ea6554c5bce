"""An S3 server that is down, slow, refusing or lying: told within a bounded time, and nothing half-made is left."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from stores import Damaged, KeyRefused, NotFound, ResultStore, Store, StoreUnavailable
from stores import remote as remote_stores
from tests.stores.servers import S3, Fault, Proxy, fault_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.needs("s3")]

DATA = bytes(range(256)) * 4000
MUCH = bytes(range(256)) * 80_000
"""Over two parts of a multipart upload."""


@pytest.fixture
def proxy(s3: S3) -> Iterator[Proxy]:
    with fault_proxy(s3.port) as one:
        yield one


@pytest.fixture
def uri(s3: S3) -> str:
    return s3.uri()


@pytest.fixture
async def plain(s3: S3, uri: str) -> AsyncIterator[Store]:
    """The same place, without the proxy."""
    opened = Store.from_uri(uri, s3.options())
    yield opened
    await opened.aclose()


@pytest.fixture
async def store(s3: S3, uri: str, proxy: Proxy) -> AsyncIterator[Store]:
    opened = Store.from_uri(uri, s3.options(port=proxy.port))
    yield opened
    await opened.aclose()


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


Work = Callable[[Store, Path], Awaitable[object]]
WORKS: dict[str, Work] = {
    "put": lambda store, path: store.put("new", b"x" * 1000),
    "put much": lambda store, path: store.put("new", MUCH),
    "put file": lambda store, path: store.put_file("new", path, sha256="-", size=path.stat().st_size),
    "read": lambda store, path: whole(store.read("old")),
    "size": lambda store, path: store.size("old"),
    "list": lambda store, path: store.list(),
    "delete": lambda store, path: store.delete("old"),
    "delete all": lambda store, path: store.scoped("s").delete_all(),
}


@pytest.mark.parametrize(
    ("fault", "work"),
    [*(("silent", work) for work in WORKS), *((fault, work) for fault in ("busy", "down") for work in ("put", "read"))],
)
async def test_server_that_gives_no_answer_is_told_in_time(
    fault: str,
    work: str,
    s3: S3,
    plain: Store,
    store: Store,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A43: nothing hangs, and nothing is stored or lost by it."""
    (tmp_path / "file").write_bytes(MUCH)
    await plain.put("old", DATA)
    if fault == "down":
        store = Store.from_uri("s3://sandgate/none", s3.options(port=1))
    else:
        proxy.fault = fault  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(remote_stores, "REQUEST_SECONDS", 1.0)
        patch.setattr(remote_stores, "SLOWEST_BYTES_A_SECOND", 1 << 30)
        with anyio.fail_after(60), pytest.raises(StoreUnavailable):
            await WORKS[work](store, tmp_path / "file")
    assert [entry.key for entry in await plain.list()] == ["old"]
    await store.aclose()


@pytest.mark.parametrize("fault", ["half answer", "altered answer"])
async def test_wrong_bytes_are_never_a_result(fault: Fault, plain: Store, store: Store, proxy: Proxy) -> None:
    """A body that breaks off, and one that is not what was stored."""
    stored = await ResultStore(plain).put("s", "k", DATA, "text/plain")
    results = ResultStore(store)
    assert await whole(results.read_whole("s", "k", stored.sha256)) == DATA
    proxy.fault = fault
    with pytest.raises((StoreUnavailable, Damaged)):
        await whole(results.read_whole("s", "k", stored.sha256))


async def test_request_that_was_altered_on_its_way_stores_nothing(plain: Store, store: Store, proxy: Proxy) -> None:
    proxy.fault = "altered request"
    with pytest.raises(StoreUnavailable):
        await store.put("k", DATA)
    assert await plain.list() == ()


@pytest.mark.parametrize("who", [{"key": "reader"}, {"secret": "wrong"}, {"key": "nobody"}])
async def test_credentials_that_may_not_write_are_told(who: dict[str, str], s3: S3, uri: str, plain: Store) -> None:
    store = Store.from_uri(uri, s3.options(**who))  # type: ignore[arg-type]
    probe = await store.probe()
    assert (probe.works, probe.reason) == (False, "not permitted")
    with pytest.raises(StoreUnavailable, match="not permitted"):
        await store.put("k", b"1")
    assert await plain.list() == ()
    await store.aclose()


async def test_store_works_again_when_its_server_does(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.fault = "silent"
    with monkeypatch.context() as patch:
        patch.setattr(remote_stores, "REQUEST_SECONDS", 1.0)
        with pytest.raises(StoreUnavailable):
            await store.put("k", b"1")
    proxy.fault = "none"
    assert (await store.put("k", b"1")).sha256 == hashlib.sha256(b"1").hexdigest()


async def test_forged_key_causes_no_request(store: Store, proxy: Proxy) -> None:
    """A40: what is no key is refused here, and the server hears nothing of it."""
    await store.put("k", b"")
    heard = len(proxy.requests)
    for key in ("../other/k", "s3://other/k", "/k", "k*", "a//b", "K\u212a", "..%2fk"):
        with pytest.raises(KeyRefused):
            await store.scoped("s").size(key)
    assert len(proxy.requests) == heard > 0
    assert not any("other" in line for line in proxy.requests)


async def test_key_of_another_case_is_another_key(plain: Store) -> None:
    await plain.put("Key", b"1")
    with pytest.raises(NotFound):
        await plain.size("key")
