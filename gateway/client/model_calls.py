"""What models' APIs give and take: the tool calls of OpenAI and Anthropic, and their answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.models import TokenUsage


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a model asked for; `arguments` is None where they are no JSON object."""

    api: Literal["responses", "chat", "anthropic"]
    id: str
    name: str
    arguments: dict[str, Any] | None

    def answer(self, text: str, *, is_error: bool) -> dict[str, Any]:
        match self.api:
            case "responses":
                return {"type": "function_call_output", "call_id": self.id, "output": text}
            case "chat":
                return {"role": "tool", "tool_call_id": self.id, "content": text}
            case "anthropic":
                return {"type": "tool_result", "tool_use_id": self.id, "content": text, "is_error": is_error}


def model_usage(value: object) -> TokenUsage:
    """Read the `usage` of an answer of OpenAI's or Anthropic's, or of nothing; TypeError for anything else."""
    if value is None or isinstance(value, TokenUsage):
        return value or TokenUsage()
    counts = [
        _field(value, ours) if _field(value, ours) is not None else _field(value, chats) for ours, chats in _USAGE
    ]
    if not all(isinstance(one, int) for one in counts):
        raise TypeError("not the usage of an answer of OpenAI or Anthropic")
    return TokenUsage.model_validate(dict(zip(("input_tokens", "output_tokens"), counts, strict=True)))


_USAGE: Final = (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens"))


def model_call(value: object) -> ModelCall:
    """Read one; TypeError for anything else."""
    kind, function = _field(value, "type"), _field(value, "function")
    if kind == "function_call":
        return ModelCall(
            "responses", _text(value, "call_id"), _text(value, "name"), _object(_field(value, "arguments"))
        )
    if kind == "tool_use":
        return ModelCall("anthropic", _text(value, "id"), _text(value, "name"), _object(_field(value, "input")))
    if function is not None:
        return ModelCall("chat", _text(value, "id"), _text(function, "name"), _object(_field(function, "arguments")))
    raise TypeError("not a tool call of OpenAI or Anthropic")


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(value: object, name: str) -> str:
    text = _field(value, name)
    if not isinstance(text, str):
        raise TypeError(f"a tool call without {name}")
    return text


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as a dictionary; for a tool without parameters some models give an empty text, or nothing."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return None
    if not arguments and not isinstance(arguments, (list, int)):
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) else None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
