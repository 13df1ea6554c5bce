"""Hooks as data and back: what is kept, what is refused because it would be lost, what is never imported."""

import functools
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gateway.build import build_hooks, hook_settings
from gateway.errors import SerializationError
from gateway.hooks.function import FunctionHook, hook
from gateway.hooks.hook import Continue, Hook, HookContext, Skip
from gateway.models import ToolCall
from gateway.serialization import from_dict, reference, resolve, to_dict
from gateway.settings import HookSettings
from gateway.workspace_hooks.git import GitIdentity
from stores import OffloadOverChars
from tests.gateway.conftest import settings_of

HERE = [__name__]


class Plain(Hook):
    async def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()


class Blocks(Plain):
    """The usual hook: its constructor's arguments, each kept in an attribute of its name."""

    def __init__(self, words: list[str], *, reason: str = "blocked", limit: int | None = None) -> None:
        self.words = tuple(words)
        self._reason = reason
        self.limit = limit
        self.compiled = {word: len(word) for word in words}


@dataclass
class Limits(Plain):
    per_minute: int
    tools: Any = ()
    nested: dict[str, list[float]] = field(default_factory=dict)

    __hash__ = object.__hash__


class Offloads(Plain):
    """Holds an object of its own, and a function."""

    def __init__(self, policy: OffloadOverChars, judge: Callable[..., Any]) -> None:
        self.policy, self.judge = policy, judge


