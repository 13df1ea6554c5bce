"""The demo: a gateway of its own, ten tool calls through HTTP, everything checked, nothing left behind."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio.to_thread
import fsspec

from gateway.build import State, build_kind, built_gateway, open_state
from gateway.client import Client, Session
from gateway.errors import SandgateError, Unavailable
from gateway.hooks.hook import Before, Continue, Hook, HookContext, Skip
from gateway.models import CloseReport, Reference, SessionRecord, Status, ToolCall, ToolResult
from gateway.principals import Tokens
from gateway.settings import Profile, Settings
from gateway.transports.http.serving import listen, serving
from sandboxes import Probe

KINDS: Final = ("local", "docker", "virtual")
"""The first that works is taken."""
SEED_NAME: Final = "trace.log"
SEED_SOURCE: Final = "what this Python did to document its own argparse, line by line"
SEED_BYTES: Final = 6 << 20
LARGE_BYTES: Final = 5 << 20
COLLECTED_FILES: Final = 2
_TRACE: Final = (
    "-I",
    "-m",
    "trace",
    "--trace",
    "--timing",
    "--ignore-module=_bootstrap,_bootstrap_external",
    "--module",
    "pydoc",
    "argparse",
)
_SEARCHED: Final = "funcname: match"
_NOTES: Final = "# Notes\n\nThe trace is TODO\n"
_COUNT: Final = f"""\
import collections, json, pathlib
lines = pathlib.Path("{SEED_NAME}").read_text(errors="replace").splitlines()
names = collections.Counter(line.split()[1].partition("(")[0] for line in lines if line[:1].isdigit())
busiest = names.most_common(10)
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/summary.json").write_text(json.dumps(busiest))
print(f"{{len(lines):,}} lines, most of them in {{busiest[0][0]}}")
"""
_REJECTION: Final = "not before the tests pass"
_COUNT_AS_TEXT: Final = (
    f"mkdir -p out; cut -d'(' -f1 {SEED_NAME} | cut -d' ' -f2- | sort | uniq -c | sort -rn | head > out/summary.txt; "
    f"wc -l < {SEED_NAME}"
)
_SLOW: Final = "sleep 60 & sleep 60 & sleep 60 & echo three started; exec sleep 60"


class NoPush(Hook):
    """Skips every command that would push."""

    def pre_tool_call(self, ctx: HookContext, call: ToolCall) -> Before:
        if "git push" in str(call.arguments.get("command")):
            return Skip("pushing is not allowed here")
        return Continue()


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the demo, and how it must end. `shows` must be in the answer's text."""

    tool: str
    arguments: Callable[[str], Mapping[str, Any]]
    status: Status = "ok"
    shows: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one call; `bytes` is the size of what it printed, wherever that is now."""

    number: int
    tool: str
    expected: Status
    status: Status
    as_expected: bool
    duration_ms: float
    hooks: tuple[str, ...]
    bytes: int
    result: str


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The large result, read by reference and by the store's own URI, beside what it must be."""

    reference: str
    store_uri: str
    bytes: int
    sha256: str
    by_reference: bool
    by_store_uri: bool


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected; `verified` says that the manifest names these files with these hashes."""

    files: tuple[str, ...]
    verified: bool


@dataclass(frozen=True, slots=True)
class Seed:
    """The real log that the workspace starts with."""

    name: str
    source: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo saw. `left_behind` names what should be gone."""

    kind: str
    refused: tuple[Probe, ...]
    session: SessionRecord
    seed: Seed
    calls: tuple[Row, ...]
    read_back: ReadBack
    collected: Collected
    close_report: CloseReport
    left_behind: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        read = self.read_back.by_reference and self.read_back.by_store_uri
        return (
            all(row.as_expected for row in self.calls)
            and read
            and self.collected.verified
            and not self.close_report.failed
            and not self.left_behind
        )


