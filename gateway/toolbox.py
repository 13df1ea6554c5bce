"""Toolbox: the tools of a gateway by name, other agents' spellings of them, and the check of arguments."""

from collections.abc import Iterable
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from gateway.errors import SettingsError
from gateway.matching import matches
from gateway.models import Arguments, ToolDefinition
from gateway.tools.tool import Alias, Tool


class Toolbox:
    """All tools, in a stable order. Two of one name are refused, and so is a schema that is none."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        self._aliases: dict[str, tuple[str, Alias]] = {}
        self._validators: dict[str, Any] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        """Raises SettingsError for a name that is taken, and for a schema that is none."""
        definition = tool.definition
        if definition.name in self._tools:
            raise SettingsError(f"two tools are called {definition.name!r}", "Give one of them another name.")
        try:
            Draft202012Validator.check_schema(definition.parameters)
        except SchemaError as error:
            raise SettingsError(
                f"tool {definition.name!r}: its parameters are no JSON schema: {error.message}",
                "See https://json-schema.org/draft/2020-12.",
            ) from error
        self._tools[definition.name] = tool
        self._validators[definition.name] = Draft202012Validator(definition.parameters)
        for alias in tool.aliases:
            self._aliases.setdefault(alias.name, (definition.name, alias))

    def remove(self, name: str) -> None:
        """Forget a tool; its name is free again."""
        self._tools.pop(name, None)
        self._validators.pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def definitions(self, allowed: Iterable[str]) -> tuple[ToolDefinition, ...]:
        """The tools that the patterns allow."""
        patterns = tuple(allowed)
        return tuple(tool.definition for name, tool in self._tools.items() if matches(name, patterns))

    def resolve(self, name: str, arguments: Arguments) -> tuple[str, Arguments]:
        """Our name and our spelling of the arguments; an unknown name comes back as it is."""
        if name in self._tools or name not in self._aliases:
            return name, arguments
        ours, alias = self._aliases[name]
        return ours, alias.translate(arguments)

    def wrong(self, name: str, arguments: Arguments) -> str | None:
        """What is wrong with the arguments by the tool's schema, or None."""
        validator = self._validators[name]
        if validator.is_valid(arguments):
            return None
        errors = sorted(validator.iter_errors(arguments), key=lambda one: (len(one.path), one.message))
        return "; ".join(_described(one) for one in errors[:3])


def _described(error: Any) -> str:
    where = ".".join(str(part) for part in error.path)
    return f"{where}: {error.message[:300]}" if where else str(error.message[:300])


def as_mcp(definition: ToolDefinition) -> dict[str, Any]:
    """MCP's `Tool`."""
    return {
        "name": definition.name,
        "description": definition.description,
        "inputSchema": definition.parameters,
        "annotations": {
            "readOnlyHint": definition.read_only,
            "destructiveHint": definition.destructive,
            "openWorldHint": definition.open_world,
        },
    }


def as_openai(definition: ToolDefinition) -> dict[str, Any]:
    """A function tool of OpenAI's Responses API; its names are `[A-Za-z0-9_-]{1,64}`."""
    return {
        "type": "function",
        "name": definition.name,
        "description": definition.description,
        "parameters": definition.parameters,
        "strict": False,
    }


def as_openai_chat(definition: ToolDefinition) -> dict[str, Any]:
    """A tool of OpenAI's Chat Completions API."""
    return {
        "type": "function",
        "function": {
            "name": definition.name,
            "description": definition.description,
            "parameters": definition.parameters,
        },
    }


def as_anthropic(definition: ToolDefinition) -> dict[str, Any]:
    """A tool of Anthropic's Messages API."""
    return {"name": definition.name, "description": definition.description, "input_schema": definition.parameters}


FORMATS = {"mcp": as_mcp, "openai": as_openai, "openai-chat": as_openai_chat, "anthropic": as_anthropic}
