"""Signed URLs: one result without a token, until they expire, are revoked, or the result goes."""

import time
from pathlib import Path
from typing import Any

import pytest

from gateway.client import Client, Gone, NotFound, Refused
from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

NUMBERS = "".join(f"{i}\n" for i in range(1, 20001)).encode()


@pytest.fixture
async def session(server: Served) -> dict[str, Any]:
    """With one stored result, `0001-bash-stdout`."""
    session = await server.session()
    await server.call(session, "bash", command="seq 1 20000")
    return session


async def url_of(server: Served, session: dict[str, Any], **more: Any) -> dict[str, Any]:
    async with server.client(session["token"]) as client:
        answer = await client.post(f"/v1/sessions/{session['id']}/urls", json={"reference": "0001-bash-stdout", **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_url_reads_its_result_without_a_token(server: Served, session: dict[str, Any]) -> None:
    made = await url_of(server, session)
    whole = await server.anonymous.get(made["url"])
    part = await server.anonymous.get(made["url"], headers={"range": "bytes=0-3"})
    assert (whole.status_code, whole.content == NUMBERS, part.status_code, part.content) == (200, True, 206, b"1\n2\n")
    assert whole.headers["content-disposition"] == 'attachment; filename="0001-bash-stdout"'
    assert "sandbox" in whole.headers["content-security-policy"]
    assert made["expires"] == pytest.approx(time.time() + 3600, abs=60)
    again = await server.anonymous.get(made["url"], headers={"if-none-match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_url_that_was_not_signed_here_is_absent(server: Served, session: dict[str, Any]) -> None:
    """A40."""
    url: str = (await url_of(server, session))["url"]
    body, _, signature = url.rpartition(".")
    for forged in (f"{body}.{signature[::-1]}", f"{body[:-1]}A.{signature}", url[:-1], f"{server.url}/v1/signed/x"):
        assert (await server.anonymous.get(forged)).status_code == 404


async def test_url_ends_with_its_time_by_revoking_and_with_its_result(server: Served, session: dict[str, Any]) -> None:
    base = f"/v1/sessions/{session['id']}"
    short = (await url_of(server, session, seconds=1))["url"]
    while (answer := await server.anonymous.get(short)).status_code == 200:
        pass
    assert (answer.status_code, answer.json()["detail"]) == (410, "this link has expired")
    revoked = (await url_of(server, session))["url"]
    assert (await server.agent.delete(f"{base}/urls")).status_code == 204
    assert (await server.anonymous.get(revoked)).json()["detail"] == "this link was revoked"
    left = (await url_of(server, session))["url"]
    assert (await server.anonymous.get(left)).status_code == 200
    assert (await server.agent.delete(f"{base}/results/0001-bash-stdout")).status_code == 204
    assert (await server.anonymous.get(left)).status_code == 410
    assert (await server.agent.get(f"{base}/results/0001-bash-stdout")).status_code == 410


async def test_url_outlives_its_session_and_a_restart(state_dir: Path) -> None:
    async with served(state_dir) as server:
        session = await server.session()
        await server.call(session, "bash", command="seq 1 20000")
        await server.agent.delete(f"/v1/sessions/{session['id']}")
        path = (await url_of(server, session))["url"].removeprefix(server.url)
    async with served(state_dir) as server:
        assert (await server.anonymous.get(path)).content == NUMBERS


async def test_url_of_another_session_is_not_made(server: Served, session: dict[str, Any]) -> None:
    """A39, R76: a session of the same user signs nothing of this one."""
    other = await server.session()
    foreign = f"sandgate://{session['id']}/results/0001-bash-stdout"
    async with server.client(other["token"]) as client:
        for id in (other["id"], session["id"]):
            answer = await client.post(f"/v1/sessions/{id}/urls", json={"reference": foreign})
            assert answer.status_code == 404


async def test_client_makes_revokes_and_deletes(server: Served, session: dict[str, Any]) -> None:
    async with Client(server.url, session["token"]) as client:
        mine = await client.attach(session["id"])
        made = await mine.signed_url("0001-bash-stdout", seconds=60)
        assert (await server.anonymous.get(made.url)).content == NUMBERS
        await mine.revoke_urls()
        assert (await server.anonymous.get(made.url)).status_code == 410
        with pytest.raises(Refused, match="seconds"):
            await mine.signed_url("0001-bash-stdout", seconds=8 * 86400)
        await mine.delete_result("0001-bash-stdout")
        with pytest.raises(Gone):
            await mine.read_result("0001-bash-stdout")
        with pytest.raises(NotFound):
            await mine.delete_result("0002-bash-stdout")
        assert await mine.results() == ()
