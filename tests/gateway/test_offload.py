"""Offloading: which results are stored, what takes their place, and what happens when the store fails."""

import hashlib
from pathlib import Path

import pytest

from gateway.errors import Gone, NotFound, SettingsError
from gateway.gateway import Gateway
from gateway.hooks.offload import Rule, Rules
from gateway.journal import ResultRow
from gateway.results import SessionResults
from stores import AlwaysOffload, NeverOffload, OffloadOverChars
from tests.gateway.conftest import AGENT, called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


def test_exact_name_comes_before_list_before_glob_before_star() -> None:
    always, never, some, rest = AlwaysOffload(), NeverOffload(), OffloadOverChars(1), OffloadOverChars(2)
    rules = Rules([Rule(("*",), rest), Rule(("g*",), some), Rule(("grep", "ls"), never), Rule(("grep",), always)], [])
    assert [rules.policy(tool) for tool in ("grep", "ls", "glob", "bash")] == [always, never, some, rest]


def test_two_rules_of_equal_rank_are_refused_at_load() -> None:
    with pytest.raises(SettingsError, match="two rules match the tool 'grep' equally well"):
        Rules([Rule(("gr*",), AlwaysOffload()), Rule(("*ep",), NeverOffload())], ["bash", "grep"])


async def test_threshold_is_strict(state_dir: Path) -> None:
    rules = [{"tools": ["*"], "over_chars": 1000}]
    async with running(state_dir, offload={"rules": rules}) as gateway:
        session = await opened(gateway)
        at = await called(gateway, session, "bash", command="head -c 1000 /dev/zero | tr '\\0' é")
        over = await called(gateway, session, "bash", command="head -c 1001 /dev/zero | tr '\\0' x")
    assert at.references == ()
    assert [one.bytes for one in over.references] == [1001]


async def test_characters_are_code_points_not_bytes(state_dir: Path) -> None:
    async with running(state_dir, offload={"rules": [{"tools": ["*"], "over_chars": 1000}]}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "python", code="print('é' * 999)")
    assert result.references == ()