class OwnState(Plain):
    """Counts; says itself what makes it again."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path, self.seen, self.lock = path, seen, object()

    def to_state(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "OwnState":
        return cls(Path(state["path"]))


class Carries(Plain):
    def __init__(self) -> None:
        self.tools = (self.tell,)

    def tell(self) -> str:
        """Tell."""
        return ""


def judge(ctx: HookContext, call: ToolCall) -> Skip:
    return Skip("judged")


@hook
def decorated(ctx: HookContext, call: ToolCall) -> Continue:
    return Continue()


async def judge_async(ctx: HookContext, call: ToolCall) -> Skip:
    return Skip("judged")


class Holder:
    @staticmethod
    def static(ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()

    @classmethod
    def of_class(cls, ctx: HookContext, call: ToolCall) -> Continue:
        return Continue()


GOOD: list[tuple[Hook, dict[str, Any]]] = [
    (Plain(), {}),
    (Blocks(["a", "b"]), {"words": ["a", "b"]}),
    (Blocks([], reason="no", limit=3), {"words": [], "reason": "no", "limit": 3}),
    (Limits(3, nested={"a": [1.5]}), {"per_minute": 3, "nested": {"a": [1.5]}}),
    (
        Offloads(OffloadOverChars(7), judge),
        {
            "policy": {"type": "stores.policies:OffloadOverChars", "state": {"limit": 7}},
            "judge": {"reference": f"{__name__}:judge"},
        },
    ),
    (OwnState(Path("/a"), seen=9), {"path": "/a"}),
    (Carries(), {}),
    (decorated, {"function": {"reference": f"{__name__}:decorated"}}),
    (
        FunctionHook(function=judge, async_function=judge_async),
        {
            "function": {"reference": f"{__name__}:judge"},
            "async_function": {"reference": f"{__name__}:judge_async"},
        },
    ),
    (FunctionHook(Holder.static), {"function": {"reference": f"{__name__}:Holder.static"}}),
    (FunctionHook(Holder.of_class), {"function": {"reference": f"{__name__}:Holder.of_class"}}),
]


@pytest.mark.parametrize(("one", "state"), GOOD, ids=lambda value: getattr(value, "name", ""))
def test_hook_round_trips_with_its_state(one: Hook, state: dict[str, Any]) -> None:
    """seed-facts 12 row 28; 1.7, 4.6."""
    data = to_dict(one)
    assert data == {"type": f"{type(one).__module__}:{type(one).__name__}", "state": state}
    again = from_dict(json.loads(json.dumps(data)), Hook, allowed_modules=[*HERE, "gateway.hooks", "stores"])
    assert type(again) is type(one)
    assert to_dict(again) == data


def test_function_of_a_decorated_hook_is_found_under_the_hooks_name() -> None:
    """seed-facts 1.7: unwrapped to its function."""
    again = from_dict(to_dict(decorated), FunctionHook, allowed_modules=[*HERE, "gateway.hooks"])
    assert again.function is decorated.function
    assert reference(decorated.function) == f"{__name__}:decorated"


def test_what_is_no_hook_round_trips_too() -> None:
    """Sandbox hooks, policies: whatever keeps what its constructor takes."""
    identity = GitIdentity("Ann", "ann@example.org")
    assert to_dict(from_dict(to_dict(identity), GitIdentity, allowed_modules=["gateway"])) == to_dict(identity)


def test_a_gateways_hooks_round_trip_through_toml_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole list, in its order, with what the operator says of each; the ready hooks among them."""
    monkeypatch.setenv("TICKETS_TOKEN", "not a real one")
    entries = [
        {"use": f"{__name__}:Blocks", "options": {"words": ["a"], "limit": 2}, "tools": ["bash", "read_*"]},
        {"use": f"{__name__}:decorated", "timeout_seconds": 2.5, "on_failure": "open"},
        {"use": f"{__name__}:OwnState", "options": {"path": "/a"}},
        {"use": f"{__name__}:Plain"},
        {"use": f"{__name__}:Offloads", "options": GOOD[4][1]},
        {"use": f"{__name__}:Blocks", "options": {"words": []}},
        {"use": "gateway.hooks.redact:RedactSecrets", "options": {"values_from_env": ["TICKETS_TOKEN"]}},
        {"use": "gateway.hooks.http:HttpHook", "options": {"url": "https://policy.example/decide"}},
        {"use": "gateway.adapters.claude_code:CommandHook", "options": {"command": ["true"], "env": ["TICKETS_TOKEN"]}},
    ]
    hooks = build_hooks(settings_of(hooks=entries), Path())
    written = [hook_settings(one) for one in hooks]
    toml = tomli_w.dumps({"hooks": [one.model_dump(exclude_defaults=True) for one in written]})
    from_toml = settings_of(**tomllib.loads(toml)).hooks
    from_json = tuple(HookSettings.model_validate_json(one.model_dump_json()) for one in written)
    assert from_toml == from_json == tuple(written)
    again = build_hooks(settings_of(hooks=[one.model_dump() for one in from_toml]), Path())
    assert [hook_settings(one) for one in again] == written
    names = ["Blocks", "decorated", "OwnState", "Plain", "Offloads", "Blocks"]
    assert [one.name for one in again] == [*names, "RedactSecrets", "HttpHook", "CommandHook true"]
    assert "not a real one" not in toml
    assert [(one.tools, one.timeout_seconds, one.on_failure) for one in again[:2]] == [
        (("bash", "read_*"), 10, "closed"),
        (("*",), 2.5, "open"),
    ]


class Forgets(Plain):
    def __init__(self, limit: int) -> None:
        self.most = limit


class Counts(Plain):
    def __init__(self, limit: int = 1) -> None:
        self.limit, self.calls = limit, dict[str, int]()


class Changed(Plain):
    limit = 1


class Keeps(Plain):
    def __init__(self, value: Any) -> None:
        self.value = value


class WrongState(Plain):
    def __init__(self, limit: int = 0) -> None:
        self.limit = limit

    def to_state(self) -> dict[str, Any]:
        return {"limit": self.limit}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "WrongState":
        return cls()


def lost(kind: type[Hook], *arguments: Any, **attributes: Any) -> Hook:
    """A hook with something in it that its constructor does not make."""
    one = kind(*arguments)
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


