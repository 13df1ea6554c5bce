"""Haystack's own hook and agent with our store: seed-facts 2 (the protocol, per-run override, collisions, binary)."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from haystack.components.agents import Agent
from haystack.components.agents.state import State
from haystack.dataclasses import ChatMessage, ImageContent, TextContent, ToolCall
from haystack.hooks.tool_result_offloading import AlwaysOffload, OffloadOverChars, ToolResultOffloadHook
from haystack.hooks.tool_result_offloading.types import ToolResultStore
from haystack.tools import tool

from stores import KeyRefused, NotFound
from stores.haystack import HaystackResultStore
from tests.stores.conftest import KINDS
from tests.stores.servers import S3, Sftp


@dataclass
class Place:
    """A URI and its options; what is opened there is closed at the end."""

    uri: str
    options: dict[str, Any] = field(default_factory=dict)
    opened: list[HaystackResultStore] = field(default_factory=list)

    def store(self, scope: str = "run-1") -> HaystackResultStore:
        self.opened.append(HaystackResultStore(self.uri, scope, self.options))
        return self.opened[-1]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """On each kind of store."""
    match request.param:
        case "s3":
            s3: S3 = request.getfixturevalue("s3")
            place = Place(s3.uri(), s3.options())
        case "sftp":
            sftp: Sftp = request.getfixturevalue("sftp")
            place = Place(sftp.uri())
        case "memory":
            place = Place("memory://root")
        case _:
            place = Place(f"file://{tmp_path}/root")
    yield place
    for store in place.opened:
        store.close()


def results(*contents: Any, id: str | None = "id1") -> State:
    """The state of an agent after a step whose tool `big` gave these."""
    messages = [ChatMessage.from_tool(one, origin=ToolCall("big", {}, id=id)) for one in contents]
    state = State(schema={"hook_context": {"type": dict}, "step_count": {"type": int}}, data={"step_count": 0})
    state.set("messages", messages)
    return state


def references(state: State) -> list[str]:
    return [one for message in state.get("messages") for one in message.meta.get("tool_result_offloaded", [])]


def test_store_has_what_the_protocol_asks_for() -> None:
    members = {name for name in vars(ToolResultStore) if not name.startswith("_")}
    assert members <= set(dir(HaystackResultStore))


def test_hook_offloads_to_the_store(place: Place) -> None:
    store, state = place.store(), results("x" * 5000)
    ToolResultOffloadHook(store=store, offload_strategies={"*": OffloadOverChars(4999)}).run(state)
    [reference] = references(state)
    assert store.read(reference) == "x" * 5000
    assert reference in state.get("messages")[0].tool_call_result.result


def test_equal_keys_overwrite_nothing(place: Place) -> None:
    """seed-facts 2.3: the same call id twice in one step lost the first result."""
    store, state = place.store(), results("first", "second")
    ToolResultOffloadHook(store=store, offload_strategies={"*": AlwaysOffload()}).run(state)
    assert [store.read(one) for one in references(state)] == ["first", "second"]


@pytest.mark.parametrize("id", ["../../x", "a/b", "/etc/passwd", "x" * 1500, "\u202e\n", None])
def test_hostile_call_ids_stay_in_the_store(tmp_path: Path, id: str | None) -> None:
    """R72."""
    store, state = HaystackResultStore(f"file://{tmp_path}/root", "run-1"), results("output", id=id)
    ToolResultOffloadHook(store=store, offload_strategies={"*": AlwaysOffload()}).run(state)
    [reference] = references(state)
    assert reference.startswith(f"file://{tmp_path}/root/run-1/text/")
    assert store.read(reference) == "output"


def test_text_and_bytes_keep_their_type(place: Place) -> None:
    """seed-facts 2.6: bytes that are valid UTF-8 came back as text."""
    store = place.store()
    for content in ("text", b"bytes that are text", b"\x00\xff", "", b"", "\ud800"):
        assert store.read(store.write(key="k", content=content)) == content


def test_image_and_text_go_to_entries_of_their_own(place: Place) -> None:
    store = place.store()
    image = ImageContent(base64_image=base64.b64encode(b"\x89PNG not really").decode(), mime_type="image/png")
    state = results([TextContent("some text"), image])
    ToolResultOffloadHook(store=store, offload_strategies={"*": AlwaysOffload()}).run(state)
    assert sorted((store.read(one) for one in references(state)), key=str) == ["some text", b"\x89PNG not really"][::-1]


def test_run_may_bring_its_own_store(place: Place, tmp_path: Path) -> None:
    """seed-facts 2.1: one hook for all runs, each with its scope; the shared root is not even made."""
    shared = HaystackResultStore(f"file://{tmp_path}/shared", "nobody")
    hook = ToolResultOffloadHook(store=shared, offload_strategies={"*": AlwaysOffload()})
    one, other = place.store("run-1"), place.store("run-2")
    read = []
    for store in (one, other):
        state = results(f"of {store._scope}")
        state.set("hook_context", {"tool_result_store": store})
        hook.run(state)
        [reference] = references(state)
        read.append((store.read(reference), reference))
    assert [content for content, _ in read] == ["of run-1", "of run-2"]
    with pytest.raises(KeyRefused):
        one.read(read[1][1])
    assert not (tmp_path / "shared").exists()


def test_foreign_and_forged_references_are_refused(tmp_path: Path) -> None:
    """A40."""
    (tmp_path / "secret").write_text("secret")
    store = HaystackResultStore(f"file://{tmp_path}/root", "run-1")
    good = store.write(key="k", content="x")
    for forged in (
        f"file://{tmp_path}/secret",
        f"{tmp_path}/secret",
        good.replace("/run-1/text/", "/run-1/text/../../../"),
        good.replace("run-1", "run-2"),
        "",
        "/etc/passwd",
        "s3://bucket/x",
    ):
        with pytest.raises(KeyRefused):
            store.read(forged)
    with pytest.raises(NotFound):
        store.read(good + "x")


def test_hook_is_written_down_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAYSTACK_DESERIALIZATION_ALLOWLIST", "stores.haystack")
    store = HaystackResultStore(f"file://{tmp_path}/root", "run-1")
    hook = ToolResultOffloadHook(store=store, offload_strategies={"*": AlwaysOffload()})
    reference = store.write(key="k", content="x")
    again = ToolResultOffloadHook.from_dict(hook.to_dict())
    assert isinstance(again.store, HaystackResultStore)
    assert again.store.read(reference) == "x"
    with pytest.raises(ValueError, match="environment"):
        HaystackResultStore("s3://bucket/x", "s", {"key": "k", "secret": "canary"}).to_dict()


@tool
def big() -> str:
    """Give much."""
    return "line\n" * 2000


class Scripted:
    """A chat generator that calls the tool once, and then says what it was given."""

    def run(self, messages: list[ChatMessage], tools: Any = None, **_: Any) -> dict[str, Any]:
        last = messages[-1]
        if last.tool_call_result is None:
            return {"replies": [ChatMessage.from_assistant(tool_calls=[ToolCall("big", {}, id="call-1")])]}
        return {"replies": [ChatMessage.from_assistant(f"got: {last.tool_call_result.result}")]}


def test_agent_sees_the_pointer_and_not_the_result(tmp_path: Path) -> None:
    store = HaystackResultStore(f"file://{tmp_path}/root", "run-1")
    hook = ToolResultOffloadHook(store=store, offload_strategies={"*": OffloadOverChars(1000)})
    agent = Agent(chat_generator=Scripted(), tools=[big], hooks={"after_tool": [hook]})
    answer = agent.run(messages=[ChatMessage.from_user("go")])["messages"][-1].text
    assert answer is not None
    assert len(answer) < 1000
    [reference] = [word.strip("'\"`.,():") for word in answer.split() if "file://" in word]
    assert store.read(reference) == "line\n" * 2000
