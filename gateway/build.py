"""From settings to a Gateway: the only place that chooses concrete classes, imports strangers' code and locks state."""

import fcntl
import importlib
import inspect
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Final

from gateway.approval_rows import ApprovalRows
from gateway.approvals import Approvals, ApprovalTimes
from gateway.errors import NotFound, SettingsError, StateError, Unprocessable
from gateway.execution import CallRunner
from gateway.gateway import Gateway, GatewayOptions, Profiles
from gateway.hooks.hook import AGENT_POINTS, FILTER, POINTS, Hook
from gateway.hooks.offload import Offload, Rule, Rules
from gateway.hooks.permission import PermissionPolicy, Permissions, session_policy
from gateway.hooks.redact import Redaction
from gateway.hooks.registered import Registered
from gateway.inputs import SessionInput, check_distinct, parsed_inputs
from gateway.journal import Journal, SessionRow
from gateway.matching import matches
from gateway.models import LimitsRequest, Network, SessionRequest, ToolDefinition
from gateway.pipeline import Pipeline
from gateway.principals import Principal, Tokens
from gateway.serialization import from_dict, resolve, to_dict
from gateway.sessions import SandboxPlaces, Session, SessionLimits, Sessions
from gateway.settings import (
    HookSettings,
    OffloadRule,
    PoolSettings,
    Profile,
    ProfileLimits,
    SandboxHookSettings,
    Settings,
    ToolSettings,
    UpstreamSettings,
)
from gateway.shelf import Shelf
from gateway.signing import SignedUrls, signing_secret
from gateway.spool import SpoolFolder
from gateway.text import nearest
from gateway.toolbox import Toolbox
from gateway.tools.functions import FunctionTool
from gateway.tools.results import RESULT_TOOLS
from gateway.tools.sandbox import SANDBOX_TOOLS, CommandTool, need_of
from gateway.tools.tool import Tool
from gateway.tools.upstream import UpstreamTool
from gateway.tracing import configured_spans
from gateway.upstreams import Offered, Upstream, Upstreams
from gateway.workspace import WorkspaceHooks, check_seed
from sandboxes import (
    Limits,
    LocalKind,
    NoSandboxKind,
    Pool,
    PoolSize,
    SandboxHook,
    SandboxKind,
    SandboxSpec,
    VirtualKind,
)
from sandboxes.container import DEFAULT_IMAGE
from stores import (
    AlwaysOffload,
    NeverOffload,
    OffloadOverBytes,
    OffloadOverChars,
    OffloadOverLines,
    OffloadPolicy,
    ResultStore,
    Store,
    StoreError,
)

OWN_PACKAGES: Final = ("gateway", "sandboxes", "stores")


@dataclass(frozen=True, slots=True)
class State:
    """One gateway's folder. Held by a lock as long as `lock` is open."""

    folder: Path
    instance: str
    lock: int

    def release(self) -> None:
        os.close(self.lock)


