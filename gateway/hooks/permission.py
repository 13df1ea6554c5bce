"""Permissions: which tools a session may use. Advice about intent; the sandbox is the boundary."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from gateway.errors import Unprocessable
from gateway.matching import matches
from gateway.models import Wire

Mode = Literal["auto", "deny"]
STRICTNESS: Final = {"auto": 0, "deny": 1}


class PermissionRule(Wire):
    """`otherwise` is the outcome for the tools (names or globs) that this rule matches."""

    tools: tuple[str, ...] = Field(min_length=1)
    otherwise: Mode


class PermissionPolicy(Wire):
    """The first rule that matches a tool decides; `otherwise` decides where none does."""

    otherwise: Mode = "auto"
    rules: tuple[PermissionRule, ...] = ()

    def decide(self, tool: str) -> Mode:
        for rule in self.rules:
            if matches(tool, rule.tools):
                return rule.otherwise
        return self.otherwise


@dataclass(frozen=True, slots=True)
class Permissions:
    """The profile's policy and the session's own; of the two outcomes the stricter holds."""

    policies: tuple[PermissionPolicy, ...]

    def decide(self, tool: str) -> Mode:
        return max((policy.decide(tool) for policy in self.policies), key=STRICTNESS.__getitem__, default="auto")


_POLICY: TypeAdapter[PermissionPolicy | Mode] = TypeAdapter(PermissionPolicy | Mode)


def session_policy(value: Any) -> PermissionPolicy:
    """Read a session's `permission`: a mode or a policy. Raises Unprocessable naming what is wrong."""
    if value == "ask" or (isinstance(value, dict) and "ask" in str(value.get("otherwise"))):
        raise Unprocessable(
            "permission: 'ask' needs approvals, which this version does not have",
            "Use 'auto', 'deny' or rules with these outcomes.",
        )
    if isinstance(value, str) and value not in STRICTNESS:
        raise Unprocessable("permission: no such mode", "Give 'auto', 'deny' or a policy with rules.")
    try:
        parsed = _POLICY.validate_python(value)
    except ValidationError as error:
        raise Unprocessable(
            f"permission: {error.errors()[0]['msg']}",
            "Give 'auto', 'deny' or {otherwise, rules: [{tools, otherwise}]}.",
        ) from error
    return PermissionPolicy(otherwise=parsed) if isinstance(parsed, str) else parsed