async def run_demo(kinds: Sequence[str] = KINDS) -> Report:
    """Run it in the first of these kinds that works. Raises Unavailable, with every reason, where no kind works."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sandgate-demo-") as name:
        place = Path(name)
        kind, refused = await first_kind(place / "probe", kinds)
        log = await anyio.to_thread.run_sync(write_trace, place / SEED_NAME)
        state = open_state(place / "state")
        try:
            report, processes = await _run(kind, refused, place, log, state)
        finally:
            state.release()
        left = [*left_in(state.folder), *left_running(processes), *left_groups(state.instance)]
        if kind == "docker":
            left += await left_in_engine(state)
    left += left_on_disk(place)
    return replace(report, left_behind=tuple(left), seconds=round(time.perf_counter() - started, 3))


async def first_kind(folder: Path, names: Sequence[str] = KINDS) -> tuple[str, tuple[Probe, ...]]:
    """The first kind that works here, and the probes of those before it."""
    refused: list[Probe] = []
    for name in names:
        probe = await _probe(name, folder)
        if probe.works:
            return name, tuple(refused)
        refused.append(probe)
    reasons = "; ".join(f"{one.kind}: {one.reason}" for one in refused)
    remedies = " ".join(one.remedy for one in refused if one.remedy)
    raise Unavailable(f"no kind of sandbox works here: {reasons}", remedies)


async def _probe(name: str, folder: Path) -> Probe:
    state = open_state(folder)
    try:
        kind = build_kind(Profile(kind=name), folder, state)
        try:
            return await kind.probe()
        finally:
            await kind.aclose()
    except SandgateError as error:
        return Probe(name, works=False, reason=error.message, remedy=error.remedy)
    finally:
        state.release()


def write_trace(path: Path) -> bytes:
    """Let this Python trace itself until there are `SEED_BYTES`; returns them, also written to the path."""
    with subprocess.Popen(
        [sys.executable, *_TRACE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as tracing:
        assert tracing.stdout is not None
        log = tracing.stdout.read(SEED_BYTES)
        tracing.kill()
    if len(log) < SEED_BYTES:
        raise SandgateError(
            f"the trace of {sys.executable} has only {len(log):,} bytes",
            "Is its standard library there with its source?",
        )
    path.write_bytes(log)
    return log


def settings_for(kind: str, place: Path) -> Settings:
    """A configuration as an operator would write it."""
    return Settings.model_validate(
        {
            "server": {"port": 0},
            "profiles": {
                "default": {
                    "kind": kind,
                    "permission": "careful",
                    "show_store_uri": True,
                    "seed": [{"from": str(place / SEED_NAME)}],
                    "collect": [{"match": "out/**", "to": str(place / "collected")}],
                }
            },
            "permissions": {"careful": {"rules": [{"tools": ["deploy"], "otherwise": "ask"}]}},
            "hooks": [{"use": f"{__name__}:{NoPush.__name__}", "tools": ["bash"]}],
            "tools": [
                {
                    "name": "deploy",
                    "description": "Put the project online.",
                    "argv": ["./deploy", "{target}"],
                    "parameters": {"target": {"type": "string"}},
                }
            ],
        }
    )


def steps(log: bytes, *, programs: bool) -> list[Step]:
    """The ten calls. Each gets the last reference that an answer gave. Without `programs` there are text tools only."""
    text = log.decode(errors="replace")
    found = sum(_SEARCHED in line for line in text.split("\n"))
    killed = "killed with its 3 child processes" if programs else "killed"
    return [
        Step("bash", lambda _: {"command": "echo hello from sandgate"}, shows="hello from sandgate"),
        Step("grep", lambda _: {"pattern": _SEARCHED, "path": SEED_NAME, "output_mode": "count"}, shows=str(found)),
        Step("python", lambda _: {"code": _COUNT}, shows=f"{len(text.splitlines()):,} lines")
        if programs
        else Step("bash", lambda _: {"command": _COUNT_AS_TEXT}, shows=str(log.count(b"\n"))),
        Step("write_file", lambda _: {"file_path": "out/notes.md", "content": _NOTES}, shows="out/notes.md"),
        Step(
            "edit_file",
            lambda _: {"file_path": "out/notes.md", "old_string": "TODO", "new_string": "read."},
            shows="1 replacement",
        ),
        Step("deploy", lambda _: {"target": "production"}, "denied", shows=_REJECTION),
        Step("bash", lambda _: {"command": "git push origin main"}, "skipped", shows="pushing is not allowed here"),
        Step(
            "bash",
            lambda _: {"command": _SLOW, "timeout_s": 0.5},
            "timeout",
            shows=killed,
        ),
        Step("bash", lambda _: {"command": f"head -c {LARGE_BYTES} {SEED_NAME}"}, shows="sandgate://"),
        Step(
            "read_result",
            lambda last: {"reference": last, "lines": "100-102"},
            shows="\n".join(text.split("\n")[99:102]),
        ),
    ]


async def _run(
    kind: str, refused: tuple[Probe, ...], place: Path, log: bytes, state: State
) -> tuple[Report, set["Running"]]:
    """Serve, call, read back, collect; returns also the processes that were there while the session was open."""
    settings, tokens = settings_for(kind, place), Tokens(state.folder / "tokens", {})
    token = tokens.stored("agent")
    async with (
        built_gateway(settings, place, state) as gateway,
        serving(gateway, tokens, settings, listen(settings.server)) as url,
        Client(url, token) as client,
        Client(url, tokens.stored("operator")) as operator,
    ):
        [sandbox_kind] = gateway.profiles.kinds().values()
        wanted = steps(log, programs="python3" not in sandbox_kind.lacks)
        async with client.session() as session, anyio.create_task_group() as tasks:
            tasks.start_soon(_reject, operator)
            results = await _called(session, wanted)
            record, processes = await session.record(), descendants()
            tasks.cancel_scope.cancel()
        large = next((one for result in results for one in result.references), None)
        expected = hashlib.sha256(log[:LARGE_BYTES]).hexdigest()
        read_back = await anyio.to_thread.run_sync(_read_back, large, expected, url, token)
    assert session.close_report is not None
    rows = tuple(
        _row(number, step, result) for number, (step, result) in enumerate(zip(wanted, results, strict=True), start=1)
    )
    return Report(
        kind,
        refused,
        record,
        Seed(SEED_NAME, SEED_SOURCE, len(log)),
        rows,
        read_back,
        _collected(place / "collected" / session.id),
        session.close_report,
    ), processes


async def _reject(operator: Client) -> None:
    """The person who decides, in this demo without looking."""
    async for approval in operator.watch_approvals():
        await operator.deny(approval.id, _REJECTION)


async def _called(session: Session, wanted: Sequence[Step]) -> list[ToolResult]:
    results: list[ToolResult] = []
    for step in wanted:
        references = [one.reference for result in results for one in result.references]
        results.append(await session.call(step.tool, step.arguments(references[-1] if references else "")))
    return results


def _row(number: int, step: Step, result: ToolResult) -> Row:
    size = sum(one.bytes for one in result.references) or sum(len(one.text.encode()) for one in result.content)
    return Row(
        number,
        step.tool,
        step.status,
        result.status,
        as_expected=result.status == step.status and step.shows in result.text,
        duration_ms=result.duration_ms,
        hooks=result.hooks,
        bytes=size,
        result=_in_short(result),
    )


def _in_short(result: ToolResult) -> str:
    if result.references:
        return result.references[0].reference
    if result.error is not None:
        return result.error.message.rpartition(", ")[2]
    return next(iter(result.text.splitlines()), "")


def _read_back(large: Reference | None, sha256: str, url: str, token: str) -> ReadBack:
    """Both ways end in fsspec: over the gateway, and straight from the store."""
    if large is None or large.store_uri is None:
        return ReadBack("", "", 0, sha256, by_reference=False, by_store_uri=False)
    with fsspec.open(large.reference, "rb", url=url, token=token, skip_instance_cache=True) as file:
        by_reference = file.read()
    with fsspec.open(large.store_uri, "rb") as file:
        by_store_uri = file.read()
    return ReadBack(
        large.reference,
        large.store_uri,
        len(by_reference),
        sha256,
        by_reference=_is(by_reference, sha256),
        by_store_uri=_is(by_store_uri, sha256),
    )


def _is(data: bytes, sha256: str) -> bool:
    return len(data) == LARGE_BYTES and hashlib.sha256(data).hexdigest() == sha256


def _collected(folder: Path) -> Collected:
    """What lies there, compared with what its manifest says."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        good = [
            hashlib.sha256((folder / one["key"]).read_bytes()).hexdigest() == one["sha256"] for one in manifest["files"]
        ]
    except OSError:
        return Collected((), verified=False)
    return Collected(
        tuple(one["path"] for one in manifest["files"]),
        verified=manifest["complete"] and len(good) == COLLECTED_FILES and all(good),
    )


