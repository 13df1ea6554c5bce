"""What can go wrong with a sandbox.

    SandboxError
    +-- SandboxUnavailable      the kind does not work on this machine
    |   +-- SandboxHookFailed   an `on_create` raised
    +-- SandboxLost             it died, or no longer answers
    +-- CommandRefused          the program could not be started
    +-- FileRefused             a file operation could not be done; `code` is one of `FILE_CODES`
    +-- JobNotFound             no such job, in this sandbox
    +-- TooManyJobs             as many run as may
    +-- NotOffered              this kind cannot do that; the remedy names what can

A program's exit code is never an error.
"""

from typing import Final, Literal, get_args

FileCode = Literal[
    "invalid_path",
    "missing_file",
    "permission_denied",
    "content_too_large",
    "file_changed",
    "invalid_encoding",
    "search_replace_failed",
    "sandbox_helper_failed",
    "disk_full",
]
FILE_CODES: Final = get_args(FileCode)


class SandboxError(Exception):
    """Base of all; `remedy` says what the reader can do about it, or is empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class SandboxUnavailable(SandboxError):
    """The kind does not work here: missing program, forbidden namespaces, no free place. Nothing was started."""


class SandboxHookFailed(SandboxUnavailable):
    """An `on_create` raised, or had no end; what was prepared before it is undone."""


class SandboxLost(SandboxError):
    """The sandbox is dead or silent; `files_lost` says whether its workspace went with it."""

    def __init__(self, message: str, remedy: str = "", *, files_lost: bool = False) -> None:
        super().__init__(message, remedy)
        self.files_lost = files_lost


class CommandRefused(SandboxError):
    """The kernel would not start the program; `code` is the errno's name: ENOENT, EACCES, E2BIG, EAGAIN, ..."""

    def __init__(self, message: str, remedy: str = "", *, code: str) -> None:
        super().__init__(message, remedy)
        self.code = code


class FileRefused(SandboxError):
    """One file operation failed; the sandbox goes on."""

    def __init__(self, message: str, remedy: str = "", *, code: FileCode) -> None:
        super().__init__(message, remedy)
        self.code: FileCode = code


class JobNotFound(SandboxError):
    """No job of that name: never started here, forgotten, ended with an earlier sandbox, or its slot was killed."""


class TooManyJobs(SandboxError):
    """All places for jobs are taken by such that run."""


class NotOffered(SandboxError):
    """Something that other kinds have: background jobs, terminals."""
