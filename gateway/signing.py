"""SignedUrls: links that read one stored result without a token, until they expire or are revoked."""

import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from itsdangerous import BadData, URLSafeSerializer

from gateway.errors import Gone, NotFound
from gateway.results import SessionResults
from gateway.shelf import Shelf

MOST_SECONDS: Final = 7 * 86400


@dataclass(frozen=True, slots=True)
class SignedLink:
    """What stands at the end of a signed URL; `expires` is in seconds since 1970."""

    token: str
    expires: float


class SignedUrls:
    """A link holds a session, a key, its end and the session's generation, signed with a secret of this gateway.

    Revoking the links of a session makes its generation another one.
    """

    def __init__(self, secret: str, shelf: Shelf) -> None:
        self._signer = URLSafeSerializer(
            secret,
            salt="sandgate.signed-url",
            signer_kwargs={"digest_method": hashlib.sha256, "key_derivation": "hmac"},
        )
        self._shelf = shelf

    async def sign(self, session_id: str, reference: str, seconds: float) -> SignedLink:
        """A link to a result, which ends with the result at the latest. Raises NotFound, Gone."""
        row = await SessionResults(session_id, self._shelf).find(reference)
        expires = min(time.time() + min(seconds, MOST_SECONDS), row.expires)
        generation = await self._shelf.journal.url_generation(session_id)
        return SignedLink(self._signer.dumps([session_id, row.key, int(expires), generation]), int(expires))

    async def open(self, token: str) -> tuple[SessionResults, str]:
        """The results that a link leads to, and the key. Raises NotFound for what was not signed here, else Gone."""
        try:
            session_id, key, expires, generation = self._signer.loads(token)
        except BadData:
            raise NotFound("no such link", "Ask for a new one.") from None
        if expires <= time.time():
            raise Gone("this link has expired", "Ask for a new one.")
        if generation != await self._shelf.journal.url_generation(session_id):
            raise Gone("this link was revoked", "Ask for a new one.")
        return SessionResults(session_id, self._shelf), key

    def revoke(self, session_id: str) -> None:
        """End all links to results of a session."""
        self._shelf.journal.revoke_urls(session_id)


def signing_secret(folder: Path) -> str:
    """The secret of a state folder, made at the first use; without the file all links are void."""
    file = folder / "signing-key"
    try:
        return file.read_text()
    except FileNotFoundError:
        secret = secrets.token_urlsafe(32)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secret)
        return secret