# what must be gone


class Running(NamedTuple):
    """A process, told apart from a later one with its number by when it started."""

    pid: int
    started: str


def descendants() -> set[Running]:
    """Every process below this one."""
    parents: dict[int, list[Running]] = {}
    for one, parent in _processes():
        parents.setdefault(parent, []).append(one)
    found, waiting = set[Running](), [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += [child.pid for child in children]
    return found


def _processes() -> Iterator[tuple[Running, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield Running(int(folder.name), fields[19]), int(fields[1])


def left_running(before: Collection[Running]) -> Iterator[str]:
    """Processes of ours that are still there."""
    for one, _ in _processes():
        if one in before:
            yield f"process {one.pid}"


def left_in(state: Path) -> Iterator[str]:
    """Workspaces, channels, and output that was on its way."""
    for folder in ("workspaces", "channels", "spool"):
        if (state / folder).exists():
            yield from (f"{folder}: {one.name}" for one in (state / folder).iterdir())


async def left_in_engine(state: State) -> list[str]:
    """Containers and volumes that carry the gateway's name."""
    from sandboxes.docker import Engine  # as in build.py

    engine = Engine(state.folder, instance=state.instance)
    try:
        return await engine.left()
    finally:
        await engine.aclose()


def left_on_disk(folder: Path) -> Iterator[str]:
    """A folder that should be gone."""
    if folder.exists():
        yield f"folder {folder}"


def left_groups(instance: str) -> Iterator[str]:
    """Control groups that carry the gateway's name."""
    for place, folders, _ in os.walk("/sys/fs/cgroup"):
        yield from (f"control group {place}/{name}" for name in folders if name.startswith(f"sandgate-{instance}"))
