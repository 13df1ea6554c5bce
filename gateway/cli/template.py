"""sandgate.toml as `sandgate init` writes it: every default of the code, in its order, with a word on each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ByteSize

from gateway.settings import Settings

HEAD: Final = """\
# sandgate.toml: every line is optional, and what stands here is the default.
# `sandgate doctor` checks it against this machine, `sandgate config` prints what is in force and from where.
# Sizes take units ("1GiB"), times are seconds. The environment comes first: SANDGATE_SERVER__PORT=9000, and so on.
# Relative paths start at this file's folder, which is importable for hooks and tools, too.
"""
ABOUT: Final = {
    "server": "Where the gateway listens, and what one machine carries.",
    "server.host": "anything but loopback needs allowed_hosts",
    "server.port": "0 takes a free one",
    "server.allowed_hosts": 'names that clients use for this machine, such as ["sandgate"] under compose',
    "server.allowed_origins": 'pages that may call, such as ["https://tools.example"]',
    "server.sessions": "open at the same time; then 429",
    "server.live_sandboxes": "likewise",
    "server.json_body": "largest JSON request",
    "server.upload": "largest file or archive, streamed",
    "server.replay_seconds": "how long a stream can be taken up again",
    "server.stop_seconds": "how long calls may go on at a stop",
    "server.approval_wait_seconds": "how long a call is held while a person decides; then it ends `pending`",
    "server.approval_expires_seconds": "how long a person may take at all",
    "agent": "What the agent's token may do; the operator's may do everything.",
    "agent.profiles": "opens sessions of these profiles",
    "mcp": "Agents that speak MCP, at /mcp.",
    "mcp.auto_session": "the agent's token gets a session of its first profile by itself",
    "profiles": "What a session is. A session names a profile, and may only narrow it.",
    "profiles.kind": 'local (bubblewrap) | docker | virtual (bashkit: text work) | none | your own, "my_kinds:MyKind"',
    "profiles.image": "of kind docker; with python3 of 3.9 or newer in it, else slower",
    "profiles.workspace": "of kind docker: memory (sized, lost with its container) | disk (stays, not sized)",
    "profiles.tools": "names or globs",
    "profiles.upstreams": 'MCP servers of [[upstreams]] whose tools its sessions have, such as ["git"]',
    "profiles.network": "none | open (of kind docker): the internet and this machine's services, unfiltered",
    "profiles.permission": "auto | ask | deny | a table [permissions.NAME]",
    "profiles.env": "variables in the sandbox, beside PATH and HOME",
    "profiles.env_from_caller": "names that a session may set itself",
    "profiles.read_only": "host paths shown inside at the same place",
    "profiles.idle_seconds": "ends a session that nobody uses",
    "profiles.lifetime_seconds": "ends any session",
    "profiles.pool": "sandboxes at the ready, so that none is waited for",
    "profiles.seed": '[{ from = "./fixtures", to = "data" }]: a folder, file, tar, git bundle; here or any fsspec URI',
    "profiles.seed_from": 'places below which a session may name its own seeds, such as ["s3://bucket/public"]',
    "profiles.setup": "a shell command, run before the first call; unless it succeeds, the session does not open",
    "profiles.sandbox_hooks": 'your own, [{ use = "my_hooks:Fetch", options = {} }], in order; at the end in reverse',
    "profiles.collect": '[{ match = "out/**", to = "./collected" }]: into <to>/<session>/ with a manifest',
    "profiles.stream": "filtered: output that a hook may still change is not streamed; raw: it is",
    "profiles.show_store_uri": "tell agents where in the store a result lies",
    "profiles.limits": "Limits of one session.",
    "profiles.limits.call_seconds": "when a call names none",
    "profiles.limits.max_call_seconds": "the most that a call may ask for",
    "profiles.limits.memory": "of the whole sandbox",
    "profiles.limits.cpus": "likewise, in cores",
    "profiles.limits.processes": "likewise, threads included",
    "profiles.limits.open_files": "of one process",
    "profiles.limits.workspace_size": "files of the workspace",
    "profiles.limits.output": "kept of one stream in an answer; the rest is stored or counted",
    "profiles.limits.parallel_calls": "more wait for their turn",
    "profiles.limits.results_size": "what a session may store",
    "permissions": "Rules over calls; the first that matches the tool decides. Advice: the sandbox is the boundary.",
    "store": "Where large results are kept.",
    "store.uri": "any writable fsspec URI",
    "store.options": "for the file system; credentials better come from the environment",
    "store.retention_hours": "results are deleted after that",
    "store.size": "of all sessions together",
    "store.when_full": "refuse: what does not fit is not stored; oldest: older results go (a session's own first)",
    "offload": "Which results are too large for a model. Exact name before list before glob before *.",
    "offload.preview_chars": "what is shown instead, head and tail together",
    "offload.rules": "each with one of `over_chars`, `over_bytes`, `over_lines`, `when` = always | never, `use`",
    "hooks": "Hooks see each call before its tool runs and each result on its way back, in this order.",
    "upstreams": "MCP servers whose tools are offered as <name>__<tool>, to the profiles that name them.",
    "tools": "Tools of your own: a command that runs in the sandbox, or a Python function that runs in the gateway.",
}
EXAMPLES: Final = {
    "permissions": """\
