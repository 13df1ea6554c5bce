"""A whole gateway over a real S3 server: what is stored, what is read back, and what the server's faults mean."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import Gone
from gateway.results import SessionResults
from stores import remote as remote_stores
from tests.gateway.conftest import called, opened, running, served
from tests.stores.servers import S3, Fault, Proxy, fault_proxy, s3_server

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local", "s3"), pytest.mark.xdist_group("s3")]

NUMBERS = "".join(f"{number}\n" for number in range(1, 20_001)).encode()
BURST = 64 << 20


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3) -> Iterator[Proxy]:
    with fault_proxy(s3.port) as one:
        yield one


def store(s3: S3, port: int | None = None) -> dict[str, Any]:
    return {"uri": s3.uri(), "options": s3.options(port=port)}


async def test_result_goes_to_s3_and_comes_back(state_dir: Path, s3: S3) -> None:
    settings = store(s3)
    async with served(state_dir, store=settings, profiles={"default": {"show_store_uri": True}}) as server:
        session = await server.session(collect=["out/*"])
        result = await server.call(session, "bash", command="seq 1 20000; mkdir out; echo hi > out/a")
        [reference] = result["references"]
        assert reference["store_uri"] == f"{settings['uri']}/{session['id']}/0001-bash-stdout"
        url = f"/v1/sessions/{session['id']}/results/0001-bash-stdout"
        assert (await server.agent.get(url)).content == NUMBERS
        assert (await server.agent.get(url, headers={"range": "bytes=0-3"})).content == b"1\n2\n"
        assert (await server.agent.get(url, params={"grep": "^19999$"})).json()["text"] == "19999:19999\n"
        closed = (await server.agent.delete(f"/v1/sessions/{session['id']}")).json()
        assert (closed["failed"], closed["collected"][0]["files"]) == ([], 1)
    async with served(state_dir, store=settings) as server:
        assert (await server.agent.get(url)).content == NUMBERS


async def test_store_that_is_down_leaves_the_result_and_no_reference(
    state_dir: Path, s3: S3, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A43: on a real server, and it goes on when the server is there again."""
    async with running(state_dir, store=store(s3, proxy.port)) as gateway:
        session = await opened(gateway)
        assert (await called(gateway, session, "bash", command="seq 1 20000")).references
        faults: tuple[Fault, ...] = ("busy", "silent")
        for fault in faults:
            proxy.fault = fault
            with monkeypatch.context() as patch, anyio.fail_after(60):
                patch.setattr(remote_stores, "REQUEST_SECONDS", 1.0)
                result = await called(gateway, session, "bash", command="seq 1 20000")
            assert (result.status, result.references) == ("ok", ())
            assert result.content[0].text == NUMBERS.decode()
            assert "could not be stored" in result.notes[0]
        proxy.fault = "none"
        assert (await called(gateway, session, "bash", command="seq 1 20000")).references
        kept = [row.key for row in await gateway.journal.results(session.id)]
        assert kept == ["0001-bash-stdout", "0004-bash-stdout"]


async def test_bytes_that_were_altered_are_not_handed_out(state_dir: Path, s3: S3, proxy: Proxy) -> None:
    async with running(state_dir, store=store(s3, proxy.port)) as gateway:
        session = await opened(gateway)
        reference = (await called(gateway, session, "bash", command="seq 1 20000")).references[0].reference
        proxy.fault = "altered answer"
        found: list[bytes] = []
        with pytest.raises(Gone, match="not what was put there"):
            await _read_into(found, SessionResults(session.id, gateway.shelf), reference)
        saved = await called(gateway, session, "read_result", reference=reference, save_to="copy")
        proxy.fault = "none"
        assert saved.status == "failed"
        assert (await called(gateway, session, "bash", command="ls")).text == ""
    assert sum(map(len, found)) < len(NUMBERS)


async def _read_into(found: list[bytes], results: SessionResults, reference: str) -> None:
    async for chunk in results.read(reference):
        found.append(chunk)


@pytest.mark.parametrize("kind", ["file", "s3"])
async def test_burst_on_both_streams_arrives_byte_for_byte(state_dir: Path, s3: S3, kind: str) -> None:
    command = (
        f"(head -c {BURST} /dev/urandom | tee a) & (head -c {BURST} /dev/urandom | tee b >&2) & wait; "
        "sha256sum a b > sums"
    )
    async with running(state_dir, store=store(s3) if kind == "s3" else {}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command=command, timeout_s=300)
        sums = (await called(gateway, session, "bash", command="cut -d' ' -f1 sums")).text.split()
        assert [(one.stream, one.bytes, one.sha256) for one in result.references] == [
            ("stdout", BURST, sums[0]),
            ("stderr", BURST, sums[1]),
        ]
        for reference in result.references:
            digest = hashlib.sha256()
            async for chunk in SessionResults(session.id, gateway.shelf).read(reference.reference):
                digest.update(chunk)
            assert digest.hexdigest() == reference.sha256
