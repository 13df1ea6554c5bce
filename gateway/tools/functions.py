"""FunctionTool: a Python function of the operator's as a tool; it runs in the gateway, not in the sandbox."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from gateway.errors import SettingsError
from gateway.inputs import SessionInput, declared_inputs, declares_input
from gateway.models import Arguments, MediaBlock, Source, ToolDefinition
from gateway.tools.tool import Alias, Outcome, ToolContext

CONTEXT_PARAMETER = "ctx"


class FunctionTool:
    """Schema from the signature, description from the docstring. A sync function runs in a worker thread. A parameter
    named `ctx` gets the ToolContext, with `ctx.hook_sandbox` to act inside; one that is a session input
    (`Annotated[T, Depends(T)]`) its value; a model is told of neither. A string or bytes are the result's text, a
    MediaBlock (or a list of these) its images and sounds, anything else is written as JSON."""

    aliases: ClassVar[tuple[Alias, ...]] = ()
    needs_sandbox: ClassVar[bool] = False

    def __init__(
        self,
        function: Callable[..., Any],
        definition: ToolDefinition,
        model: type[BaseModel],
        inputs: Mapping[str, type[SessionInput]],
        *,
        wants_context: bool,
    ) -> None:
        self.inputs = inputs
        self._function = function
        self._definition = definition
        self._model = model
        self._wants_context = wants_context

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str | None = None, source: Source = "function") -> Self:
        """Raises SettingsError for a function without annotations or description."""
        name = name or function.__name__
        signature = inspect.signature(function, eval_str=True)
        own = [one.name for one in signature.parameters.values() if declares_input(one.annotation)]
        inputs = declared_inputs(function, own, f"tool {name!r}")
        fields: dict[str, Any] = {}
        for parameter in signature.parameters.values():
            if parameter.name == CONTEXT_PARAMETER or parameter.name in inputs:
                continue
            if parameter.annotation is parameter.empty or parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
                parameter.POSITIONAL_ONLY,
            ):
                raise SettingsError(
                    f"tool {name!r}: parameter {parameter.name!r} has no annotation, or is variable",
                    "Annotate each parameter; its schema comes from that.",
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        description = inspect.getdoc(function)
        if not description:
            raise SettingsError(f"tool {name!r} has no docstring", "Say in it what a model must know.")
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
        definition = ToolDefinition(
            name=name, description=description, parameters=schema, source=source, open_world=True
        )
        return cls(function, definition, model, inputs, wants_context=CONTEXT_PARAMETER in signature.parameters)

    @property
    def definition(self) -> ToolDefinition:
        return self._definition

    async def run(self, arguments: Arguments, ctx: ToolContext) -> Outcome:
        try:
            values = dict(self._model.model_validate(arguments))
        except ValidationError as error:
            return Outcome("invalid", code="invalid_arguments", message=error.errors()[0]["msg"])
        if self._wants_context:
            values[CONTEXT_PARAMETER] = ctx
        values |= {name: ctx.session.input(kind) for name, kind in self.inputs.items()}
        with anyio.fail_after(ctx.timeout_seconds):
            answer = await self._call(values)
        media = answer if isinstance(answer, list | tuple) else [answer]
        if media and all(isinstance(one, MediaBlock) for one in media):
            return Outcome(media=tuple(media))
        await ctx.stdout.write(_bytes(answer))
        return Outcome()

    async def _call(self, values: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**values)
        return await anyio.to_thread.run_sync(functools.partial(self._function, **values), abandon_on_cancel=True)


def _bytes(answer: Any) -> bytes:
    if isinstance(answer, bytes):
        return answer
    text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
    return text.encode(errors="replace")
