"""RedactSecrets: what looks like a credential, and what is known to be one, is replaced before anything leaves."""

import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

import anyio.to_thread
import re2

from gateway.errors import SettingsError
from gateway.hooks.hook import Continue, Hook, HookContext
from gateway.journal import Terminal
from gateway.models import Stream, ToolResult

LINE_BYTES: Final = 16 * 1024
"""A line that has not ended is held back up to this length, since it may end in the beginning of a secret."""
SECRET_BYTES: Final = 64 * 1024
"""A match that may still grow is held back up to this length."""
SHORTEST_VALUE: Final = 8
"""Known values with fewer characters would be found everywhere."""
MOST_PATTERN: Final = 1000
_HERE_BYTES: Final = 32 * 1024
_PEM_NAME: Final = "-----{} [A-Z ]{{0,30}}PRIVATE KEY-----"
_PEM_BREAK: Final = r"(?:\r?\n|\\n){1,2}"
_PEM_LINE: Final = rf"{_PEM_BREAK}(?:[A-Za-z-]{{1,30}}: [^\r\n\\]{{1,100}}|[A-Za-z0-9+/=]{{16,80}})"
_PEM_END: Final = rf"(?:{_PEM_BREAK}[A-Za-z0-9+/=]{{1,15}})?{_PEM_BREAK}{_PEM_NAME.format('END')}"
URL: Final = "password-in-url"
PATTERNS: Final[Mapping[str, str]] = {
    "aws-access-key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "github-token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "gitlab-token": r"\bgl(?:pat|dt|rt|cbt|ptt)-[A-Za-z0-9_-]{20,}",
    "google-api-key": r"\bAIza[A-Za-z0-9_-]{35}",
    "huggingface-token": r"\bhf_[A-Za-z0-9]{30,}",
    "json-web-token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "model-api-key": r"\bsk-(?:(?:ant|proj|svcacct|admin|or)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{32,})",
    "npm-token": r"\bnpm_[A-Za-z0-9]{36}",
    URL: r"://[^\s:/@\"'\\]{1,200}:[^\s:/@\"'\\]{3,}@",
    "private-key": rf"{_PEM_NAME.format('BEGIN')}(?:{_PEM_LINE})*(?:{_PEM_END})?",
    "pypi-token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "slack-token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "stripe-key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{20,}",
}
"""What is looked for in any case, as its makers document it; RE2's syntax, so that no output makes a search slow."""


