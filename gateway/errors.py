"""What never became a call, as a client sees it: RFC 9457 problems with a code and a remedy.

    SandgateError
    +-- Problem                 has an HTTP status
    |   +-- Unauthorized  401   Forbidden 403   NotFound 404   Gone 410   TooLarge 413   Unprocessable 422
    |   +-- TooMany       429   Unavailable 503
    +-- SettingsError           the configuration is wrong; nothing was started
    |   +-- SerializationError  an object cannot be written as data, or data is no object
    +-- StateError              the state folder cannot be used

Foreign and absent things are the same `NotFound`, to the byte.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class SandgateError(Exception):
    """Base of all; `remedy` says what to do next, or is empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class SettingsError(SandgateError):
    """A configuration file or variable is wrong; the message names the place, the remedy the right spelling."""


class SerializationError(SettingsError):
    """An object cannot be written as data without a loss, or data names what may not or cannot be loaded."""


class StateError(SandgateError):
    """The state folder is in use by another gateway, not ours, or not writable."""


class Problem(SandgateError):
    """An HTTP answer that is not a ToolResult; `code` is stable and meant for programs, `headers` go with it."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    code: str = "internal"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, remedy)
        self.code = code or type(self).code
        self.retry_after_seconds = retry_after_seconds
        self.headers = headers or type(self).headers


class Unauthorized(Problem):
    """No token, or one that nobody holds."""

    status, title, code = 401, "Unauthorized", "unauthorized"
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class Forbidden(Problem):
    """The token is known and may not do this, whoever's object it is."""

    status, title, code = 403, "Forbidden", "forbidden"


class NotFound(Problem):
    """Absent, or another's."""

    status, title, code = 404, "Not found", "not_found"


class Gone(Problem):
    """The caller's own result, ended by retention or deletion."""

    status, title, code = 410, "Gone", "expired"


class TooLarge(Problem):
    """A body over its limit."""

    status, title, code = 413, "Content too large", "too_large"


class Unprocessable(Problem):
    """Understood and refused; the message names the field and its bound."""

    status, title, code = 422, "Unprocessable content", "invalid"


class TooMany(Problem):
    """A machine-wide limit is reached; try again after `retry_after_seconds`."""

    status, title, code = 429, "Too many requests", "limit_reached"


class Unavailable(Problem):
    """Something this needs does not work here or now."""

    status, title, code = 503, "Unavailable", "unavailable"
