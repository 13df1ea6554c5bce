"""Offloading: which results are stored, what takes their place, and what happens when the store fails."""

import hashlib
import json
from pathlib import Path

import pytest

from gateway.errors import Gone, NotFound, SettingsError
from gateway.gateway import Gateway
from gateway.hooks.hook import Continue, Hook, HookContext
from gateway.hooks.offload import Rule, Rules
from gateway.journal import ResultRow
from gateway.models import CallRequest, ToolResult
from gateway.results import SessionResults
from stores import AlwaysOffload, Measured, NeverOffload, OffloadOverChars
from tests.gateway.conftest import AGENT, called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


def test_exact_name_comes_before_list_before_glob_before_star() -> None:
    """seed-facts 12 row 4."""
    always, never, some, rest = AlwaysOffload(), NeverOffload(), OffloadOverChars(1), OffloadOverChars(2)
    rules = Rules([Rule(("*",), rest), Rule(("g*",), some), Rule(("grep", "ls"), never), Rule(("grep",), always)], [])
    assert [rules.policy(tool) for tool in ("grep", "ls", "glob", "bash")] == [always, never, some, rest]


def test_two_rules_of_equal_rank_are_refused_at_load() -> None:
    """seed-facts 12 row 4."""
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
    """seed-facts 12 row 20."""
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
    """seed-facts 12 row 21."""
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
        "0001-BASH-stdout",
        "0001-bash-stdout ",
        "0001-bash-stdout\n",
        "0001-bash-\uff53tdout",
        "0001-bash-stdout\u200b",
        "%30001-bash-stdout",
        "SANDGATE://{own}/results/0001-bash-stdout",
        "sandgate://{OWN}/results/0001-bash-stdout",
        "sandgate://{own}/RESULTS/0001-bash-stdout",
        "sandgate://{own}@evil/results/0001-bash-stdout",
    ],
)
async def test_forged_reference_is_absent(gateway: Gateway, reference: str) -> None:
    """A40: nothing but the session's own keys is ever opened, spelled just as they are."""
    session = await opened(gateway)
    await called(gateway, session, "bash", command="seq 1 20000")
    reference = reference.replace("{own}", session.id).replace("{OWN}", session.id.upper())
    with pytest.raises(NotFound, match="no such result"):
        await SessionResults(session.id, gateway.shelf).find(reference)


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
        await SessionResults(session.id, gateway.shelf).find(reference)


async def test_failing_store_leaves_the_result_and_no_reference(gateway: Gateway, state_dir: Path) -> None:
    """seed-facts 12 row 23. A43: the answer says what is left; nothing dangles."""
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


async def test_image_is_a_block_and_is_stored_where_its_policy_says(state_dir: Path, tmp_path: Path) -> None:
    """R75: content blocks are offloaded too, byte for byte."""
    (tmp_path / "my_media.py").write_text(
        "import base64\nfrom gateway.models import MediaBlock\n\n"
        "def shot(size: int) -> MediaBlock:\n"
        '    """Take a picture."""\n'
        "    data = base64.b64encode(bytes(range(256)) * size).decode()\n"
        '    return MediaBlock(type="image", data=data, mimeType="image/png")\n'
    )
    async with running(state_dir, tmp_path, tools=[{"use": "my_media:shot"}]) as gateway:
        session = await opened(gateway)
        small = await called(gateway, session, "shot", size=4)
        large = await called(gateway, session, "shot", size=400)
        content = b"".join([chunk async for chunk in gateway.results.read(session.id, "0002-shot-media_1")])
    assert (small.content[0].type, small.text, small.references) == ("image", "[image: 1,024 bytes of image/png]", ())
    [reference] = large.references
    assert (reference.stream, reference.bytes, reference.media_type) == ("media", 102_400, "image/png")
    assert content == bytes(range(256)) * 400
    assert large.content[0].type == "text"
    assert large.text.startswith("output stored: 102,400 bytes of image/png (media_1)\nreference: sandgate://")
    assert "preview" not in large.text


async def test_image_file_is_read_as_an_image(gateway: Gateway) -> None:
    session = await opened(gateway)
    await called(gateway, session, "bash", command=r"printf '\x89PNG\r\n\x1a\n\x00\x01' > a.png; seq 1 9 > a.gif")
    image = await called(gateway, session, "read_file", file_path="a.png")
    assert [(one.type, one.text) for one in image.content] == [("image", "[image: 10 bytes of image/png]")]
    assert (await called(gateway, session, "read_file", file_path="a.gif")).text.startswith("     1\t1\n")


async def test_image_over_the_bound_that_no_rule_stores_is_left_out(state_dir: Path) -> None:
    async with running(state_dir, profiles={"default": {"limits": {"output": "64KiB"}}}) as gateway:
        session = await opened(gateway)
        await called(gateway, session, "python", code="open('a', 'wb').write(b'GIF89a' + bytes(100_000))")
        result = await called(gateway, session, "read_file", file_path="a")
    assert (result.text, result.truncated) == ("[image: 100,006 bytes of image/gif] left out: over 65,536 bytes", True)


class Structured(Hook):
    """Gives every result a large structured content."""

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        return Continue(result=result.model_copy(update={"structured": {"rows": list(range(20_000))}}))


