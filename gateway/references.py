"""Arguments that stand for stored results: `{"sandgate_reference": "sandgate://..."}` in the place of a text."""

from typing import Final

from pydantic import JsonValue

from gateway.errors import Unprocessable
from gateway.models import Arguments
from gateway.results import SessionResults

REFERENCE: Final = "sandgate_reference"
MAX_BYTES: Final = 1 << 20


async def resolved(arguments: Arguments, results: SessionResults) -> Arguments:
    """The arguments with each whole value that is a reference replaced by the result's text, 1 MiB in all at most.

    The same object where there is none. Raises NotFound, Gone, Unavailable, and Unprocessable for what is too large or
    no text.
    """
    wanted = {
        name: reference for name, value in arguments.items() if (reference := _reference(name, value)) is not None
    }
    if not wanted:
        return arguments
    sizes = [await results.size(reference) for reference in wanted.values()]
    if sum(sizes) > MAX_BYTES:
        raise Unprocessable(
            f"{', '.join(wanted)}: {sum(sizes):,} bytes are more than an argument may be, {MAX_BYTES:,}",
            "Write it to a file with read_result(reference, save_to=path), and pass the path.",
            code="too_large",
        )
    return {**arguments, **{name: await _text(name, reference, results) for name, reference in wanted.items()}}


def _reference(name: str, value: JsonValue) -> str | None:
    if not isinstance(value, dict) or value.keys() != {REFERENCE}:
        return None
    reference = value[REFERENCE]
    if not isinstance(reference, str):
        raise Unprocessable(f"{name}: {REFERENCE} is a text", "Give a reference as it stands in a result.")
    return reference


async def _text(name: str, reference: str, results: SessionResults) -> str:
    content = b"".join([chunk async for chunk in results.read(reference)])
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Unprocessable(
            f"{name}: the result is not UTF-8 text", "Write it to a file with read_result(reference, save_to=path)."
        ) from None
