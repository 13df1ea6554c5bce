"""What went wrong, in the words of a call's status: every foreign error is mapped here, once."""

import errno
import logging
from collections.abc import Sequence

from gateway.errors import Problem, SandgateError, Unavailable, Unprocessable
from gateway.hooks.permission import Ruling
from gateway.journal import pending_fault
from gateway.models import Approval, Fault, ToolCall, ToolDefinition, ToolResult
from gateway.pipeline import Stopped
from gateway.tools.tool import Outcome
from sandboxes import (
    CommandRefused,
    FileRefused,
    JobNotFound,
    NotOffered,
    SandboxError,
    SandboxHookFailed,
    SandboxLost,
    SandboxUnavailable,
    TooManyJobs,
)
from stores import StoreError, StoreUnavailable

logger = logging.getLogger(__name__)


def without_output(call: ToolCall, status: str, fault: Fault) -> ToolResult:
    return ToolResult.model_validate(
        {"id": call.id, "call_id": call.call_id, "tool": call.tool, "status": status, "error": fault}
    )


def invalid(code: str, message: str, remedy: str) -> Outcome:
    return Outcome("invalid", code=code, message=message, remedy=remedy)


def unknown_tool(call: ToolCall, tools: Sequence[ToolDefinition]) -> Outcome:
    return invalid(
        "unknown_tool",
        f"no such tool: {call.tool[:200]}",
        f"This session has: {', '.join(one.name for one in tools)}.",
    )


def stopped_outcome(stopped: Stopped) -> Outcome:
    match stopped.status:
        case "skipped":
            return Outcome("skipped", code="tool_skipped", message=stopped.reason)
        case "invalid":
            return Outcome(
                "invalid",
                code="invalid_arguments",
                message=stopped.reason,
                remedy="The hook is at fault, not the caller.",
            )
        case "hook":
            return Outcome(
                "hook",
                code="hook_failed",
                message=f"the tool did not run, a hook broke: {stopped.reason}",
                remedy='Mend the hook, or declare it on_failure = "open".',
            )


def denied_outcome(call: ToolCall, ruling: Ruling) -> Outcome:
    rule = f" by the rule {ruling.pattern!r}" if ruling.pattern else ""
    return Outcome(
        "denied",
        code="permission_denied",
        message=f"not allowed here{rule}: {call.tool}" if rule else f"not allowed here: {call.tool}",
        remedy="Do it another way, or ask the operator.",
    )


def unapproved_outcome(approval: Approval) -> Outcome:
    """What a call is told that asked and may not run, or not yet."""
    match approval.state:
        case "waiting":
            fault = pending_fault(approval.id)
            return Outcome(
                "pending",
                code=fault.code,
                message=fault.message,
                remedy=fault.remedy,
                structured={"approval_id": approval.id},
            )
        case "expired":
            return Outcome(
                "expired",
                code="approval_expired",
                message=f"nobody decided in time: {approval.id}",
                remedy="That is no rejection; the same call asks again.",
            )
    why = f": {approval.reason}" if approval.reason else ""
    return Outcome(
        "denied",
        code="approval_denied",
        message=f"a person rejected this ({approval.id}){why}",
        remedy="Do it another way.",
    )


def failed_outcome(error: Exception, call: ToolCall) -> Outcome:
    """What an exception out of a tool means."""
    match error:
        case SandboxLost():
            files = "its files are lost" if error.files_lost else "its files are still there"
            return Outcome(
                "sandbox_lost",
                code="sandbox_lost",
                message=f"{error.message}; {files}",
                remedy="The next call gets a new sandbox.",
            )
        case SandboxUnavailable():
            return Outcome("engine", code="sandbox_unavailable", message=error.message, remedy=error.remedy)
        case CommandRefused(code="E2BIG" | "EINVAL"):
            return invalid("invalid_arguments", error.message, error.remedy)
        case CommandRefused(code="EAGAIN"):
            return Outcome("pids", code="command_failed", message=error.message, remedy=error.remedy)
        case CommandRefused():
            return Outcome("failed", code="command_failed", message=error.message, remedy=error.remedy)
        case FileRefused(code="disk_full"):
            return Outcome("disk", code="disk_full", message=error.message, remedy=error.remedy)
        case FileRefused():
            return Outcome("failed", code=error.code, message=error.message, remedy=error.remedy)
        case NotOffered():
            return invalid("unsupported_tool", error.message, error.remedy)
        case JobNotFound():
            return Outcome("failed", code="missing_job", message=error.message, remedy=error.remedy)
        case TooManyJobs():
            return Outcome("failed", code="too_many_jobs", message=error.message, remedy=error.remedy)
        case Problem(code="session_closed"):
            return Outcome("cancelled", code="cancelled", message=error.message, remedy=error.remedy)
        case Problem():
            return Outcome("failed", code=error.code, message=error.message, remedy=error.remedy)
        case TimeoutError():
            return Outcome("timeout", code="tool_timeout", message="the tool did not end within its limit")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return Outcome(
                "disk",
                code="disk_full",
                message="the gateway's own disk is full",
                remedy="Free space in the state folder.",
            )
    logger.error("tool %s failed in call %s of session %s", call.tool, call.id, call.session_id, exc_info=error)
    return Outcome(
        "failed",
        code="capability_execution_failed",
        message=f"the tool raised {type(error).__name__}",
        remedy="The gateway's log has the reason.",
    )


def opening_problem(error: BaseException) -> BaseException:
    match error:
        case SandboxHookFailed():
            return Unavailable(error.message, error.remedy, code="sandbox_hook_failed")
        case StoreUnavailable():
            return Unavailable(f"seed: {error.message}", error.remedy, code="store_unavailable")
        case StoreError():
            return Unprocessable(f"seed: {error.message}", error.remedy)
        case SandboxUnavailable():
            return Unavailable(f"sandbox unavailable: {error.message}", error.remedy, code="sandbox_unavailable")
        case SandboxError():
            return Unprocessable(
                f"the sandbox could not be prepared: {error.message}",
                error.remedy,
                code=getattr(error, "code", "sandbox_lost"),
            )
        case SandgateError():
            return error
    return error
