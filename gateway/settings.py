"""Settings: sandgate.toml and the environment, read once, frozen. Unknown names are refused, naming the nearest."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Self, TypeGuard, get_args, get_origin

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from gateway.errors import SettingsError
from gateway.hooks.permission import MODES, PermissionPolicy
from gateway.models import LEAST_CPUS, LEAST_MEMORY, LEAST_OPEN_FILES, Network, Wire
from gateway.text import nearest

PREFIX: Final = "SANDGATE_"
OUTSIDE_VARIABLES: Final = frozenset(
    {
        "SANDGATE_URL",
        "SANDGATE_TOKEN",
        "SANDGATE_CONFIG",
        "SANDGATE_STATE_DIR",
        "SANDGATE_OPERATOR_TOKEN",
        "SANDGATE_AGENT_TOKEN",
    }
)
"""Read elsewhere: the client's two, and those that say where everything is."""
KINDS: Final = ("local", "docker", "virtual", "none")
CONFIG_NAME: Final = "sandgate.toml"
FILE_ARGUMENT: Final = "toml_file"
"""How the file gets to the sources: as an argument that is none of the settings."""

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


def _list_of_hosts(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("a list of hosts is not supported yet; use 'none' or 'open'")
    if value not in ("none", "open"):
        raise ValueError("no such network; use 'none' or 'open'")
    return value


def _known_kind(kind: str) -> str:
    if kind in KINDS or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", kind):
        return kind
    raise ValueError(f"no such kind {kind!r}; use {', '.join(map(repr, KINDS))}, or a kind of yours as 'module:Class'")


def _in_workspace(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError("a place below the workspace, without a leading / and without ..")
    return path


def _lasting(uri: str) -> str:
    if uri.startswith("memory:"):
        raise ValueError("what is collected into memory ends with its session; name a folder, or s3://bucket/prefix")
    return uri


class Server(Wire):
    """Where and for whom the gateway listens, and its machine-wide limits."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8710
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    sessions: Count = 100
    live_sandboxes: Count = 20
    json_body: ByteSize = ByteSize(4 << 20)
    upload: ByteSize = ByteSize(2 << 30)
    replay_seconds: Seconds = 10
    stop_seconds: Seconds = 10
    approval_wait_seconds: Seconds = 55
    approval_expires_seconds: Seconds = 3600


class Agent(Wire):
    """What the agent token may do: open sessions of these profiles."""

    profiles: tuple[str, ...] = ("default",)


class Mcp(Wire):
    """MCP at `/mcp`: with `auto_session` the agent's token gets a session of its first profile there by itself."""

    auto_session: bool = True


class ProfileLimits(Wire):
    """Limits of one session. Sizes take units ("1GiB"); `output` is kept of one stream in an answer."""

    call_seconds: Seconds = 120
    max_call_seconds: Seconds = 600
    memory: Annotated[ByteSize, Field(ge=LEAST_MEMORY)] = ByteSize(1 << 30)
    cpus: Annotated[float, Field(ge=LEAST_CPUS)] = 1.0
    processes: Count = 128
    open_files: Annotated[int, Field(ge=LEAST_OPEN_FILES)] = 1024
    workspace_size: ByteSize = ByteSize(512 << 20)
    output: ByteSize = ByteSize(1 << 20)
    parallel_calls: Count = 8
    results_size: ByteSize = ByteSize(2 << 30)


class Seed(Wire):
    """What a workspace starts with: a folder, a file, a tar or a git bundle, here (relative to the file that names it)
    or at any fsspec URI, placed at `to`."""

    source: str = Field(alias="from")
    to: Annotated[str, AfterValidator(_in_workspace)] = "."


class Collect(Wire):
    """What is taken when a session ends: files that match, into `<to>/<session>/` with a manifest."""

    match: str
    to: Annotated[str, AfterValidator(_lasting)]


class SandboxHookSettings(Wire):
    """A SandboxHook by dotted path (`module:Class`)."""

    use: str
    options: dict[str, JsonValue] = Field(default_factory=dict)


class PoolSettings(Wire):
    """Sandboxes of a profile at the ready: `min` of them, as long as with those in use they are no more than `max`."""

    min: Count = 1
    max: Count | None = None
    when_empty: Literal["create", "wait", "fail"] = "create"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"'max' is below 'min' ({self.min})")
        return self


class Profile(Wire):
    """One kind of session that the operator offers; a session may only narrow it."""

    kind: Annotated[str, AfterValidator(_known_kind)] = "local"
    image: Annotated[str, Field(min_length=1)] | None = None
    workspace: Literal["memory", "disk"] | None = None
    tools: tuple[str, ...] = ("*",)
    network: Annotated[Network, BeforeValidator(_list_of_hosts)] = "none"
    upstreams: tuple[str, ...] = ()
    permission: str = "auto"
    env: dict[str, str] = Field(default_factory=dict)
    env_from_caller: tuple[str, ...] = ()
    read_only: tuple[Path, ...] = ()
    idle_seconds: Seconds = 900
    lifetime_seconds: Seconds = 4 * 3600
    pool: PoolSettings | None = None
    seed: tuple[Seed, ...] = ()
    seed_from: tuple[str, ...] = ()
    setup: Annotated[str, Field(min_length=1)] | None = None
    sandbox_hooks: tuple[SandboxHookSettings, ...] = ()
    collect: tuple[Collect, ...] = ()
    stream: Literal["filtered", "raw"] = "filtered"
    show_store_uri: bool = False
    limits: ProfileLimits = ProfileLimits()

    @model_validator(mode="after")
    def _kind_fits(self) -> Self:
        for name, value in (("image", self.image), ("workspace", self.workspace)):
            if value is not None and self.kind != "docker":
                raise ValueError(f"{name!r} needs kind = 'docker'")
        if self.kind == "none" and (self.seed or self.setup or self.sandbox_hooks or self.collect):
            raise ValueError("kind 'none' has no workspace to prepare, or to collect from")
        if self.network == "open" and self.kind == "local":
            raise ValueError(
                "network 'open' needs kind = 'docker': a local sandbox would share this machine's loopback"
            )
        if self.network == "open" and self.kind in ("virtual", "none"):
            raise ValueError("network 'open' needs kind = 'docker'")
        if self.pool and (self.kind in ("virtual", "none") or self.workspace == "disk" or self.network == "open"):
            raise ValueError("'pool' needs kind 'local', or 'docker' with its workspace in memory and without network")
        return self


class StoreSettings(Wire):
    """Where large results go: any writable fsspec URI; the default is the state folder."""

    uri: str | None = None
    options: dict[str, JsonValue] = Field(default_factory=dict)
    retention_hours: Annotated[float, Field(gt=0)] = 24
    size: ByteSize = ByteSize(20 << 30)
    when_full: Literal["refuse", "oldest"] = "refuse"


class OffloadRule(Wire):
    """Which results of which tools are stored: exactly one condition. `use` is a policy of yours by dotted path."""

    tools: Annotated[tuple[str, ...], Field(min_length=1)]
    when: Literal["always", "never"] | None = None
    over_chars: Annotated[int, Field(ge=0)] | None = None
    over_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    over_lines: Annotated[int, Field(ge=0)] | None = None
    use: str | None = None

    @model_validator(mode="after")
    def _one_condition(self) -> Self:
        conditions = (self.when, self.over_chars, self.over_bytes, self.over_lines, self.use)
        if sum(one is not None for one in conditions) != 1:
            raise ValueError("give exactly one of 'when', 'over_chars', 'over_bytes', 'over_lines' and 'use'")
        return self


PAGED_TOOLS: Final = ("read_result", "read_file", "ls", "glob", "grep", "job_output")


class OffloadSettings(Wire):
    """Exact name before list before glob before `*`. `preview_chars` is head and tail together."""

    preview_chars: Annotated[int, Field(ge=0, le=20_000)] = 2000
    rules: tuple[OffloadRule, ...] = (
        OffloadRule(tools=PAGED_TOOLS, when="never"),
        OffloadRule(tools=("*",), over_chars=30_000),
    )


class HookSettings(Wire):
    """A hook by dotted path (`module:Class`); the folder of the configuration file is importable."""

    use: str
    tools: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    timeout_seconds: Seconds = 10
    on_failure: Literal["closed", "open"] = "closed"
    options: dict[str, JsonValue] = Field(default_factory=dict)


class ToolSettings(Wire):
    """A Python function (`use = "module:function"`), or a command that runs in the sandbox (`name`, `argv`)."""

    use: str | None = None
    name: str | None = None
    description: str = ""
    argv: tuple[str, ...] = ()
    parameters: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    timeout_seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.use is None) == (not self.argv):
            raise ValueError("give either 'use' (a function) or 'name' and 'argv' (a command)")
        if self.argv and not self.name:
            raise ValueError("a command tool needs a 'name'")
        return self


