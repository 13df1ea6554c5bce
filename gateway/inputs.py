"""Session inputs: what a session must be opened with, because a hook or a tool declares it as a parameter."""

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import JsonValue, ValidationError

from gateway.errors import SettingsError, Unprocessable
from gateway.models import Wire


class SessionInput(Wire):
    """Derive your own, with an `input_id` and fields. It is no place for credentials: the journal keeps it."""

    input_id: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Depends:
    """Marks a parameter as a session input: `Annotated[T, Depends(T)]`, or `Depends()` for short."""

    input: type[SessionInput] | None = None


def declared_inputs(function: Callable[..., Any], names: Iterable[str], where: str) -> dict[str, type[SessionInput]]:
    """The inputs that these parameters of a function declare. Raises SettingsError for one that declares none."""
    names = tuple(names)
    if not names:
        return {}
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise SettingsError(f"{where}: an annotation names what is not there: {error}", "Import it.") from error
    return {name: _declared(hints.get(name), f"{where}: parameter {name!r}") for name in names}


def declares_input(annotation: Any) -> bool:
    """Whether an annotation is `Annotated[..., Depends(...)]`."""
    return get_origin(annotation) is Annotated and any(isinstance(one, Depends) for one in get_args(annotation)[1:])


def _declared(annotation: Any, where: str) -> type[SessionInput]:
    if not declares_input(annotation):
        raise SettingsError(
            f"{where} is neither given by the gateway nor a session input",
            "Take it out, or annotate it: Annotated[T, Depends(T)].",
        )
    kind, *marks = get_args(annotation)
    named = next(one.input for one in marks if isinstance(one, Depends))
    if named not in (None, kind):
        raise SettingsError(f"{where}: Depends names another class than the annotation", "Name one class.")
    if not (isinstance(kind, type) and issubclass(kind, SessionInput) and isinstance(_id(kind), str)):
        raise SettingsError(f"{where}: not a SessionInput with an input_id", "Derive it from SessionInput.")
    return kind


def _id(kind: type[SessionInput]) -> str | None:
    return getattr(kind, "input_id", None)


def check_distinct(kinds: Iterable[type[SessionInput]]) -> None:
    """Raise SettingsError where two classes have one id."""
    known: dict[str, type[SessionInput]] = {}
    for kind in kinds:
        if known.setdefault(kind.input_id, kind) is not kind:
            raise SettingsError(f"two session inputs are called {kind.input_id!r}", "Give one of them another id.")


def parsed_inputs(needed: Iterable[type[SessionInput]], given: Mapping[str, JsonValue]) -> Mapping[str, SessionInput]:
    """The inputs of a session by id. Raises Unprocessable for a missing, a wrong or an unknown one."""
    kinds = {kind.input_id: kind for kind in needed}
    for id in given:
        if id not in kinds:
            raise Unprocessable(f"inputs: nothing in this session declares {id[:100]!r}", _remedy(kinds))
    for id in kinds:
        if id not in given:
            raise Unprocessable(f"inputs: {id!r} is missing", _remedy(kinds), code="missing_input")
    return {id: _parsed(kind, given[id]) for id, kind in kinds.items()}


def _parsed(kind: type[SessionInput], value: JsonValue) -> SessionInput:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("inputs", kind.input_id, *first["loc"]))
        raise Unprocessable(f"{where}: {first['msg']}"[:1000], "Give what its class declares.") from error


def _remedy(kinds: Mapping[str, object]) -> str:
    return f"It takes: {', '.join(kinds)}." if kinds else "It takes none."