def open_state(folder: Path) -> State:
    """Make the state folder (0700) where missing, and lock it. Raises StateError where another gateway holds it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}", "Name a folder of your own with --state-dir.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StateError(
            f"{folder}: in use by another gateway", "Stop that one, or name another folder with --state-dir."
        ) from None
    return State(folder, _instance(folder), lock)


def _instance(folder: Path) -> str:
    """The name of this gateway on the machine, made once: what it marks as its own."""
    file = folder / "instance"
    if not file.exists():
        file.write_text(secrets.token_hex(8))
    return file.read_text().strip()


class ConfiguredProfiles(Profiles):
    """The profiles of the settings. A session may narrow one, never widen it."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        kinds: Mapping[str, SandboxKind],
        places: SandboxPlaces,
        hooks: Sequence[Registered],
        toolbox: Toolbox,
        workspace: WorkspaceHooks,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._kinds = kinds
        self._places = places
        self._pools = {
            name: self._pool(name, profile) for name, profile in settings.profiles.items() if profile.pool is not None
        }
        self._hooks = hooks
        self._toolbox = toolbox
        self._workspace = workspace

    def kinds(self) -> Mapping[str, SandboxKind]:
        return self._kinds

    def pools(self) -> Sequence[Pool]:
        return tuple(self._pools.values())

    def _pool(self, name: str, profile: Profile) -> Pool:
        kind, size = self._kinds[kind_key(profile)], profile.pool or PoolSettings()
        if not kind.poolable:
            raise SettingsError(f"profiles.{name}.pool: the kind {profile.kind!r} has none", "Take the pool out.")
        spec = self._spec("", profile, profile.limits, profile.env, profile.network)
        return Pool(kind, spec, PoolSize(size.min, size.max, size.when_empty), self._places)

    def _spec(
        self,
        session_id: str,
        profile: Profile,
        limits: ProfileLimits,
        env: Mapping[str, str],
        network: Network,
    ) -> SandboxSpec:
        return SandboxSpec(
            session_id,
            Limits(int(limits.memory), limits.cpus, limits.processes, limits.open_files, int(limits.workspace_size)),
            env,
            tuple((self._folder / path).resolve() for path in profile.read_only),
            network,
        )

    def granted(self, principal: Principal, profile: str) -> bool:
        if profile not in self._settings.profiles:
            return False
        return principal.role == "operator" or profile in self._settings.agent.profiles

    def first_granted(self, principal: Principal) -> str:
        for profile in self._settings.agent.profiles:
            if self.granted(principal, profile):
                return profile
        raise NotFound("no profile is granted", "Name one in agent.profiles.", code="no_such_profile")

    def lifetime_seconds(self, request: SessionRequest) -> float:
        """The profile's, or the shorter `ttl_seconds` of the request."""
        most = self._profile(request.profile).lifetime_seconds
        if request.ttl_seconds is not None and request.ttl_seconds > most:
            raise Unprocessable(f"ttl_seconds: {request.ttl_seconds:g} is over the profile's {most:g}")
        return request.ttl_seconds or most

    def _profile(self, name: str) -> Profile:
        try:
            return self._settings.profiles[name]
        except KeyError:
            raise SettingsError(f"the profile {name!r} is not configured any more") from None

    def session(self, row: SessionRow, request: SessionRequest) -> Session:
        profile = self._profile(request.profile)
        limits = narrowed(profile.limits, request.limits)
        policies = [self._settings.policy(profile)]
        if request.permission is not None:
            policies.append(session_policy(request.permission))
            if wrong := unknown_in(policies[-1], self._toolbox):
                raise Unprocessable(f"permission: {wrong}", "Mend the rule, so that it applies.")
        network = request.network or profile.network
        if network == "open" and profile.network == "none":
            raise Unprocessable("network: 'open' is wider than the profile's 'none'")
        kind = self._kinds[kind_key(profile)]
        if not kind.opens and (request.seed or request.collect):
            raise Unprocessable(
                f"{'seed' if request.seed else 'collect'}: the profile {request.profile!r} has no sandbox",
                "Leave it out, or name a profile of another kind.",
                code="no_sandbox",
            )
        tools = self._tools(profile, request, kind, checked=not profile.upstreams)
        return Session(
            row=row,
            request=request,
            kind=kind,
            places=self._places,
            pool=self._pools.get(request.profile),
            spec=self._spec(row.id, profile, limits, {**profile.env, **_callers_env(profile, request)}, network),
            limits=SessionLimits(
                limits.call_seconds,
                limits.max_call_seconds,
                int(limits.output),
                limits.parallel_calls,
                int(limits.results_size),
            ),
            idle_seconds=profile.idle_seconds,
            tools=tools,
            upstreams=profile.upstreams,
            inputs=parsed_inputs(self._needed_inputs(tools), request.inputs),
            permissions=Permissions(tuple(policies)),
            show_store_uri=profile.show_store_uri,
            raw_stream=profile.stream == "raw",
            sandbox_hooks=self._workspace.of(row, profile, request, int(limits.workspace_size)) if kind.opens else (),
        )

    def refresh(self, session: Session) -> None:
        profile = self._profile(session.request.profile)
        session.offer(self._tools(profile, session.request, session.kind, checked=True))

    def _tools(
        self, profile: Profile, request: SessionRequest, kind: SandboxKind, *, checked: bool
    ) -> tuple[ToolDefinition, ...]:
        offered = tuple(
            one
            for one in self._toolbox.definitions(profile.tools)
            if works_in(tool := self._toolbox.get(one.name), kind)
            and (not isinstance(tool, UpstreamTool) or tool.upstream.name in profile.upstreams)
        )
        if request.tools is None:
            return offered
        if not checked:
            return tuple(one for one in self._toolbox.definitions(request.tools) if one in offered)
        chosen = self._toolbox.definitions(request.tools)
        for pattern in request.tools:
            if not any(one in offered for one in self._toolbox.definitions([pattern])):
                raise Unprocessable(
                    f"tools: {pattern!r} matches no tool of the profile {request.profile!r}",
                    f"It offers: {', '.join(one.name for one in offered)}.",
                )
        return tuple(one for one in chosen if one in offered)

    def _needed_inputs(self, tools: Sequence[ToolDefinition]) -> Iterator[type[SessionInput]]:
        """What the hooks over these tools, and the tools themselves, declare."""
        for hook in self._hooks:
            if AGENT_POINTS.keys() & hook.methods.keys() or any(matches(tool.name, hook.tools) for tool in tools):
                yield from hook.inputs
        for definition in tools:
            if isinstance(tool := self._toolbox.get(definition.name), FunctionTool):
                yield from tool.inputs.values()


