"""Principals: who a token is. The operator's and the agent's lie in 0600 files, a session's is kept hashed."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Role = Literal["operator", "agent", "session"]
ROLES_ON_DISK: Final[tuple[Role, ...]] = ("operator", "agent")


@dataclass(frozen=True, slots=True)
class Principal:
    """The operator may do everything; the agent what it opened; a session token that session."""

    role: Role
    session_id: str | None = None

    @property
    def name(self) -> str:
        return self.session_id or self.role

    def may_see(self, session_id: str, opened_by: str) -> bool:
        """Whether a session (and all in it) exists for this principal."""
        match self.role:
            case "operator":
                return True
            case "agent":
                return opened_by == "agent"
            case "session":
                return session_id == self.session_id


def digest(token: str) -> str:
    """How tokens are kept; they are random, so a plain hash is enough."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def new_token(role: Role) -> str:
    """256 random bits behind a prefix that secret scanners can know."""
    return f"sandgate_{role}_{secrets.token_urlsafe(32)}"


class Tokens:
    """The operator's and the agent's tokens; `SANDGATE_OPERATOR_TOKEN` and `SANDGATE_AGENT_TOKEN` come first."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._digests = {
            role: digest(environment.get(f"SANDGATE_{role.upper()}_TOKEN") or self.stored(role))
            for role in ROLES_ON_DISK
        }

    def stored(self, role: Role) -> str:
        """The token in the state folder, made at the first use."""
        file = self.folder / role
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            token = new_token(role)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(f"{token}\n")
            return token

    def role(self, token: str) -> Role | None:
        """Whose token it is; compares in constant time."""
        given, found = digest(token), None
        for role, known in self._digests.items():
            if hmac.compare_digest(given, known):
                found = role
        return found