class UpstreamSettings(Wire):
    """An MCP server whose tools are offered as `<name>__<tool>`: a `command` inside the session's sandbox, or a `url`
    that the gateway reaches; `token_env` names the variable with its bearer token."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    token_env: str | None = None
    tools: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    prefix: str | None = None
    timeout_seconds: Seconds = 60
    stateless: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.url is None) == (not self.command):
            raise ValueError("give either 'command' (in the sandbox) or 'url'")
        if self.command and (self.headers or self.token_env or self.stateless):
            raise ValueError("'headers', 'token_env' and 'stateless' need 'url'")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("'url' begins with http:// or https://")
        return self


class Settings(BaseSettings):
    """All of it. `folder` is where relative paths start: the file's, or the current one."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=False,
        populate_by_name=False,
    )

    server: Server = Server()
    agent: Agent = Agent()
    mcp: Mcp = Mcp()
    profiles: dict[str, Profile] = Field(default_factory=lambda: {"default": Profile()})
    permissions: dict[str, PermissionPolicy] = Field(default_factory=dict)
    store: StoreSettings = StoreSettings()
    offload: OffloadSettings = OffloadSettings()
    hooks: tuple[HookSettings, ...] = ()
    tools: tuple[ToolSettings, ...] = ()
    upstreams: tuple[UpstreamSettings, ...] = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        file = init_settings.init_kwargs.pop(FILE_ARGUMENT, None)
        toml = (TomlConfigSettingsSource(settings_cls, file),) if file else ()
        return (init_settings, env_settings, *toml)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, profile in self.profiles.items():
            if profile.permission not in MODES and profile.permission not in self.permissions:
                raise ValueError(
                    f"profiles.{name}.permission: no such permission {profile.permission!r}"
                    f"{nearest(profile.permission, [*MODES, *self.permissions])}"
                )
            for upstream in profile.upstreams:
                names = [one.name for one in self.upstreams]
                if upstream not in names:
                    raise ValueError(
                        f"profiles.{name}.upstreams: no such upstream {upstream!r}{nearest(upstream, names)}"
                    )
        for profile_name in self.agent.profiles:
            if profile_name not in self.profiles:
                raise ValueError(
                    f"agent.profiles: no such profile {profile_name!r}{nearest(profile_name, self.profiles)}"
                )
        return self

    def policy(self, profile: Profile) -> PermissionPolicy:
        """What the profile's `permission` stands for."""
        if profile.permission in MODES:
            return PermissionPolicy.model_validate({"otherwise": profile.permission})
        return self.permissions[profile.permission]