def works_in(tool: Tool | None, kind: SandboxKind) -> bool:
    """Whether sessions of that kind can use the tool at all."""
    if tool is None or not tool.needs_sandbox:
        return tool is not None
    return kind.opens and need_of(tool) not in kind.lacks


def narrowed(limits: ProfileLimits, request: LimitsRequest | None) -> ProfileLimits:
    """The profile's limits with the request's, each of which must not be wider."""
    if request is None:
        return limits
    asked = request.model_dump(exclude_none=True)
    for name, value in asked.items():
        most = getattr(limits, name)
        if value > most:
            raise Unprocessable(f"limits.{name}: {value:.15g} is wider than the profile's {most:.15g}")
    return limits.model_copy(update=asked)


def _callers_env(profile: Profile, request: SessionRequest) -> dict[str, str]:
    for name in request.env:
        if name not in profile.env_from_caller:
            raise Unprocessable(
                f"env: {name[:100]!r} may not come from a caller", "The operator allows names with env_from_caller."
            )
    return dict(request.env)


@asynccontextmanager
async def built_gateway(settings: Settings, folder: Path, state: State) -> AsyncIterator[Gateway]:
    """A running Gateway over a locked state folder; `folder` is where relative paths and strangers' modules are."""
    refuse_shadowed_packages()
    check_configuration(settings, folder)
    kinds = build_kinds(settings.profiles.values(), folder, state)
    hooks = build_hooks(settings, folder)
    toolbox = build_toolbox(settings, folder, hooks)
    rules = Rules([Rule(one.tools, build_policy(one, folder)) for one in settings.offload.rules], toolbox.names)
    places = SandboxPlaces(settings.server.live_sandboxes)
    retention = settings.store.retention_hours * 3600
    store = ResultStore(build_store(settings, folder, state))
    redaction = Redaction(one.hook for one in hooks)
    journal = Journal.open(state.folder / "sandgate.db", redaction.value)
    approvals = Approvals(
        ApprovalRows(journal),
        ApprovalTimes(settings.server.approval_wait_seconds, settings.server.approval_expires_seconds),
    )
    shelf = Shelf(store, journal, int(settings.store.size), settings.store.when_full)
    offload = Offload(rules, shelf, preview_characters=settings.offload.preview_chars, retention_seconds=retention)
    workspace = WorkspaceHooks(settings, folder, build_sandbox_hooks(settings, folder), shelf)
    upstreams = build_upstreams(settings, journal, toolbox)
    gateway = Gateway(
        journal=journal,
        sessions=Sessions(settings.server.sessions),
        places=places,
        profiles=ConfiguredProfiles(settings, folder, kinds, places, hooks, toolbox, workspace),
        runner=CallRunner(
            Pipeline(hooks, configured_spans()), toolbox, approvals, offload, shelf, SpoolFolder(state.folder / "spool")
        ),
        approvals=approvals,
        redaction=redaction,
        shelf=shelf,
        urls=SignedUrls(signing_secret(state.folder), shelf),
        upstreams=upstreams,
        options=GatewayOptions(
            replay_seconds=settings.server.replay_seconds,
            stop_seconds=settings.server.stop_seconds,
        ),
    )
    async with gateway.run():
        yield gateway