class RedactSecrets(Hook):
    """Puts `[redacted: NAME]` in the place of each secret: in output as it flows (so also in what is streamed, stored,
    previewed and shown), in the arguments, reasons and errors of the record, and in structured results.

    `values_from_env` names variables of the gateway whose values are secrets; they are found as they stand, within
    JSON and in URLs. `patterns` (RE2) come beside the built-in ones. A secret that is written differently (base64, in
    pieces) is not found. Output is passed on line by line; a line without an end after 16 KiB. Raises SettingsError for
    a variable that is not set or too short, and for a bad pattern.
    """

    def __init__(self, *, values_from_env: Sequence[str] = (), patterns: Mapping[str, str] | None = None) -> None:
        self.values_from_env = tuple(values_from_env)
        self.patterns = dict(patterns or {})
        values = {name: _value(name) for name in self.values_from_env}
        spellings = [(name, one.encode()) for name, value in values.items() for one in _spellings(value)]
        spellings.sort(key=lambda one: -len(one[1]))  # the longer one first, where one begins with the other
        self._broken_values = [value for _, value in spellings if b"\n" in value or b"\r" in value]
        named = [(name, re2.escape(value)) for name, value in spellings]
        named += [(name, _checked(name, one)) for name, one in {**PATTERNS, **self.patterns}.items()]
        self._any = _compiled(b"|".join(b"(?:%s)" % pattern for _, pattern in named))
        self._each = [(name, _compiled(pattern)) for name, pattern in named]

    def to_state(self) -> dict[str, Any]:
        """What makes it again; the secrets are not in it."""
        return {"values_from_env": list(self.values_from_env), "patterns": self.patterns}

    async def post_tool_call(self, ctx: HookContext, result: ToolResult) -> Continue:
        """The content came through `filter_output`; what a tool returns beside it did not."""
        if result.structured is None and result.error is None and not result.notes:
            return Continue()
        return Continue(result=self.result(result))

    async def filter_output(
        self, ctx: HookContext, stream: Stream, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        held = b""
        async for chunk in chunks:
            held += chunk
            if len(held) > _HERE_BYTES:
                done, held = await anyio.to_thread.run_sync(self._split, held)
            else:
                done, held = self._split(held)
            if done:
                yield done
        if held:
            yield self.redacted(held)

    def redacted(self, data: bytes) -> bytes:
        """All of it, with every secret replaced."""
        return b"".join(self._pieces(data, list(self._matches(data)), len(data)))

    def value(self, value: Any) -> Any:
        """A JSON value with every secret in its texts replaced, names included; itself where there is none."""
        match value:
            case str():
                data = value.encode("utf-8", "surrogatepass")
                return value if self._any.search(data) is None else self.redacted(data).decode(errors="replace")
            case dict():
                return {self.value(name): self.value(one) for name, one in value.items()}
            case list() | tuple():
                return [self.value(one) for one in value]
        return value

    def result(self, result: ToolResult) -> ToolResult:
        error = result.error
        if error is not None:
            error = error.model_copy(update={"message": self.value(error.message)})
        notes = tuple(self.value(result.notes))
        return result.model_copy(update={"structured": self.value(result.structured), "error": error, "notes": notes})

    def _matches(self, data: bytes) -> Iterator[tuple[int, int]]:
        for match in self._any.finditer(data):
            yield match.start(), match.end()

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """What can be passed on, redacted; and what must wait for the bytes that follow it."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - cut > LINE_BYTES:
            cut = len(data) - LINE_BYTES
        cut = self._before_broken_value(data, cut)
        passed = []
        for start, end in self._matches(data):
            if start >= cut:
                break
            may_grow = cut - end <= 4 and not data[end:cut].strip(b"\r\n")  # the next line may belong to it
            if may_grow and len(data) - start <= SECRET_BYTES:
                cut = start
                break
            passed.append((start, end))
            cut = max(cut, end)
        return b"".join(self._pieces(data, passed, cut)), data[cut:]

    def _before_broken_value(self, data: bytes, cut: int) -> int:
        """Before the first lines of a known value that has several."""
        for value in self._broken_values:
            for length in range(min(len(value) - 1, cut), 0, -1):
                if data.endswith(value[:length], 0, cut):
                    cut -= length
                    break
        return cut

    def _pieces(self, data: bytes, matches: Sequence[tuple[int, int]], end: int) -> Iterator[bytes]:
        at = 0
        for start, stop in matches:
            yield data[at:start]
            yield self._marker(data[start:stop])
            at = stop
        yield data[at:end]

    def _marker(self, secret: bytes) -> bytes:
        name = next((name for name, pattern in self._each if pattern.search(secret)), "secret")
        marker = b"[redacted: %s]" % name.encode()
        return b"://%s@" % marker if name == URL else marker


class Redaction:
    """What the record of a call must not hold, by every RedactSecrets of a gateway, whatever tools it is for."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = [hook for hook in dict.fromkeys(hooks) if isinstance(hook, RedactSecrets)]

    def value(self, value: Any) -> Any:
        for hook in self._hooks:
            value = hook.value(value)
        return value

    def terminal(self, end: Terminal) -> Terminal:
        """The end of a call, for its record and its answer alike; what was called is the journal's to redact."""
        for hook in self._hooks:
            decisions = [one.model_copy(update={"reason": hook.value(one.reason)}) for one in end.decisions]
            end = replace(end, result=hook.result(end.result), decisions=decisions)
        return end


def _value(variable: str) -> str:
    value = os.environ.get(variable)  # here, since a configuration must not hold secrets
    if value is None or len(value) < SHORTEST_VALUE:
        what = "is not set" if value is None else f"has fewer than {SHORTEST_VALUE} characters"
        raise SettingsError(f"RedactSecrets: the variable {variable} {what}", "Set it, or take it out.")
    return value


def _spellings(value: str) -> list[str]:
    in_json = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
    return list(dict.fromkeys([value, *in_json, quote(value, safe="")]))


def _checked(name: str, pattern: str) -> bytes:
    """The pattern as bytes. Raises SettingsError for one that RE2 does not know, that is too long, or finds nothing."""
    try:
        found = _compiled(pattern.encode()).search(b"")
    except re2.error as error:
        reason = error.args[0] if error.args else error
        told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise SettingsError(f"RedactSecrets: {name}: not a pattern of RE2: {told}", "See its syntax.") from error
    if found is not None or len(pattern) > MOST_PATTERN:
        raise SettingsError(
            f"RedactSecrets: {name}: the pattern matches nothing at all, or has over {MOST_PATTERN} characters",
            "Write one that needs at least one character.",
        )
    return pattern.encode()


def _compiled(pattern: bytes) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # a search that captures is six times slower
    options.encoding = re2.Options.Encoding.LATIN1  # output is bytes
    return re2.compile(pattern, options)
