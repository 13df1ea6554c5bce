"""A store as Haystack's `ToolResultStore` (haystack-ai 3.x), which its `ToolResultOffloadHook` writes to.

Haystack itself is not imported; its protocol is four methods. They block, as Haystack's do.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Final, Self

from stores.backend import blocks
from stores.errors import KeyRefused, translated
from stores.keys import check_segment, file_key
from stores.opening import open_backend

SECRETS: Final = frozenset({"key", "secret", "token", "password", "passphrase", "connection_string", "account_key"})
_TEXT: Final = "text"
_BYTES: Final = "bytes"


class HaystackResultStore:
    """Results of one scope (a user, a session, a run) below any URI that `Store.from_uri` opens.

    Give each run its own, in the agent's `hook_context["tool_result_store"]`. Equal keys are stored beside each other,
    never over each other; text comes back as text and bytes as bytes, whatever they hold. A reference of another scope
    is KeyRefused, and nothing is asked of the store. In memory the results end with this object.
    """

    supports_binary_content = True

    def __init__(self, uri: str, scope: str, options: Mapping[str, Any] | None = None) -> None:
        self._uri = uri
        self._scope = check_segment(scope)
        self._options = dict(options or {})
        self._backend = open_backend(uri, self._options)

    def write(self, *, key: str, content: str | bytes) -> str:
        """Store the content under a new name made of the key; returns what `read` takes. Raises StoreError."""
        text = isinstance(content, str)
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        name = f"{self._scope}/{_TEXT if text else _BYTES}/{secrets.token_hex(8)}/{file_key(key)}"
        with translated(writing=True):
            draft = self._backend.draft(None)
            try:
                draft.write(data)
                draft.publish(name)
            finally:
                draft.discard()
        return f"{self._base}{name}"

    def read(self, reference: str) -> str | bytes:
        """What was written. Raises KeyRefused for what is no reference of this scope, NotFound for what is gone."""
        name = reference.removeprefix(self._base)
        scope, _, rest = name.partition("/")
        kind, _, key = rest.partition("/")
        if not reference.startswith(self._base) or scope != self._scope or kind not in (_TEXT, _BYTES):
            raise KeyRefused("no reference of this store's scope")
        for segment in key.split("/"):
            check_segment(segment)
        with translated():
            reader = self._backend.open(name)
            try:
                data = b"".join(blocks(reader))
            finally:
                reader.close()
        return data.decode("utf-8", "surrogatepass") if kind == _TEXT else data

    def close(self) -> None:
        """Let go of the connection; results in memory are gone."""
        self._backend.close()

    @property
    def _base(self) -> str:
        """What every reference begins with: the URI without a password; memory has none that others could open."""
        return (self._backend.uri("") or "memory:///").rstrip("/") + "/"

    def to_dict(self) -> dict[str, Any]:
        """Haystack's form. Raises ValueError where options hold credentials: take these from the environment."""
        if found := SECRETS & self._options.keys():
            raise ValueError(f"credentials are not written down ({', '.join(sorted(found))}): use the environment")
        parameters = {"uri": self._uri, "scope": self._scope, "options": self._options}
        return {"type": f"{type(self).__module__}.{type(self).__qualname__}", "init_parameters": parameters}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The store that `to_dict` described."""
        return cls(**data["init_parameters"])
