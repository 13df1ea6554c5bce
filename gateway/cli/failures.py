"""What goes wrong, as one error and two lines."""

import sys

from gateway.text import printable


def only(error: BaseException) -> BaseException:
    """The one error of a group, as itself: task groups wrap what they let through."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def fail(message: str, remedy: str = "", *, code: int = 1) -> int:
    """Say what went wrong and what helps, and give the code back; texts may hold strangers' names."""
    print(f"error: {printable(message)}", file=sys.stderr)
    if remedy:
        print(f"  {printable(remedy)}", file=sys.stderr)
    return code
