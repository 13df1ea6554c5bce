"""Serialization: a hook, or what it holds, as plain data and back. Modules are checked before they are imported.

An object is `{"type": "module:Class", "state": {...}}`, where the state is what its constructor takes, or what its own
`to_state` gives and its `from_state` takes. Functions and classes are `{"reference": "module:name"}`. State that would
be lost is an error.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

from gateway.errors import SerializationError, SettingsError
from gateway.text import nearest

Kind = TypeVar("Kind")
_OBJECT: Final = frozenset({"type", "state"})
_REFERENCE: Final = frozenset({"reference"})
_REMEDY: Final = "Give its class to_state() -> dict and from_state(state)."


def to_dict(value: object) -> dict[str, Any]:
    """An object as `{"type", "state"}`, only JSON. Raises SerializationError naming what would be lost."""
    try:
        state = _state(value)
        data = {"type": reference(type(value)), "state": _encoded(state, _name(value))}
        _check_kept(value, state)
    except RecursionError as error:
        raise SerializationError(f"{_name(value)}: its state has no end", _REMEDY) from error
    return data


def from_dict(data: Mapping[str, Any], kind: type[Kind], *, allowed_modules: Sequence[str] | None) -> Kind:
    """The object that `to_dict` wrote, if it is a `kind`. Nothing is imported but what `allowed_modules` names (a name
    covers its submodules; None is for what the operator's own configuration says). Raises SerializationError."""
    if set(data) != _OBJECT or not isinstance(data["type"], str) or not isinstance(data["state"], Mapping):
        raise SerializationError("not an object as it is written", 'It is {"type": "module:Class", "state": {...}}.')
    found = resolve(data["type"], allowed_modules=allowed_modules)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise SerializationError(f"{data['type']}: not a {kind.__name__}", "Name a class of that kind.")
    return _made(found, {name: decoded(one, allowed_modules) for name, one in data["state"].items()})


def reference(found: object) -> str:
    """`module:name` of a class or a function. Raises SerializationError where it could not be found again by that."""
    target = found.__func__ if isinstance(found, MethodType) and isinstance(found.__self__, type) else found
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(target, type | FunctionType) or module is None or name is None:
        raise SerializationError(f"{_name(found)}: neither a class nor a function", "Name what a module holds.")
    path = f"{module}:{name}"
    if "<" in name or module == "__main__":
        raise SerializationError(f"{path}: not found again by this name", "Put it at the top of a module.")
    again = resolve(path, allowed_modules=None)
    if found not in (again, _unwrapped(again)):
        raise SerializationError(f"{path}: something else has this name now", "Give each a name of its own.")
    return path


def resolve(path: str, *, allowed_modules: Sequence[str] | None) -> Any:
    """What `module:name` names; dots in the name go into classes. Raises SerializationError: before anything is
    imported for a module that is not allowed, and for names that lead out of it."""
    module, _, name = path.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if not all(part.isidentifier() and not (part.startswith("__") and part.endswith("__")) for part in parts):
        raise SerializationError(f"{path!r} is no dotted path", "Write module:name, such as my_hooks:ForceDryRun.")
    _check_allowed(path, module, allowed_modules)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = f"Put {module.split('.')[0]}.py beside the configuration file, or install its package."
        raise SerializationError(f"{path}: {error}", remedy) from error
    except SettingsError as error:  # such as a hook whose signature is none
        raise SerializationError(f"{path}: {error.message}", error.remedy) from error
    except Exception as error:  # strangers' code, run by importing it
        raise SerializationError(
            f"{path}: importing it raised {type(error).__name__}: {error}", "Mend the module."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or _name(found)
            raise SerializationError(f"{path}: {where} has no {part}{nearest(part, vars(found))}")
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise SerializationError(f"{path}: leads into another module", "Name that module itself.")
        _check_allowed(path, getattr(found, "__module__", module), allowed_modules)
    return found


def _check_allowed(path: str, module: object, allowed: Sequence[str] | None) -> None:
    if allowed is not None and not any(module == one or str(module).startswith(f"{one}.") for one in allowed):
        raise SerializationError(f"{path}: the module {module} is not allowed", "Allow it, if it is to be trusted.")


def decoded(value: Any, allowed_modules: Sequence[str] | None) -> Any:
    """Plain data with the objects and references in it found again."""
    match value:
        case dict() if set(value) == _OBJECT and isinstance(value["type"], str):
            return from_dict(value, object, allowed_modules=allowed_modules)
        case dict() if set(value) == _REFERENCE and isinstance(value["reference"], str):
            return _unwrapped(resolve(value["reference"], allowed_modules=allowed_modules))
        case dict():
            return {name: decoded(one, allowed_modules) for name, one in value.items()}
        case list() | tuple():
            return [decoded(one, allowed_modules) for one in value]
    return value


def _unwrapped(found: Any) -> Any:
    """The function of a hook that took its place under its name."""
    return found if isinstance(found, type | FunctionType) else getattr(found, "__wrapped__", found)


def _state(value: object) -> dict[str, Any]:
    to_state, parameters = getattr(value, "to_state", None), _parameters(type(value))
    if to_state is not None:
        absent = {name for name, one in parameters.items() if one.default is None}  # what TOML cannot say
        return {name: kept for name, kept in to_state().items() if kept is not None or name not in absent}
    return {
        name: kept
        for name, parameter in parameters.items()
        if (kept := _kept(value, name, parameter)) is not parameter.default and not _same(kept, parameter.default)
    }


def _check_kept(value: object, state: Mapping[str, Any]) -> None:
    """Raise SerializationError where an object made of the state would be another one."""
    made = _made(type(value), state)
    if hasattr(value, "to_state"):
        one, other = dict(state), _state(made)
    else:
        one, other = _attributes(value), _attributes(made)
    for name in {**one, **other}:
        if name not in one or name not in other or not _same(one[name], other[name]):
            raise SerializationError(f"{_name(value)}: {name!r} would be lost", _REMEDY)


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """What the constructor takes by name."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(kind).parameters.values()
    except ValueError:  # a class written in C tells nothing
        return {}
    return {one.name: one for one in parameters if one.kind not in variable}


def _kept(value: object, name: str, parameter: inspect.Parameter) -> Any:
    """The attribute that keeps what the constructor was given."""
    for attribute in (name, f"_{name}"):
        if hasattr(value, attribute):
            return getattr(value, attribute)
    if parameter.default is parameter.empty:
        raise SerializationError(f"{_name(value)}: keeps {name!r} in no attribute of that name", _REMEDY)
    return parameter.default


def _made(kind: type[Kind], state: Mapping[str, Any]) -> Kind:
    try:
        from_state = getattr(kind, "from_state", None)
        made: Kind = from_state(dict(state)) if from_state is not None else kind(**state)
    except SettingsError:
        raise
    except Exception as error:  # strangers' constructors
        raise SerializationError(
            f"{kind.__qualname__}: made of {sorted(state)}, it raised {type(error).__name__}: {error}",
            "Check what it takes.",
        ) from error
    return made


def _encoded(value: Any, where: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_encoded(one, where) for one in value]
        case Mapping() if all(isinstance(name, str) for name in value):
            if set(value) in (_OBJECT, _REFERENCE):
                raise SerializationError(f"{where}: a dictionary that would be read as an object", _REMEDY)
            return {name: _encoded(one, where) for name, one in value.items()}
        case FunctionType() | MethodType() | type():
            return {"reference": reference(value)}
    if type(value).__module__ == "builtins":
        raise SerializationError(f"{where}: a {type(value).__name__} is not JSON", _REMEDY)
    return to_dict(value)


def _same(one: Any, other: Any) -> bool:
    """Whether nothing would be lost with `other` in the place of `one`: equal, or alike in every attribute."""
    if one is other or (type(one) is type(other) and bool(one == other)):
        return True
    match one, other:
        case (MethodType(), MethodType()):  # of the two objects that are being compared
            return one.__func__ is other.__func__
        case (list() | tuple(), list() | tuple()):
            return len(one) == len(other) and all(map(_same, one, other))
        case (dict(), dict()):
            return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if type(one) is not type(other) or not (attributes := _attributes(one)):
        return False
    return _same(attributes, _attributes(other))


def _attributes(value: object) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**own, **getattr(value, "__dict__", {})}


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))