def endless() -> Hook:
    values: list[Any] = []
    values.append(values)
    return Keeps(values)


class Local:
    pass


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (Forgets(3), "keeps 'limit' in no attribute of that name"),
        (lost(Counts, 1, calls={"s-1": 2}), "'calls' would be lost"),
        (lost(Changed, limit=2), "'limit' would be lost"),
        (lost(Plain, added=1), "'added' would be lost"),
        (WrongState(3), "'limit' would be lost"),
        (Keeps({1, 2}), "a set is not JSON"),
        (Keeps(b"bytes"), "a bytes is not JSON"),
        (Keeps({1: 2}), "is not JSON"),
        (Keeps({"type": "a:B", "state": {}}), "would be read as an object"),
        (Keeps(lambda: None), "not found again by this name"),
        (Keeps(Plain().pre_tool_call), "neither a class nor a function"),
        (Keeps(functools.partial(judge)), "it raised TypeError"),
        (Keeps(type("Made", (), {})), "has no Made"),
        (endless(), "has no end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_that_would_be_lost_is_refused(one: Hook, reason: str) -> None:
    """seed-facts 11 row 8: always an error, never silence."""
    with pytest.raises(SerializationError, match=reason) as refused:
        to_dict(one)
    assert refused.value.remedy or "has no" in reason


def test_class_inside_a_function_is_refused() -> None:
    class Inside(Hook):
        pass

    with pytest.raises(SerializationError, match="not found again by this name"):
        to_dict(Inside())


def test_name_that_means_something_else_now_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Plain()
    monkeypatch.setattr(sys.modules[__name__], "Plain", Blocks)
    with pytest.raises(SerializationError, match="something else has this name now"):
        to_dict(one)


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "subprocess:Popen",
        "builtins:eval",
        "tests_x:Hook",
        f"{__name__}x:Plain",
        f"{__name__}:json.loads",
        f"{__name__}:tomllib",
        f"{__name__}:Hook",
        f"{__name__}:Plain.__init__",
        f"{__name__}:__builtins__",
        "__main__:Plain",
        "this:x",
        "",
        ":",
        "a.b",
        f"{__name__}:",
        "../x:y",
        f"{__name__}:no_such_name",
    ],
)
def test_what_is_not_allowed_is_refused_before_it_is_imported(path: str) -> None:
    """seed-facts 1.7: not on the list, dunders, names that lead into a foreign module."""
    assert "this" not in sys.modules
    with pytest.raises(SerializationError):
        resolve(path, allowed_modules=HERE)
    with pytest.raises(SerializationError):
        from_dict({"type": path, "state": {}}, Hook, allowed_modules=HERE)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"type": f"{__name__}:Plain"},
        {"type": 7, "state": {}},
        {"type": f"{__name__}:Plain", "state": []},
        {"type": f"{__name__}:Plain", "state": {}, "more": 1},
        {"type": f"{__name__}:Plain", "state": {"unknown": 1}},
        {"type": f"{__name__}:Blocks", "state": {}},
        {"type": f"{__name__}:judge", "state": {}},
        {"type": f"{__name__}:Local", "state": {}},
        {"type": f"{__name__}:Keeps", "state": {"value": {"reference": "os:system"}}},
        {"type": f"{__name__}:Keeps", "state": {"value": [{"type": "subprocess:Popen", "state": {}}]}},
    ],
)
def test_data_that_is_no_hook_is_refused(data: dict[str, Any]) -> None:
    """seed-facts 1.7."""
    with pytest.raises(SerializationError):
        from_dict(data, Hook, allowed_modules=HERE)


def test_module_of_a_package_is_allowed_with_it() -> None:
    assert resolve("stores.policies:OffloadOverChars", allowed_modules=["stores"]) is OffloadOverChars
    with pytest.raises(SerializationError, match="not allowed"):
        resolve("stores.policies:OffloadOverChars", allowed_modules=["store", "stores.errors"])