def build_upstreams(settings: Settings, journal: Journal, toolbox: Toolbox) -> Upstreams:
    """The configured MCP servers, none of them started. Raises SettingsError."""

    def register(upstream: Upstream, offered: Offered) -> None:
        toolbox.add(UpstreamTool(upstream, offered, upstreams))

    upstreams = Upstreams([_upstream(one) for one in settings.upstreams], journal, toolbox, register)
    return upstreams


def _upstream(one: UpstreamSettings) -> Upstream:
    headers = dict(one.headers)
    if one.token_env is not None:
        token = os.environ.get(one.token_env)
        if not token:
            raise SettingsError(
                f"upstreams: {one.name}: {one.token_env} is not set", "Export it before `sandgate serve`."
            )
        headers["authorization"] = f"Bearer {token}"
    return Upstream(
        one.name,
        one.command,
        one.url or "",
        headers,
        one.env,
        one.tools,
        one.timeout_seconds,
        one.stateless,
        f"{one.name}__" if one.prefix is None else one.prefix,
    )


def check_configuration(settings: Settings, folder: Path) -> None:
    """Import all hooks and tools, and look at what profiles name, as the start does. Raises SettingsError."""
    toolbox = build_toolbox(settings, folder, build_hooks(settings, folder))
    Rules([Rule(one.tools, build_policy(one, folder)) for one in settings.offload.rules], toolbox.names)
    for name, policy in settings.permissions.items():
        if wrong := unknown_in(policy, toolbox):
            raise SettingsError(f"permissions.{name}: {wrong}", "Mend the rule, so that it applies.")
    for name, profile in settings.profiles.items():
        for pattern in profile.tools:
            if pattern != "*" and not profile.upstreams and not toolbox.definitions([pattern]):
                raise SettingsError(
                    f"profiles.{name}.tools: {pattern!r} matches no tool{nearest(pattern, toolbox.names)}",
                    f"There are: {', '.join(toolbox.names)}.",
                )
        check_seed(name, profile, folder)
    build_sandbox_hooks(settings, folder)


def unknown_in(policy: PermissionPolicy, toolbox: Toolbox) -> str:
    """What rules name that is not there, so that they would never apply. What upstreams offer (`a__b`) is not known."""
    for rule in policy.rules:
        if any("__" in pattern for pattern in rule.tools):
            continue
        for pattern in rule.tools:
            if not toolbox.definitions([pattern]):
                return f"{pattern!r} matches no tool{nearest(pattern, toolbox.names)}"
        known = {name for one in toolbox.definitions(rule.tools) for name in one.parameters.get("properties", {})}
        for name in (name for pattern in rule.patterns if isinstance(pattern, dict) for name in pattern):
            if name not in known:
                return f"no tool of {', '.join(rule.tools)} has an argument {name!r}{nearest(name, known)}"
    return ""


def build_hooks(settings: Settings, folder: Path) -> list[Registered]:
    """The hooks in their order. Raises SettingsError."""
    return [build_hook(one, folder) for one in settings.hooks]


def build_sandbox_hooks(settings: Settings, folder: Path) -> dict[str, tuple[SandboxHook, ...]]:
    """The operator's own SandboxHooks, by profile; each object serves all sessions. Raises SettingsError."""
    return {
        name: tuple(build_sandbox_hook(one, folder) for one in profile.sandbox_hooks)
        for name, profile in settings.profiles.items()
    }


