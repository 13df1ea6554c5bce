"""Where tool calls run: sandboxes, their processes and their files."""

from sandboxes.archive import Unpacked, file_chunks, pack, unpack
from sandboxes.capture import Capture
from sandboxes.errors import (
    FILE_CODES,
    CommandRefused,
    FileCode,
    FileRefused,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)
from sandboxes.hooks import SandboxContext, SandboxHook
from sandboxes.local import LocalKind, LocalSandbox
from sandboxes.none import NoSandboxKind
from sandboxes.sandbox import (
    CHUNK_BYTES,
    HOME,
    WORKSPACE,
    Entry,
    ExecResult,
    Exit,
    Limits,
    Listing,
    Probe,
    Process,
    Sandbox,
    SandboxKind,
    SandboxSpec,
    Sink,
)
from sandboxes.virtual import VirtualKind, VirtualSandbox

__all__ = [
    "CHUNK_BYTES",
    "FILE_CODES",
    "HOME",
    "WORKSPACE",
    "Capture",
    "CommandRefused",
    "Entry",
    "ExecResult",
    "Exit",
    "FileCode",
    "FileRefused",
    "Limits",
    "Listing",
    "LocalKind",
    "LocalSandbox",
    "NoSandboxKind",
    "Probe",
    "Process",
    "Sandbox",
    "SandboxContext",
    "SandboxError",
    "SandboxHook",
    "SandboxKind",
    "SandboxLost",
    "SandboxSpec",
    "SandboxUnavailable",
    "Sink",
    "Unpacked",
    "VirtualKind",
    "VirtualSandbox",
    "file_chunks",
    "pack",
    "unpack",
]
