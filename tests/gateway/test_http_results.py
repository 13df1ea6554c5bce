"""Stored results over HTTP: the list, byte ranges, pages; and what the answers that refuse carry in their headers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

NUMBERS = "".join(f"{i}\n" for i in range(1, 20001)).encode()


async def stored(server: Served) -> tuple[dict[str, Any], str]:
    """The reference of `NUMBERS`, and the route of its session's results."""
    session = await server.session()
    result = await server.call(session, "bash", command="seq 1 20000")
    return result["references"][0], f"/v1/sessions/{session['id']}/results"


async def test_list_says_what_is_stored_since_when_and_until_when(server: Served) -> None:
    reference, route = await stored(server)
    [entry] = (await server.agent.get(route)).json()["results"]
    created, expires = entry.pop("created"), entry.pop("expires")
    assert entry == reference
    session = (await server.agent.get(route.removesuffix("/results"))).json()
    assert session["created"] <= created <= session["last_used"] + 10
    assert expires - created == pytest.approx(24 * 3600)


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-3", 0, 4),
        ("bytes=10-", 10, len(NUMBERS)),
        ("bytes=-5", len(NUMBERS) - 5, len(NUMBERS)),
        ("bytes=5-999999999", 5, len(NUMBERS)),
    ],
)
async def test_range_is_answered_with_its_place(server: Served, wanted: str, start: int, end: int) -> None:
    reference, route = await stored(server)
    answer = await server.agent.get(f"{route}/{reference['reference'].rpartition('/')[2]}", headers={"range": wanted})
    assert (answer.status_code, answer.content) == (206, NUMBERS[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(NUMBERS)}"


@pytest.mark.parametrize("wanted", ["bytes={size}-", "bytes={size}-{size}", "bytes=9-3", "bytes=-0"])
async def test_range_outside_is_416_and_says_the_size(server: Served, wanted: str) -> None:
    """RFC 9110, 15.5.17."""
    reference, route = await stored(server)
    answer = await server.agent.get(
        f"{route}/{reference['reference'].rpartition('/')[2]}",
        headers={"range": wanted.replace("{size}", str(len(NUMBERS)))},
    )
    assert (answer.status_code, answer.json()["code"]) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{len(NUMBERS)}"


async def test_pages_are_lines_or_matches(server: Served) -> None:
    reference, route = await stored(server)
    url = f"{route}/{reference['reference'].rpartition('/')[2]}"
    pages = [(await server.agent.get(url, params=one)).json() for one in ({"lines": "2-4"}, {"grep": "^1999[89]$"})]
    assert pages == [
        {"text": "2\n3\n4", "truncated": False},
        {"text": "19998:19998\n19999:19999\n", "truncated": False},
    ]


@pytest.mark.parametrize(
    ("headers", "detail"),
    [
        ({}, "a token is needed"),
        ({"authorization": "Basic dXNlcjpwYXNz"}, "a token is needed"),
        ({"authorization": "Bearer wrong"}, "this token is not known"),
    ],
)
async def test_refusal_without_a_known_token_says_which(server: Served, headers: dict[str, str], detail: str) -> None:
    answer = await server.anonymous.get("/v1/sessions", headers=headers)
    assert (answer.status_code, answer.json()["detail"]) == (401, detail)
    assert "`sandgate token agent`" in answer.json()["remedy"]
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_full_gateway_says_when_to_come_back(state_dir: Path) -> None:
    async with served(state_dir, server={"sessions": 1}) as server:
        await server.session()
        answer = await server.agent.post("/v1/sessions", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert "www-authenticate" not in answer.headers


async def test_no_line_of_a_stream_is_over_a_mebibyte(state_dir: Path) -> None:
    """R77: readers drop a stream whose lines are longer; what is left out is said."""
    rules = [{"tools": ["*"], "when": "never"}]
    async with served(state_dir, offload={"rules": rules}) as server:
        session = await server.session()
        body = {"tool": "bash", "arguments": {"command": "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2"}}
        async with server.agent.stream(
            "POST", f"/v1/sessions/{session['id']}/calls", json=body, headers={"accept": "text/event-stream"}
        ) as answer:
            lines = [line async for line in answer.aiter_lines()]
    assert max(len(line.encode()) for line in lines) <= 1 << 20
    result = json.loads(lines[lines.index("event: result") + 1].removeprefix("data: "))
    assert (result["status"], result["truncated"]) == ("ok", True)
    assert "cut to fit one event" in result["notes"][-1]