async def test_structured_content_is_stored_as_json(state_dir: Path, tmp_path: Path) -> None:
    """R75."""
    hooks = [{"use": f"{__name__}:Structured", "tools": ["bash"]}]
    async with running(state_dir, tmp_path, hooks=hooks) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="echo hi")
        content = b"".join([chunk async for chunk in gateway.results.read(session.id, "0001-bash-structured")])
    [reference] = result.references
    assert (reference.stream, reference.media_type, result.structured) == ("structured", "application/json", None)
    assert json.loads(content) == {"rows": list(range(20_000))}
    assert result.text.startswith("hi\noutput stored: ")


@pytest.mark.parametrize(
    ("rule", "command", "stored"),
    [
        ({"over_bytes": 1000}, "head -c 1000 /dev/zero | tr '\\0' x", []),
        ({"over_bytes": 1000}, "head -c 1001 /dev/zero | tr '\\0' x", [1001]),
        ({"over_lines": 10}, "seq 1 10", []),
        ({"over_lines": 10}, "seq 1 11", [24]),
        ({"use": f"{__name__}:Whatever"}, "echo hi", []),
        ({"use": f"{__name__}:Whatever"}, "echo store me", [9]),
    ],
)
async def test_policies_of_the_configuration(
    state_dir: Path, tmp_path: Path, rule: dict[str, object], command: str, stored: list[int]
) -> None:
    """R71: by characters, bytes, lines, or by a stranger's code, which gets the context that hooks get."""
    async with running(state_dir, tmp_path, offload={"rules": [{"tools": ["*"], **rule}]}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command=command)
    assert [one.bytes for one in result.references] == stored


class Whatever:
    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        assert isinstance(ctx, HookContext)
        return "store me" in str(ctx.call.arguments["command"])


class Broken:
    def should_offload(self, tool: str, result: Measured, ctx: object) -> bool:
        raise RuntimeError("canary")


async def test_broken_policy_leaves_the_result_and_is_told(state_dir: Path, tmp_path: Path) -> None:
    rules = [{"tools": ["*"], "use": f"{__name__}:Broken"}]
    async with running(state_dir, tmp_path, offload={"rules": rules}) as gateway:
        session = await opened(gateway)
        result = await called(gateway, session, "bash", command="echo hi")
        [record] = await gateway.journal.calls(session.id)
    assert (result.status, result.content[0].text, result.references) == ("ok", "hi\n", ())
    assert "its policy is broken" in result.notes[0]
    assert [(one.decision, one.reason) for one in record.decisions] == [("policy failed", "RuntimeError")]


async def test_pointer_names_only_tools_that_the_session_has(gateway: Gateway) -> None:
    """R75: the notice matches what is offered."""
    with_reading, without = await opened(gateway), await opened(gateway, tools=["bash"])
    texts = [(await called(gateway, one, "bash", command="seq 1 20000")).text for one in (with_reading, without)]
    assert ["read_result" in text for text in texts] == [True, False]


async def test_pointer_is_not_stored_again(state_dir: Path) -> None:
    """seed-facts 12 row 20."""
    async with running(state_dir, offload={"rules": [{"tools": ["*"], "when": "always"}]}) as gateway:
        session = await opened(gateway)
        first = await called(gateway, session, "bash", command="seq 1 20000")
        await called(gateway, session, "write_file", file_path="pointer", content=first.text)
        again = await called(gateway, session, "bash", command="cat pointer")
        forged = await called(gateway, session, "bash", command="cat pointer; seq 1 20000")
    assert (again.references, again.text) == ((), first.text)
    assert len(forged.references) == 1


@pytest.mark.parametrize(
    ("code", "content", "media_type"),
    [
        (
            "sys.stdout.buffer.write(b'abc\\xc3\\xa9\\n' * 20000)",
            b"abc\xc3\xa9\n" * 20_000,
            "text/plain; charset=utf-8",
        ),
        ("sys.stdout.buffer.write(b'\\0\\xff' * 50000)", b"\0\xff" * 50_000, "application/octet-stream"),
    ],
)
async def test_bytes_come_back_as_they_were(gateway: Gateway, code: str, content: bytes, media_type: str) -> None:
    """seed-facts 12 row 22: the media type is recorded, and nothing is guessed on reading."""
    session = await opened(gateway)
    result = await called(gateway, session, "python", code=f"import sys; {code}")
    [reference] = result.references
    found = SessionResults(session.id, gateway.shelf).read(reference.reference)
    assert b"".join([chunk async for chunk in found]) == content
    assert reference.media_type == media_type
    await called(gateway, session, "read_result", reference=reference.reference, save_to="copy")
    done = await called(gateway, session, "bash", command="sha256sum < copy")
    assert done.text.split()[0] == reference.sha256


async def test_hostile_call_ids_and_equal_ones_disturb_nothing(gateway: Gateway) -> None:
    """R71, R72: keys are ours; what the caller calls its calls is in none of them."""
    session = await opened(gateway)
    for call_id in ("x" * 1500, "../../etc/passwd", "a/b", "same", "same", "\u202e\u0000", ""):
        request = CallRequest(tool="bash", arguments={"command": "seq 1 20000"}, call_id=call_id)
        result = await (await gateway.start_call(session, request)).wait()
        assert (result.status, result.call_id, len(result.references)) == ("ok", call_id, 1)
    assert len({one.key for one in await gateway.results.list(session.id)}) == 7