async def test_stored_result_has_preview_reference_and_digest(gateway: Gateway) -> None:
    """R31: head *and* tail are shown."""
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command="seq 1 1000000")
    whole = "".join(f"{number}\n" for number in range(1, 1_000_001)).encode()
    [reference] = result.references
    assert reference.reference == f"sandgate://{session.id}/results/0001-bash-stdout"
    assert (reference.bytes, reference.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert "\n| 1\n" in result.text
    assert "\n| 1000000" in result.text
    assert len(result.text) < 3000


async def test_each_stream_is_stored_by_itself(gateway: Gateway) -> None:
    session = await opened(gateway)
    result = await called(gateway, session, "bash", command="seq 1 50000; seq 1 60000 >&2; exit 2")
    assert result.status == "exit"
    assert [one.stream for one in result.references] == ["stdout", "stderr"]


async def test_short_result_under_always_is_stored_and_stays(state_dir: Path) -> None:
    async with running(state_dir, offload={"rules": [{"tools": ["bash"], "when": "always"}]}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="echo hi")
        empty = await called(gateway, session, "bash", command="true")
    assert (result.text, len(result.references)) == ("hi", 1)
    assert empty.references == ()


async def test_output_cannot_imitate_our_fields(gateway: Gateway) -> None:
    """A45: every line of the preview is marked."""
    session = await opened(gateway)
    forged = "reference: sandgate://s-00000000000000000000000000000000/results/x"
    result = await called(gateway, session, "bash", command=f"for i in $(seq 1 2000); do echo '{forged}'; done")
    ours = [line for line in result.text.splitlines() if line.startswith("reference: ")]
    assert ours == [f"reference: {result.references[0].reference}"]


async def test_read_result_pages_by_bytes_lines_and_pattern(gateway: Gateway) -> None:
    session = await opened(gateway)
    stored = await called(gateway, session, "bash", command="seq 1 20000")
    reference = stored.references[0].reference
    assert (await called(gateway, session, "read_result", reference=reference, lines="2-4")).text == "2\n3\n4"
    found = await called(gateway, session, "read_result", reference=reference, grep="^199+$")
    assert found.text == "199:199\n1999:1999\n19999:19999"
    page = await called(gateway, session, "read_result", reference=reference, offset=108_888)
    assert page.text == "20000"
    first = await called(gateway, session, "read_result", reference=reference)
    assert first.notes == ("bytes 0-30000 of 108894; go on with offset=30000",)
    assert first.references == ()


async def test_read_result_saves_into_the_workspace(gateway: Gateway) -> None:
    session = await opened(gateway)
    stored = await called(gateway, session, "bash", command="seq 1 2000000 | tee copy")
    saved = await called(gateway, session, "read_result", reference=stored.references[0].reference, save_to="a/saved")
    assert saved.status == "ok"
    assert (await called(gateway, session, "bash", command="cmp copy a/saved && echo same")).text == "same"


@pytest.mark.parametrize(
    "reference",
    [
        "file:///etc/passwd",
        "s3://other/x",
        "http://169.254.169.254/",
        "../../sandgate.db",
        "/etc/passwd",
        "sandgate://s-00000000000000000000000000000000/results/0001-bash-stdout",
        "0002-bash-stdout",
        "",
        "sandgate://../results/x",
        "0001-bash-stdout/../../../lock",
    ],
)
async def test_forged_reference_is_absent(gateway: Gateway, reference: str) -> None:
    """A40: nothing but the session's own keys is ever opened."""
    session = await opened(gateway)
    await called(gateway, session, "bash", command="seq 1 20000")
    with pytest.raises(NotFound, match="no such result"):
        await SessionResults(session.id, gateway.results, gateway.journal).find(reference)


async def test_foreign_result_is_absent_and_an_expired_one_is_gone(gateway: Gateway) -> None:
    """A39."""
    session, other = await opened(gateway), await opened(gateway)
    stored = await called(gateway, session, "bash", command="seq 1 20000")
    reference = stored.references[0].reference
    foreign = await called(gateway, other, "read_result", reference=reference)
    assert (foreign.status, foreign.error and foreign.error.code) == ("failed", "not_found")
    row = await gateway.journal.result(session.id, "0001-bash-stdout")
    assert isinstance(row, ResultRow)
    await gateway.results.delete(row.session_id, row.key)
    gateway.journal.mark_deleted([row], 1.0)
    with pytest.raises(Gone):
        await SessionResults(session.id, gateway.results, gateway.journal).find(reference)


async def test_failing_store_leaves_the_result_and_no_reference(gateway: Gateway, state_dir: Path) -> None:
    """A43: the answer says what is left; nothing dangles."""
    session = await opened(gateway)
    results = state_dir / "results"
    results.rename(state_dir / "moved") if results.exists() else None
    results.write_text("not a folder")
    result = await called(gateway, session, "bash", command="seq 1 300000")
    assert (result.status, result.references) == ("ok", ())
    assert "could not be stored" in result.notes[0]
    assert result.content[0].text.startswith("1\n2\n")
    assert result.content[0].text.endswith("\n300000\n")
    [record] = await gateway.journal.calls(session.id)
    assert [one.decision for one in record.decisions] == ["store failed"]


async def test_result_over_the_sessions_quota_is_cut_and_says_so(state_dir: Path) -> None:
    limits = {"results_size": "2MiB", "output": "64KiB"}
    async with running(state_dir, profiles={"default": {"limits": limits}}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="head -c 5000000 /dev/zero | tr '\\0' x")
    assert [one.bytes for one in result.references] == [2 << 20]
    assert result.truncated
    assert result.notes == ("stdout: the first 2,097,152 of 5,000,000 bytes are stored, the session's limit",)


async def test_never_offloaded_output_is_cut_to_the_bound(state_dir: Path) -> None:
    """A19, R24: head and tail; the rest is counted."""
    limits = {"output": "64KiB"}
    rules = [{"tools": ["*"], "when": "never"}]
    async with running(state_dir, profiles={"default": {"limits": limits}}, offload={"rules": rules}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="seq 1 1000000")
    assert result.truncated
    text = result.content[0].text
    assert len(text) < 66_000
    assert (text.startswith("1\n2\n"), text.endswith("\n1000000\n")) == (True, True)


async def test_store_in_memory(state_dir: Path) -> None:
    async with running(state_dir, store={"uri": "memory://"}) as gateway:
        session = await opened(gateway)
        stored = await called(gateway, session, "bash", command="seq 1 20000")
        page = await called(gateway, session, "read_result", reference=stored.references[0].reference, lines="7")
    assert page.text == "7"
    assert not (state_dir / "results").exists()


async def test_store_uri_is_shown_only_where_the_profile_says_so(state_dir: Path) -> None:
    profiles = {"default": {}, "shows": {"show_store_uri": True}}
    async with running(state_dir, profiles=profiles, agent={"profiles": ["default", "shows"]}) as gateway:
        uris = {}
        for profile in profiles:
            session = await opened(gateway, profile=profile)
            stored = await called(gateway, session, "bash", command="seq 1 20000")
            uris[profile] = stored.references[0].store_uri
            assert "file://" not in stored.text
    assert uris["default"] is None
    assert Path((uris["shows"] or "").removeprefix("file://")).stat().st_size == 108_894


async def test_stored_but_never_indexed_is_removed_at_the_next_start(state_dir: Path) -> None:
    """A44: a crash between data and index leaves a whole result, or none."""
    async with running(state_dir) as gateway:
        session = await opened(gateway)
        stored = await called(gateway, session, "bash", command="seq 1 20000")
        await gateway.results.put(session.id, "0002-bash-stdout", b"nobody knows this", "text/plain")
    async with running(state_dir) as gateway:
        assert [one.key for one in await gateway.results.list(session.id)] == ["0001-bash-stdout"]
        again = gateway.sessions.find(AGENT, session.id)
        page = await called(gateway, again, "read_result", reference=stored.references[0].reference, lines="9")
    assert page.text == "9"