def build_sandbox_hook(one: SandboxHookSettings, folder: Path) -> SandboxHook:
    hook = imported(one.use, folder)
    if not isinstance(hook, SandboxHook) or one.options:
        try:
            hook = from_dict({"type": one.use, "state": one.options}, SandboxHook, allowed_modules=None)
        except SettingsError as error:
            raise SettingsError(f"sandbox_hooks: {one.use}: {error.message}", error.remedy) from error
    for method in (hook.on_create, hook.on_destroy):
        if not inspect.iscoroutinefunction(method):
            raise SettingsError(f"sandbox_hooks: {one.use}: {method.__name__} is not async", "Write `async def`.")
    return hook


def build_toolbox(settings: Settings, folder: Path, hooks: Sequence[Registered]) -> Toolbox:
    """The built-in tools, those of the settings, and the hooks' own."""
    carried = dict.fromkeys(tool for hook in dict.fromkeys(one.hook for one in hooks) for tool in hook.tools)
    own = [FunctionTool.of(tool, source="hook") for tool in carried]
    toolbox = Toolbox([*SANDBOX_TOOLS, *RESULT_TOOLS, *(build_tool(one, folder) for one in settings.tools), *own])
    tools = [toolbox.get(name) for name in toolbox.names]
    check_distinct(
        [
            *(kind for one in hooks for kind in one.inputs),
            *(kind for tool in tools if isinstance(tool, FunctionTool) for kind in tool.inputs.values()),
        ]
    )
    return toolbox


def kind_key(profile: Profile) -> str:
    """What tells kind objects apart: profiles with the same share one."""
    if profile.kind != "docker":
        return profile.kind
    return f"docker {profile.image or DEFAULT_IMAGE} {profile.workspace or 'memory'}"


def build_kinds(profiles: Iterable[Profile], folder: Path, state: State) -> dict[str, SandboxKind]:
    """One kind object for each that the profiles tell apart, by its key."""
    wanted = {kind_key(one): one for one in profiles}
    docker = {key: one for key, one in wanted.items() if one.kind == "docker"}
    others = {key: _kind(one.kind, folder, state) for key, one in wanted.items() if key not in docker}
    return {**others, **(_docker_kinds(docker, state) if docker else {})}


def build_kind(profile: Profile, folder: Path, state: State) -> SandboxKind:
    [kind] = build_kinds([profile], folder, state).values()
    return kind


def _kind(name: str, folder: Path, state: State) -> SandboxKind:
    match name:
        case "local":
            return LocalKind(state.folder, instance=state.instance)
        case "virtual":
            return VirtualKind(state.folder, instance=state.instance)
        case "none":
            return NoSandboxKind(state.folder, instance=state.instance)
    kind = imported(name, folder)(state.folder, instance=state.instance)
    if not isinstance(kind, SandboxKind):
        raise SettingsError(f"{name}: not a SandboxKind", "Derive it from sandboxes.SandboxKind.")
    return kind


def _docker_kinds(profiles: Mapping[str, Profile], state: State) -> dict[str, SandboxKind]:
    """All over one engine, which removes once what an earlier life of this gateway left."""
    from sandboxes.docker import DockerKind, Engine  # here, since only who uses it should wait for the SDK's imports

    engine = Engine(state.folder, instance=state.instance)
    return {
        key: DockerKind(engine, image=one.image or DEFAULT_IMAGE, storage=one.workspace or "memory")
        for key, one in profiles.items()
    }


def build_store(settings: Settings, folder: Path, state: State) -> Store:
    uri = settings.store.uri
    if uri is None:
        return Store.from_uri(str(state.folder / "results"))
    try:
        return Store.from_uri(uri if "://" in uri else str((folder / uri).resolve()), dict(settings.store.options))
    except StoreError as error:
        raise SettingsError(f"store.uri: {error.message}", error.remedy) from error


def build_policy(rule: OffloadRule, folder: Path) -> OffloadPolicy:
    match rule:
        case OffloadRule(when="always"):
            return AlwaysOffload()
        case OffloadRule(when="never"):
            return NeverOffload()
        case OffloadRule(over_bytes=int() as most):
            return OffloadOverBytes(int(most))
        case OffloadRule(over_lines=int() as most):
            return OffloadOverLines(most)
        case OffloadRule(use=str() as path):
            return _strangers_policy(path, folder)
    return OffloadOverChars(rule.over_chars or 0)