# [permissions.careful]
# otherwise = "auto"            # what no rule decides: auto | ask (a person decides) | deny
# rules = [                     # inside a rule deny, then ask, then allow, else its `otherwise`
#   { tools = ["bash"], deny = ["curl *"], ask = ["git push *"] },
#   { tools = ["write_file", "edit_file"], ask = [{ file_path = "*.env" }] },
# ]
""",
    "hooks": """\
# [[hooks]]
# use = "my_hooks:NoPush"       # my_hooks.py beside this file
# tools = ["bash"]
# timeout_seconds = 10
# on_failure = "closed"         # or open: the call goes on without the hook
""",
    "tools": """\
# [[tools]]
# name = "run_tests"
# description = "Run the tests below one path."
# argv = ["python3", "-m", "pytest", "-q", "{path}"]
# parameters = { path = { type = "string" } }
#
# [[tools]]
# use = "my_tools:search"       # def search(query: str) -> str: its signature and docstring say the rest
""",
    "upstreams": """\
# [[upstreams]]
# name = "git"
# command = ["mcp-server-git", "--repository", "/workspace"]   # inside the session's sandbox
#
# [[upstreams]]
# name = "docs"
# url = "https://docs.example/mcp"   # from the gateway
# token_env = "DOCS_TOKEN"           # the variable that has its bearer token
# tools = ["search*"]                # only these; default: all
# stateless = true                   # one connection for all sessions; default: each has its own
# timeout_seconds = 60
""",
}
"""Sections whose default is nothing."""
UNSET: Final = {
    "profiles.image": ('"sandgate/sandbox"', "default: what `sandgate images build` builds"),
    "profiles.workspace": ('"memory"', "default: memory"),
    "profiles.setup": ('"make deps"', "default: nothing"),
    "profiles.pool": ("{ min = 1, max = 4 }", "default: none; also when_empty = create | wait | fail"),
    "store.uri": ('"s3://bucket/prefix"', "default: the state folder"),
}
"""Keys whose default is not a value that TOML could hold."""
_COMMENT_COLUMN: Final = 33
_WIDTH: Final = 118


def default_toml(not_enforced: Sequence[str] = (), warning: str = "") -> str:
    """The text of a file that changes nothing. `not_enforced` are limits that this machine cannot hold (they are
    marked), `warning` says that the default kind does not work here."""
    settings, notes = Settings.model_construct(), _notes(not_enforced)
    parts = [HEAD]
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if name == "profiles":
            if warning:
                parts.append("".join(f"# {line}\n" for line in _wrapped(warning)))
            for profile, one in value.items():
                parts += _table(f"profiles.{profile}", name, one, notes)
        elif isinstance(value, BaseModel):
            parts += _table(name, name, value, notes)
        else:
            parts.append(f"# {ABOUT[name]}\n{EXAMPLES[name]}")
    return "\n".join(parts)


def _table(title: str, place: str, model: BaseModel, notes: dict[str, str]) -> Iterator[str]:
    lines, inner = [f"# {ABOUT[place]}\n[{title}]"], []
    for name in type(model).model_fields:
        value, at = getattr(model, name), f"{place}.{name}"
        if isinstance(value, BaseModel):
            inner.append((name, at, value))
            continue
        about = "; ".join(text for text in (ABOUT[at], notes.get(name, "")) if text)
        if value is None:
            example, meaning = UNSET[at]
            lines.append(_line(f"# {name} = {example}", f"{about}; {meaning}"))
        else:
            lines.append(_line(f"{name} = {toml_value(value)}", about))
    yield "\n".join(lines) + "\n"
    for name, at, value in inner:
        yield from _table(f"{title}.{name}", at, value, notes)


def _line(text: str, about: str) -> str:
    if not about:
        return text
    column = max(_COMMENT_COLUMN, len(text.splitlines()[-1]) + 2)
    return f"{text:<{column}}# {about}" if "\n" not in text else f"# {about}\n{text}"


def _notes(not_enforced: Sequence[str]) -> dict[str, str]:
    """`cpus: not limited` as a note on the key `cpus`."""
    split = (one.partition(": ") for one in not_enforced)
    return {name: f"on this machine: {how}" for name, _, how in split}


def toml_value(value: Any) -> str:
    """A value as TOML writes it; nothing (what TOML cannot say) as `-`."""
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case ByteSize():
            return f'"{_size(value)}"'
        case float() if value.is_integer():
            return str(int(value))
        case int() | float():
            return str(value)
        case str() | Path():
            return json.dumps(str(value))
        case BaseModel():
            return toml_value(value.model_dump(by_alias=True, exclude_none=True))
        case dict():
            pairs = [f"{key} = {toml_value(one)}" for key, one in value.items() if one is not None]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case _:
            return _list([toml_value(one) for one in value], tables=any(isinstance(one, BaseModel) for one in value))


def _list(items: list[str], *, tables: bool) -> str:
    if not tables:
        return f"[{', '.join(items)}]"
    return "[\n" + "".join(f"  {item},\n" for item in items) + "]"


def _size(size: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size}B"


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > _WIDTH and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