def load_settings(file: Path | None = None) -> tuple[Settings, Path]:
    """Read settings and the folder that relative paths start from.

    `file` defaults to SANDGATE_CONFIG, then to `sandgate.toml` here if there is one. Raises SettingsError naming the
    file or variable, the key, what is wrong and the nearest right name.
    """
    if file is None and "SANDGATE_CONFIG" in os.environ:
        file = Path(os.environ["SANDGATE_CONFIG"])
    if file is None and Path(CONFIG_NAME).exists():
        file = Path(CONFIG_NAME)
    if file is not None:
        _readable_toml(file)
    _check_variables(os.environ)
    try:
        settings = Settings(**{FILE_ARGUMENT: file})  # type: ignore[arg-type]  # taken out again by the sources
        return settings, (file.parent if file else Path()).resolve()
    except ValidationError as error:
        raise _explained(error, file) from error


def _readable_toml(file: Path) -> None:
    try:
        tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(
            f"{file}: {error.strerror}", "Name another file, or make one with `sandgate init`."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{file}: not valid TOML: {error}", "Mend that line; `sandgate config` checks it."
        ) from error


def set_by_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that set something, and the dotted key that each sets, in lower case."""
    keys = {
        name: name.removeprefix(PREFIX).lower().replace("__", ".") for name in environment if name.startswith(PREFIX)
    }
    return {name: key for name, key in keys.items() if key.partition(".")[0] in Settings.model_fields}


def _check_variables(environment: Mapping[str, str]) -> None:
    known = set_by_variables(environment)
    for name, value in environment.items():
        if name in known:
            _check_variable(name, value, known[name].split("."))
        elif name.startswith(PREFIX) and name not in OUTSIDE_VARIABLES and not name.startswith("SANDGATE_TEST_"):
            raise SettingsError(
                f"environment: no such variable {name}{nearest(name, _known_variables())}",
                "Unset it, or spell it right: SANDGATE_<SECTION>__<KEY>.",
            )


def _check_variable(variable: str, value: str, keys: list[str]) -> None:
    model: Any = Settings
    for key in keys:
        if _is_table(model) and key not in model.model_fields:
            raise SettingsError(
                f"{variable}: no such key {key!r}{nearest(key, model.model_fields)}",
                "Unset it, or spell it right.",
            )
        model = _inside(model, key)
    if not (_is_table(model) or get_origin(model) in (dict, tuple)):
        return
    try:
        json.loads(value)
    except ValueError:
        example = '["a", "b"]' if get_origin(model) is tuple else '{"key": "value"}'
        raise SettingsError(
            f"{variable}: a list or a table is written as JSON, and this is none", f"Write it like {example}."
        ) from None


def _is_table(model: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(model, type) and issubclass(model, BaseModel)


def _known_variables() -> list[str]:
    names = sorted(OUTSIDE_VARIABLES)
    for section, field in Settings.model_fields.items():
        model = field.annotation
        if _is_table(model):
            names += [f"{PREFIX}{section.upper()}__{key.upper()}" for key in model.model_fields]
    return names


def _explained(error: ValidationError, file: Path | None) -> SettingsError:
    first = error.errors()[0]
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        what = f"no such key{nearest(str(first['loc'][-1]), _keys_beside(first['loc']))}"
    where = ".".join(str(part) for part in first["loc"])
    told = f"{where}: {what}" if where else what
    return SettingsError(
        "".join(f"{place}: " for place in _places(told.partition(":")[0], file)) + told,
        "Mend it; `sandgate config` checks the result.",
    )


def _places(key: str, file: Path | None) -> list[str]:
    """Where a key is set: the variables that are for it or for a part of it; else the file."""
    key = key.lower()
    names = [name for name, one in set_by_variables(os.environ).items() if covers(one, key) or covers(key, one)]
    return sorted(names) or ([str(file)] if file else [])


def covers(prefix: str, key: str) -> bool:
    """Whether a dotted key is another's, or inside it."""
    return key == prefix or key.startswith(f"{prefix}.")


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Settings
    for part in location[:-1]:
        model = _inside(model, part)
    if not _is_table(model):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _inside(model: Any, part: int | str) -> Any:
    """The type of a table's key, or of what a list or a table of free names holds; `| None` is left out."""
    if _is_table(model):
        field = model.model_fields.get(str(part))
        return _present(field.annotation) if field else None
    arguments = [one for one in get_args(model) if one not in (Ellipsis, str)]
    return arguments[0] if arguments else None


def _present(annotation: Any) -> Any:
    if not isinstance(annotation, UnionType):
        return annotation
    return next(one for one in get_args(annotation) if one is not NoneType)


def state_dir(option: Path | None = None) -> Path:
    """The folder with all state: the option, SANDGATE_STATE_DIR, or the platform's."""
    if option is not None:
        return option.absolute()
    if "SANDGATE_STATE_DIR" in os.environ:
        return Path(os.environ["SANDGATE_STATE_DIR"]).absolute()
    return Path(platformdirs.user_state_dir("sandgate", appauthor=False))
