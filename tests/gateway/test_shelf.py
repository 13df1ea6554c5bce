"""How much may be stored, what goes when it is too much, and what a crash leaves."""

import subprocess
from pathlib import Path

import anyio
import pytest

from gateway.errors import Gone
from gateway.results import SessionResults
from tests.gateway.conftest import called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

ALWAYS = {"rules": [{"tools": ["bash"], "when": "always"}]}


def profile(size: str) -> dict[str, object]:
    return {"default": {"limits": {"results_size": size}}}


async def test_full_session_refuses_and_says_so(state_dir: Path) -> None:
    """seed-facts 12 row 24."""
    async with running(state_dir, profiles=profile("3MiB"), offload=ALWAYS) as gateway:
        session = await opened(gateway)
        first = await called(gateway, session, "bash", command="head -c 2500000 /dev/zero")
        second = await called(gateway, session, "bash", command="head -c 1000000 /dev/zero")
        small = await called(gateway, session, "bash", command="echo hi")
        await SessionResults(session.id, gateway.shelf).delete(first.references[0].reference)
        third = await called(gateway, session, "bash", command="head -c 1000000 /dev/zero")
    assert [len(one.references) for one in (first, second, small, third)] == [1, 0, 1, 1]
    assert second.notes[-1].startswith("stdout could not be stored (1,000,000 bytes do not fit")


async def test_full_gateway_refuses_whoever_comes(state_dir: Path) -> None:
    async with running(state_dir, store={"size": "1MiB"}, offload=ALWAYS) as gateway:
        one, other = await opened(gateway), await opened(gateway)
        assert (await called(gateway, one, "bash", command="head -c 900000 /dev/zero")).references
        assert not (await called(gateway, other, "bash", command="head -c 900000 /dev/zero")).references
    async with running(state_dir, store={"size": "1MiB"}, offload=ALWAYS) as gateway:
        session = await opened(gateway)
        assert not (await called(gateway, session, "bash", command="head -c 900000 /dev/zero")).references


async def test_oldest_results_go_where_the_operator_says_so(state_dir: Path) -> None:
    """A session's own first, and whoever asks for one that is gone is told."""
    async with running(
        state_dir, profiles=profile("2MiB"), store={"size": "3MiB", "when_full": "oldest"}, offload=ALWAYS
    ) as gateway:
        one, other = await opened(gateway), await opened(gateway)
        first = await called(gateway, one, "bash", command="head -c 900000 /dev/zero")
        for session in (one, one, other, other):
            await called(gateway, session, "bash", command="head -c 900000 /dev/zero")
        kept = [[row.key for row in await gateway.journal.results(session.id)] for session in (one, other)]
        assert kept == [["0003-bash-stdout"], ["0001-bash-stdout", "0002-bash-stdout"]]
        assert [entry.key for entry in await gateway.results.list(one.id)] == ["0003-bash-stdout"]
        with pytest.raises(Gone):
            await SessionResults(one.id, gateway.shelf).find(first.references[0].reference)


async def test_calls_that_end_together_share_what_is_left(state_dir: Path) -> None:
    async with running(state_dir, profiles=profile("3MiB"), offload=ALWAYS) as gateway:
        session = await opened(gateway)
        results = []

        async def call() -> None:
            results.append(await called(gateway, session, "bash", command="head -c 1000000 /dev/zero"))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(call)
        assert sum(len(one.references) for one in results) == 3
        assert gateway.shelf.used(session.id) == 3_000_000


async def test_what_was_stored_and_never_indexed_goes_at_close(state_dir: Path) -> None:
    """A44."""
    async with running(state_dir, offload=ALWAYS) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="echo hi")
        await gateway.results.put(session.id, "0002-bash-stdout", b"nobody knows this", "text/plain")
        await gateway.close_session(session)
        assert [one.key for one in await gateway.results.list(session.id)] == ["0001-bash-stdout"]


async def test_expired_results_are_deleted_and_free_their_room(state_dir: Path) -> None:
    """seed-facts 12 row 24."""
    async with running(state_dir, store={"retention_hours": 1e-7}, offload=ALWAYS) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "bash", command="echo hi")
        await gateway.shelf.delete_expired()
        assert (await gateway.results.list(session.id), gateway.shelf.used(session.id)) == ((), 0)


@pytest.mark.needs("root")
async def test_full_disk_leaves_the_result_and_nothing_half_written(state_dir: Path, tmp_path: Path) -> None:
    """A43: what does not fit the store's disk is told as that, and what fits is stored after it."""
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=True)
    try:
        async with running(state_dir, store={"uri": str(place / "results")}, offload=ALWAYS) as gateway:
            session = await opened(gateway)
            large = await called(gateway, session, "bash", command="head -c 5000000 /dev/zero")
            small = await called(gateway, session, "bash", command="head -c 1500000 /dev/zero")
            assert [row.bytes for row in await gateway.journal.results(session.id)] == [1_500_000]
    finally:
        subprocess.run(["umount", place], check=True)
    assert (large.status, large.references, len(small.references)) == ("ok", (), 1)
    assert "disk full" in large.notes[-1]
