"""Upstreams: MCP servers whose tools are offered as ours. Each session has instances of its own.

What a server lists is asked once, kept in the journal, and looked at again whenever a session first uses it: a tool
whose description or schema has changed meanwhile is held back until the operator accepts it.
"""

import hashlib
import importlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from pydantic import TypeAdapter, ValidationError

from gateway.errors import NotFound, SettingsError, Unavailable
from gateway.journal import Journal, UpstreamRow
from gateway.matching import matches
from gateway.models import ToolDefinition, Wire
from gateway.toolbox import Toolbox
from sandboxes import Sandbox

if TYPE_CHECKING:  # the SDK costs 0.8 s to import, which only who uses an upstream should pay
    from gateway.upstream_link import Link

logger = logging.getLogger(__name__)

SHARED: Final = ""
"""Stands for all sessions, where a server says that it keeps no state."""


class Offered(Wire):
    """A tool of a server: its name there, and what we show of it."""

    remote: str
    definition: ToolDefinition


@dataclass(frozen=True, slots=True)
class Upstream:
    """A configured server: a `command` in the session's sandbox, or a `url` that the gateway reaches."""

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ("*",)
    timeout_seconds: float = 60.0
    stateless: bool = False
    prefix: str = ""

    @property
    def digest(self) -> str:
        """What its list of tools depends on; a new one asks it again."""
        parts = [self.name, self.command, self.url, sorted(self.env.items()), self.tools, self.prefix]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_TOOLS: Final = TypeAdapter(tuple[Offered, ...])
OpenSandbox = Callable[[], Awaitable[Sandbox]]
Register = Callable[[Upstream, Offered], None]


@dataclass(slots=True)
class _Held:
    """One connection, and what it listed when it was made."""

    link: "Link"
    listed: tuple[Offered, ...]


class Upstreams:
    """All configured servers. Use it inside `run()`, which owns the connections. `register` makes a tool of what is
    offered and puts it into the toolbox."""

    def __init__(self, upstreams: Iterable[Upstream], journal: Journal, toolbox: Toolbox, register: Register) -> None:
        self._upstreams = {one.name: one for one in upstreams}
        self._journal = journal
        self._toolbox = toolbox
        self._register = register
        self._rows: dict[str, UpstreamRow] = {}
        self._accepted: dict[str, tuple[Offered, ...]] = {}
        self._held: dict[tuple[str, str], _Held] = {}
        self._locks: dict[tuple[str, str], anyio.Lock] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Take up the lists that earlier processes were given; end all connections at the end."""
        for row in await self._journal.upstreams():
            upstream = self._upstreams.get(row.name)
            if upstream is not None and row.config == upstream.digest:
                self._rows[row.name] = row
                self._offer(upstream, row)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def prepare(self, session_id: str, names: Sequence[str], sandbox: OpenSandbox) -> None:
        """Have the list of each of these servers; only one that never was asked is started. Raises Unavailable."""
        for name in names:
            if name not in self._rows:
                await self.link(session_id, self._upstreams[name], sandbox)

    async def link(self, session_id: str, upstream: Upstream, sandbox: OpenSandbox) -> "tuple[Link, frozenset[str]]":
        """The session's connection, made at its first use and again after it was lost, and the names of tools that are
        held back. Raises Unavailable."""
        key = (SHARED if upstream.stateless else session_id, upstream.name)
        async with self._locks.setdefault(key, anyio.Lock()):
            held = self._held.get(key)
            if held is None or not held.link.alive:
                held = self._held[key] = await self._connect(upstream, sandbox)
            accepted = self._accepted[upstream.name]
            return held.link, frozenset(one.remote for one in held.listed if one not in accepted)

    async def _connect(self, upstream: Upstream, sandbox: OpenSandbox) -> _Held:
        module = await anyio.to_thread.run_sync(importlib.import_module, "gateway.upstream_link")
        assert self._tasks is not None  # inside run()
        if upstream.command:
            streams = module.inside(await sandbox(), upstream.command, upstream.env)
        else:
            streams = module.over_http(upstream.url, upstream.headers)
        link: Link = module.Link(upstream.name, streams)
        try:
            await self._tasks.start(link.own)
        except module.UpstreamDown as error:
            raise Unavailable(error.message, error.remedy, code="upstream_unavailable") from error
        listed = tuple(_offers(upstream, link.tools))
        self._compare(upstream, listed)
        return _Held(link, listed)

    def _compare(self, upstream: Upstream, listed: tuple[Offered, ...]) -> None:
        """Accept the first list; of a later one that differs keep what the operator may accept."""
        row = self._rows.get(upstream.name)
        if row is None:
            row = UpstreamRow(upstream.name, upstream.digest, _TOOLS.dump_json(listed).decode())
            self._offer(upstream, row)
            self._save(row)
        elif listed != self._accepted[upstream.name]:
            logger.warning("upstream %s lists other tools than were accepted", upstream.name)
            self._save(UpstreamRow(row.name, row.config, row.accepted, _TOOLS.dump_json(listed).decode()))

    def _save(self, row: UpstreamRow) -> None:
        self._journal.save_upstream(row)
        self._rows[row.name] = row

    def _offer(self, upstream: Upstream, row: UpstreamRow) -> None:
        self._accepted[row.name] = accepted = _TOOLS.validate_json(row.accepted)
        for one in accepted:
            try:
                self._register(upstream, one)
            except SettingsError as error:
                raise Unavailable(error.message, error.remedy, code="upstream_unavailable") from error

    def end(self, session_id: str) -> None:
        """Close the connections of a session."""
        for key in [key for key in self._held if key[0] == session_id]:
            self._held.pop(key).link.close()
            self._locks.pop(key, None)

    # for the operator

    def state(self) -> list[tuple[Upstream, tuple[Offered, ...], tuple[Offered, ...]]]:
        """Each server, the tools that are accepted, and those that it listed since and that are not."""
        found = []
        for upstream in self._upstreams.values():
            row = self._rows.get(upstream.name)
            accepted = self._accepted.get(upstream.name, ())
            waiting = _TOOLS.validate_json(row.offered) if row and row.offered else ()
            found.append((upstream, accepted, tuple(one for one in waiting if one not in accepted)))
        return found

    def accept(self, name: str) -> None:
        """Let what the server lists now stand for what it listed first. Raises NotFound where nothing waits."""
        row = self._rows.get(name)
        if row is None or row.offered is None:
            raise NotFound(f"nothing waits to be accepted from {name!r}", "GET /v1/upstreams lists what there is.")
        for one in self._accepted[name]:
            self._toolbox.remove(one.definition.name)
        accepted = UpstreamRow(row.name, row.config, row.offered)
        self._save(accepted)
        self._offer(self._upstreams[name], accepted)


def _offers(upstream: Upstream, tools: Sequence[Any]) -> Iterable[Offered]:
    """The tools that the operator lets through, under our names; one whose name or schema is none is left out."""
    for tool in tools:
        if not matches(tool.name, upstream.tools):
            continue
        hints = tool.annotations
        try:
            yield Offered(
                remote=tool.name,
                definition=ToolDefinition(
                    name=f"{upstream.prefix}{tool.name}",
                    description=tool.description or tool.name,
                    parameters=tool.input_schema,
                    source="upstream",
                    read_only=bool(hints and hints.read_only_hint),
                    destructive=not (hints and hints.destructive_hint is False),
                    open_world=not (hints and hints.open_world_hint is False),
                ),
            )
        except ValidationError:
            logger.warning("upstream %s: a tool with an impossible name is left out", upstream.name)