def _strangers_policy(path: str, folder: Path) -> OffloadPolicy:
    try:
        policy: OffloadPolicy = imported(path, folder)()
    except TypeError as error:
        raise SettingsError(f"offload.rules: {path}: {error}", "A policy is made without arguments.") from error
    if not callable(getattr(policy, "should_offload", None)):
        raise SettingsError(f"offload.rules: {path}: has no should_offload", "See stores.OffloadPolicy.")
    return policy


def build_hook(one: HookSettings, folder: Path) -> Registered:
    hook = _hook(one, imported(one.use, folder))
    try:
        registered = Registered(hook, one.tools, one.timeout_seconds, one.on_failure)
    except SettingsError as error:
        raise SettingsError(f"hooks: {one.use}: {error.message}", error.remedy) from error
    if not registered.methods and not hook.tools:
        raise SettingsError(
            f"hooks: {one.use}: has none of {', '.join((*POINTS, FILTER))}", "Check how its methods are spelt."
        )
    return registered


def hook_settings(one: Registered) -> HookSettings:
    """The entry of `[[hooks]]` that makes such a hook again. Raises SerializationError where state would be lost."""
    data = to_dict(one.hook)
    return HookSettings(
        use=data["type"],
        options=data["state"],
        tools=one.tools,
        timeout_seconds=one.timeout_seconds,
        on_failure=one.on_failure,
    )


def _hook(one: HookSettings, found: Any) -> Hook:
    """A hook object as it is, or one of a class, made with the options."""
    if isinstance(found, Hook) and not one.options:
        return found
    if isinstance(found, FunctionType):
        raise SettingsError(f"hooks: {one.use}: a plain function", "Put @hook above it, from gateway.hooks.function.")
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise SettingsError(f"hooks: {one.use}: not a Hook", "Derive it from gateway.hooks.hook.Hook.")
    try:
        return from_dict({"type": one.use, "state": one.options}, Hook, allowed_modules=None)
    except SettingsError as error:
        raise SettingsError(f"hooks: {one.use}: {error.message}", error.remedy) from error


def build_tool(one: ToolSettings, folder: Path) -> Tool:
    if one.use is not None:
        return FunctionTool.of(imported(one.use, folder), name=one.name)
    for name in re.findall(r"\{([A-Za-z_]\w*)\}", " ".join(one.argv)):
        if name not in one.parameters:
            raise SettingsError(
                f"tools: {one.name}: argv has {{{name}}}, and parameters have no {name!r}",
                f"Add it to parameters{nearest(name, one.parameters)}.",
            )
    optional = {name for name, schema in one.parameters.items() if "default" in schema}
    schema = {
        "type": "object",
        "properties": one.parameters,
        "additionalProperties": False,
        "required": [name for name in one.parameters if name not in optional],
    }
    definition = ToolDefinition(
        name=one.name or "",
        description=one.description or f"Runs {one.argv[0]}.",
        parameters=schema,
        source="command",
        open_world=True,
    )
    return CommandTool(definition, one.argv, one.timeout_seconds)


def imported(path: str, folder: Path) -> Any:
    """What a dotted path (`module:name`) of the operator's configuration names; `folder` is importable."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return resolve(path, allowed_modules=None)


def refuse_shadowed_packages() -> None:
    """Stop where another distribution owns one of our package names: what runs would not be ours."""
    own = Path(__file__).parent.parent
    for name in OWN_PACKAGES:
        file = importlib.import_module(name).__file__
        if file is None or Path(file).parent.parent != own:
            raise SettingsError(
                f"the package {name!r} is not sandgate's: {file}", "Install sandgate in an environment of its own."
            )


def tokens_of(state: State) -> Tokens:
    return Tokens(state.folder / "tokens")


def with_port(settings: Settings, port: int | None, host: str | None = None) -> Settings:
    """The settings with a command line's port or host in their place."""
    given = {name: value for name, value in (("port", port), ("host", host)) if value is not None}
    return settings.model_copy(update={"server": settings.server.model_copy(update=given)}) if given else settings
