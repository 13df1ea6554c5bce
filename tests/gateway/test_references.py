"""Arguments that stand for stored results."""

import pytest

from gateway.gateway import Gateway
from gateway.hooks.hook import Continue, Hook, HookContext
from gateway.models import ToolCall
from tests.gateway.conftest import called, opened, running

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]


async def test_reference_as_an_argument_is_the_text(gateway: Gateway) -> None:
    """R70."""
    session = await opened(gateway)
    stored = await called(gateway, session, "bash", command="seq 1 20000 | tee copy")
    argument = {"sandgate_reference": stored.references[0].reference}
    written = await called(gateway, session, "write_file", file_path="b", content=argument)
    assert (written.status, written.structured) == ("ok", {"bytes": 108_894})
    assert (await called(gateway, session, "bash", command="cmp copy b && echo same")).text == "same"
    record = (await gateway.journal.calls(session.id))[1]
    assert record.original_arguments == {"file_path": "b", "content": argument}


SEEN: list[object] = []


class Sees(Hook):
    def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Continue:
        SEEN.append(call.arguments["content"])
        return Continue()


async def test_hooks_and_rules_see_the_text_not_the_reference(state_dir: object, tmp_path: object) -> None:
    hooks = [{"use": f"{__name__}:Sees", "tools": ["write_file"]}]
    async with running(state_dir, tmp_path, hooks=hooks) as gateway:  # type: ignore[arg-type]
        session = await opened(gateway)
        await called(gateway, session, "bash", command="seq 1 20000")
        await called(gateway, session, "write_file", file_path="b", content={"sandgate_reference": "0001-bash-stdout"})
    assert ["".join(f"{number}\n" for number in range(1, 20_001))] == SEEN


@pytest.mark.parametrize(
    ("command", "argument", "code"),
    [
        ("seq 1 20000", {"sandgate_reference": "0009-bash-stdout"}, "not_found"),
        ("seq 1 20000", {"sandgate_reference": "file:///etc/passwd"}, "not_found"),
        ("seq 1 20000", {"sandgate_reference": f"sandgate://s-{'0' * 32}/results/0001-bash-stdout"}, "not_found"),
        ("seq 1 20000", {"sandgate_reference": 7}, "invalid"),
        ("seq 1 20000", {"sandgate_reference": "0001-bash-stdout", "more": 1}, "invalid_arguments"),
        ("seq 1 200000", {"sandgate_reference": "0001-bash-stdout"}, "too_large"),
        ("head -c 100000 /dev/zero", {"sandgate_reference": "0001-bash-stdout"}, "ok"),
        ("head -c 100000 /dev/zero | tr '\\0' '\\377'", {"sandgate_reference": "0001-bash-stdout"}, "invalid"),
    ],
)
async def test_reference_that_cannot_be_taken_ends_the_call(
    gateway: Gateway, command: str, argument: dict[str, object], code: str
) -> None:
    """A39, A40, R77: before hooks and rules, with the reason."""
    session = await opened(gateway)
    await called(gateway, session, "bash", command=command)
    result = await called(gateway, session, "write_file", file_path="b", content=argument)
    assert (result.status, result.error.code if result.error else "ok") == ("ok" if code == "ok" else "invalid", code)
