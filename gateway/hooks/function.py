"""FunctionHook and `@hook`: a function as a hook; what it is given says at which point it is asked."""

import inspect
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

from gateway.errors import SettingsError
from gateway.hooks.hook import AGENT_POINTS, POINTS, Hook, HookContext, TurnContext

_REMEDY = "Make it a function at the top of a module: what is configured must be found again by its name."


class FunctionHook(Hook):
    """`function` runs in a worker thread, `async_function` on the loop; of a pair the gateway calls the async one.

    Each takes exactly a context (`HookContext` at the points of a call, `TurnContext` at those of a turn) and the value
    of its point (such as `ToolCall` for `pre_tool_call`), both annotated, then session inputs. Raises SettingsError for
    anything else, and for what could not be found again by its name: lambdas, functions inside functions, methods of
    objects, callable objects.
    """

    def __init__(
        self, function: Callable[..., Any] | None = None, async_function: Callable[..., Any] | None = None
    ) -> None:
        self.function = function
        self.async_function = async_function
        given = [one for one in (function, async_function) if one is not None]
        if not given:
            raise SettingsError("a FunctionHook needs a function", "Give it function= or async_function=.")
        for one in given:
            _check_named(one)
        if function is not None and inspect.iscoroutinefunction(function):
            raise SettingsError(f"{_name(function)}: an async function as function=", "Give it as async_function=.")
        if async_function is not None and not inspect.iscoroutinefunction(async_function):
            raise SettingsError(f"{_name(async_function)}: not async, as async_function=", "Give it as function=.")
        points = {_point(one) for one in given}
        if len(points) > 1:
            raise SettingsError(f"a pair for two points: {', '.join(sorted(points))}", "Make two hooks.")
        self.point = points.pop()
        self.__wrapped__ = async_function or function
        setattr(self, self.point, self.__wrapped__)

    @property
    def name(self) -> str:
        return _name(self.function or self.async_function)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The function itself, for tests of your own."""
        return getattr(self, self.point)(*args, **inputs)


def hook(function: Callable[..., Any]) -> FunctionHook:
    """Make a hook of a sync or async function; see FunctionHook for what it must look like."""
    if inspect.iscoroutinefunction(function):
        return FunctionHook(async_function=function)
    return FunctionHook(function)


def _check_named(function: object) -> None:
    """Raise SettingsError for what has no name of its own at the top of a module."""
    if inspect.ismethod(function):
        if isinstance(function.__self__, type):
            return
        raise SettingsError(f"{_name(function)}: a method of one object", _REMEDY)
    if not isinstance(function, FunctionType):
        raise SettingsError(f"{_name(function)}: not a function", _REMEDY)
    if function.__name__ == "<lambda>":
        raise SettingsError("a lambda has no name", _REMEDY)
    if "<locals>" in function.__qualname__:
        raise SettingsError(f"{function.__qualname__}: a function inside a function", _REMEDY)


def _point(function: Callable[..., Any]) -> str:
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise SettingsError(
            f"{_name(function)}: an annotation names what is not there: {error}", "Import it."
        ) from error
    names = [one.name for one in inspect.signature(function).parameters.values() if one.kind in _POSITIONAL]
    point = next((point for point, kind in POINTS.items() if len(names) > 1 and hints.get(names[1]) is kind), None)
    if point is None or hints.get(names[0]) is not _context(point):
        forms = ", ".join(
            f"({_context(point).__name__}, {kind.__name__}) for {point}" for point, kind in POINTS.items()
        )
        raise SettingsError(f"{_name(function)}: not a hook's signature", f"Annotate what it takes: {forms}.")
    return point


def _context(point: str) -> type:
    return TurnContext if point in AGENT_POINTS else HookContext


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
