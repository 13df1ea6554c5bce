"""SandboxHooks: the ready ones and one's own, in order, on every kind; what a seed may be, and from where."""

import functools
import hashlib
import http.server
import json
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import fsspec
import pytest

from gateway.build import build_sandbox_hooks, check_configuration
from gateway.errors import Problem, SettingsError
from gateway.gateway import Gateway
from gateway.sessions import Session
from sandboxes import SandboxContext, SandboxHook
from tests.gateway.conftest import called, opened, running, served, settings_of
from tests.stores.servers import S3, s3_server

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]
KINDS = [
    pytest.param("local", marks=pytest.mark.needs("local")),
    pytest.param("docker", marks=pytest.mark.needs("docker")),
    "virtual",
]
PROGRAMS = KINDS[:2]


async def ran(gateway: Gateway, session: Session, command: str) -> str:
    result = await called(gateway, session, "bash", command=command)
    assert result.status == "ok", result
    return result.text


def profile(kind: str = "local", **more: Any) -> dict[str, Any]:
    return {"default": {"kind": kind, **more}}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=host", "-c", "user.email=host@example.com")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A git bundle with one commit on `main`."""
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet", "--initial-branch=main")
    (repository / "readme").write_text("from the bundle\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=first")
    git(repository, "bundle", "create", "--quiet", str(tmp_path / "repo.bundle"), "HEAD", "main")
    return tmp_path / "repo.bundle"


# one's own


class Noting(SandboxHook):
    """Notes what happens to it, and looks through its context."""

    log: list[str]

    def __init__(self, name: str, *, breaks: bool = False) -> None:
        self.name = name
        self.breaks = breaks

    async def on_create(self, ctx: SandboxContext) -> None:
        assert (ctx.sandbox.is_executable, ctx.sandbox.workspace) == (True, "/workspace")
        await ctx.sandbox.write_file(f"made-by-{self.name}", self.name.encode())
        done = await ctx.sandbox.execute(f"cat made-by-{self.name}; echo no >&2; exit 3", timeout_seconds=20)
        assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (3, self.name, "no\n", False)
        assert await ctx.sandbox.read_file(f"made-by-{self.name}") == self.name.encode()
        Noting.log.append(f"{self.name} created{' again' if ctx.restored else ''}")
        if self.breaks:
            raise RuntimeError("it broke")

    async def on_destroy(self, ctx: SandboxContext) -> None:
        assert ctx.labels == {"who": "test"}
        Noting.log.append(f"{self.name} destroyed")


def noting(*names: str, breaks: str = "") -> tuple[dict[str, Any], ...]:
    """Two of the hooks above, as a configuration names them."""
    Noting.log = []
    return tuple(
        {"use": "tests.gateway.test_workspace:Noting", "options": {"name": name, "breaks": name == breaks}}
        for name in names
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_own_hooks_run_in_order_and_end_in_reverse(state_dir: Path, kind: str) -> None:
    """seed-facts 12 row 12, 6.2: the same on every kind; `ctx.sandbox` as the tools see it."""
    async with running(state_dir, profiles=profile(kind, sandbox_hooks=noting("a", "b"))) as gateway:
        session = await opened(gateway, labels={"who": "test"})
        assert Noting.log == ["a created", "b created"]
        assert await ran(gateway, session, "cat made-by-*") == "ab"
        report = await gateway.close_session(session)
    assert (Noting.log[2:], report.failed) == (["b destroyed", "a destroyed"], ())


@pytest.mark.needs("local")
async def test_a_hook_that_breaks_undoes_those_before_it_in_reverse(state_dir: Path) -> None:
    """seed-facts 12 row 12: later ones do not run; the opening is refused with the reason, and nothing is left."""
    hooks = noting("a", "b", "c", "d", breaks="c")
    async with served(state_dir, profiles=profile(sandbox_hooks=hooks)) as server:
        answer = await server.agent.post("/v1/sessions", json={"labels": {"who": "test"}})
        assert (answer.status_code, answer.json()["code"]) == (503, "sandbox_hook_failed")
        assert answer.json()["detail"] == "Noting: RuntimeError: it broke"
    assert Noting.log == ["a created", "b created", "c created", "b destroyed", "a destroyed"]
    assert [one for one in (state_dir / "workspaces").iterdir() if one.name != "_probe"] == []


@pytest.mark.needs("local")
async def test_a_replacement_is_told_that_files_are_there(state_dir: Path, tmp_path: Path) -> None:
    """design 5: `ctx.restored`; the seed is not written again, the setup runs again."""
    (tmp_path / "seed").write_text("seed")
    settings = profile(seed=({"from": str(tmp_path / "seed")},), setup="echo x >> runs", sandbox_hooks=noting("a"))
    async with running(state_dir, profiles=settings) as gateway:
        session = await opened(gateway, labels={"who": "test"})
        await ran(gateway, session, "echo -n changed > seed")
        await (await session.sandbox()).aclose()
        assert await ran(gateway, session, "cat seed runs") == "changedx\nx"
    assert Noting.log == ["a created", "a created again"]


@pytest.mark.needs("local")
async def test_a_hook_that_does_not_end_is_given_up(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening waits for no hook without end."""
    monkeypatch.setattr("gateway.sessions.CREATE_SECONDS", 0.3)
    async with served(state_dir, profiles=profile(setup="sleep 60")) as server:
        answer = await server.agent.post("/v1/sessions", json={})
    assert (answer.status_code, answer.json()["detail"]) == (503, "SetupCommand: not done after 0.3 s")


class Lingers(SandboxHook):
    """Does not come to an end."""

    async def on_destroy(self, ctx: SandboxContext) -> None:
        await anyio.sleep_forever()


@pytest.mark.needs("local")
async def test_a_hook_that_lingers_at_the_end_stops_no_other(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """seed-facts 6.2, 12 row 29: each has its own time; the end is told, and goes on."""
    monkeypatch.setattr("gateway.sessions.CLOSE_SECONDS", 1.0)
    lingering = {"use": "tests.gateway.test_workspace:Lingers"}
    hooks = (*noting("a"), lingering, lingering)
    async with running(state_dir, profiles=profile(sandbox_hooks=hooks)) as gateway:
        session = await opened(gateway, labels={"who": "test"})
        with anyio.fail_after(20):
            report = await gateway.close_session(session)
    assert report.failed == ("Lingers: took over 1 s and was given up",) * 2
    assert Noting.log == ["a created", "a destroyed"]


class Sync(SandboxHook):
    def on_create(self, ctx: SandboxContext) -> None:  # type: ignore[override]
        """Not async."""


@pytest.mark.parametrize(
    ("use", "options", "says"),
    [
        ("tests.gateway.test_workspace:Sync", {}, "on_create is not async"),
        ("tests.gateway.test_workspace:Noting", {"nam": "x"}, "unexpected keyword argument 'nam'"),
        ("fractions:Fraction", {}, "not a SandboxHook"),
        ("tests.gateway.test_workspace:Nothing", {}, "has no Nothing"),
        ("gateway.workspace_hooks.git:GitIdentity", {"name": "a\nb", "email": "x"}, "one line each"),
        ("gateway.workspace_hooks.git:GitIdentity", {}, "missing 2 required"),
    ],
)
def test_a_wrong_hook_is_refused_at_the_start(use: str, options: dict[str, Any], says: str) -> None:
    """The message names the hook, the remedy what to write."""
    settings = settings_of(profiles=profile(sandbox_hooks=({"use": use, "options": options},)))
    with pytest.raises(SettingsError, match=says) as error:
        build_sandbox_hooks(settings, Path())
    assert use in error.value.message


def test_the_kind_none_has_nothing_to_prepare() -> None:
    """seed-facts 6.1: no SandboxHook fires where there is no sandbox, so none may be asked for."""
    for more in ({"setup": "true"}, {"sandbox_hooks": noting("a")}):
        with pytest.raises(ValueError, match="no workspace to prepare"):
            settings_of(profiles=profile("none", **more))


# the ready ones


@pytest.mark.parametrize("kind", KINDS)
async def test_a_setup_command_runs_before_the_first_call(state_dir: Path, kind: str) -> None:
    """After the seed, in the workspace, as a shell would run it."""
    async with running(state_dir, profiles=profile(kind, setup="tr a-z A-Z < seed > $HOME/large && pwd")) as gateway:
        session = await opened(gateway, seed=[{"path": "seed", "text": "seed"}])
        assert await ran(gateway, session, "cat ~/large") == "SEED"
        await gateway.close_session(session)


@pytest.mark.needs("local")
async def test_a_setup_that_fails_opens_nothing(state_dir: Path) -> None:
    """seed-facts 6.1: the end of its output says why."""
    async with served(state_dir, profiles=profile(setup="echo the reason >&2; exit 7")) as server:
        answer = await server.agent.post("/v1/sessions", json={})
    assert answer.json()["detail"] == "SetupCommand: SetupFailed: setup ended with exit code 7: the reason"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_git_identity_is_there(state_dir: Path, kind: str) -> None:
    """seed-facts 7.3: what git itself reads from it; on a kind without git the file is just there."""
    identity = {"name": 'Ada "the Countess" \\ Lovelace', "email": "ada@example.com"}
    hooks = ({"use": "gateway.workspace_hooks.git:GitIdentity", "options": identity},)
    async with running(state_dir, profiles=profile(kind, sandbox_hooks=hooks)) as gateway:
        session = await opened(gateway)
        if kind == "virtual":
            assert 'email = "ada@example.com"' in await ran(gateway, session, "cat ~/.gitconfig")
            return
        committed = "git init -q r && cd r && git commit -q --allow-empty -m x && git log --format='%an <%ae>'"
        assert await ran(gateway, session, committed) == f"{identity['name']} <{identity['email']}>"
        await gateway.close_session(session)


# seeds


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("to", ["repo", "."])
async def test_a_git_bundle_is_cloned(state_dir: Path, bundle: Path, kind: str, to: str) -> None:
    """Its commit is checked out, as the sandbox's user, so that git trusts it; nothing else stays."""
    async with running(state_dir, profiles=profile(kind, seed=({"from": str(bundle), "to": to},))) as gateway:
        session = await opened(gateway)
        said = await ran(
            gateway, session, f"cd {to} && cat readme && git status --short --branch && git log --format=%s"
        )
        assert said.splitlines() == ["from the bundle", "## main...origin/main", "first"]
        assert await ran(gateway, session, "ls -A ~") == ""
        await gateway.close_session(session)


async def test_a_git_bundle_needs_git(state_dir: Path, bundle: Path) -> None:
    """The kind has none, and that is what is said."""
    async with served(state_dir, profiles=profile("virtual", seed=({"from": str(bundle)},))) as server:
        answer = await server.agent.post("/v1/sessions", json={})
    assert "needs git in the sandbox" in answer.json()["detail"]


@pytest.mark.needs("local")
async def test_a_git_bundle_without_a_head_is_refused(state_dir: Path, tmp_path: Path, bundle: Path) -> None:
    """git itself would clone it, and show an empty folder."""
    git(tmp_path / "repository", "bundle", "create", "--quiet", str(tmp_path / "headless"), "main")
    async with served(state_dir, profiles=profile(seed=({"from": str(tmp_path / "headless"), "to": "r"},))) as server:
        answer = await server.agent.post("/v1/sessions", json={})
    assert "git bundle create FILE HEAD BRANCH" in answer.json()["detail"]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A real S3 server, reached with what the environment says."""
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as server:
        options = server.options()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(options["key"]))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(options["secret"]))
        monkeypatch.setenv("AWS_ENDPOINT_URL", str(options["endpoint_url"]))
        yield server


@pytest.mark.needs("s3")
async def test_a_seed_comes_from_s3_and_a_collection_goes_there(state_dir: Path, s3: S3) -> None:
    """design 5, 6: any fsspec URI on both ways, many small files and one that is streamed."""
    root = s3.uri()
    there = fsspec.filesystem("s3", skip_instance_cache=True, **s3.options())
    files = {f"d/f{n}": b"%d" % n for n in range(300)} | {"large": bytes(200_000), "a b": b"spaced"}
    for name, content in files.items():
        there.pipe_file(f"{root}/in/{name}", content)
    settings = profile(
        "virtual",
        seed=({"from": f"{root}/in", "to": "data"},),
        collect=({"match": "data/**", "to": f"{root}/out"},),
    )
    async with running(state_dir, profiles=settings) as gateway:
        session = await opened(gateway)
        assert await ran(gateway, session, "find data -type f | wc -l; cat 'data/a b'") == "302\nspaced"
        report = await gateway.close_session(session)
    assert (report.failed, [(one.files, one.complete) for one in report.collected]) == ((), [(302, True)])
    place = f"{root}/out/{session.id}"
    manifest = json.loads(there.cat_file(f"{place}/manifest.json"))
    assert {one["path"]: there.cat_file(f"{place}/{one['key']}") for one in manifest["files"]} == {
        f"data/{name}": content for name, content in files.items()
    }


@contextmanager
def website(folder: Path) -> Iterator[str]:
    """A real web server over a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_a_seed_comes_from_the_web(state_dir: Path, tmp_path: Path) -> None:
    """A tar is unpacked, any other file copied under its name; one over the workspace's size is refused."""
    site = tmp_path / "site"
    (site / "src").mkdir(parents=True)
    (site / "src" / "x").write_text("from the tar")
    with tarfile.open(site / "a.tar.gz", "w:gz") as tar:
        tar.add(site / "src", "src")
    (site / "plain.txt").write_text("plain")
    (site / "large").write_bytes(bytes(3_000_000))
    with website(site) as url:
        seeds = ({"from": f"{url}/a.tar.gz", "to": "in"}, {"from": f"{url}/plain.txt?x=1"})
        async with running(state_dir, profiles=profile("virtual", seed=seeds)) as gateway:
            session = await opened(gateway)
            assert await ran(gateway, session, "cat in/src/x plain.txt") == "from the tarplain"
        large = profile("virtual", seed=({"from": f"{url}/large"},), limits={"workspace_size": 2_000_000})
        async with served(state_dir, profiles=large) as server:
            answer = await server.agent.post("/v1/sessions", json={})
            assert (answer.status_code, answer.json()["detail"]) == (422, "seed: more than 2,000,000 bytes")
        missing = profile("virtual", seed=({"from": f"{url}/none"},))
        async with served(state_dir, profiles=missing) as server:
            answer = await server.agent.post("/v1/sessions", json={})
            assert (answer.status_code, answer.json()["detail"]) == (422, "seed: nothing is stored under this key")


@pytest.mark.needs("local")
async def test_a_seed_over_the_caps_writes_nothing(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A31: too many files, or more bytes than the workspace may hold, in sum over all sources."""
    (tmp_path / "in").mkdir()
    for n in range(5):
        (tmp_path / "in" / str(n)).write_bytes(bytes(400_000))
    settings = profile(seed=({"from": str(tmp_path / "in")},), limits={"workspace_size": 2_500_000})
    async with served(state_dir, profiles=settings) as server:
        refused = await server.agent.post("/v1/sessions", json={"seed": [{"path": "more", "text": "x" * 600_000}]})
        assert (refused.status_code, refused.json()["code"]) == (422, "content_too_large")
        assert (await server.agent.post("/v1/sessions", json={})).status_code == 201
        monkeypatch.setattr("gateway.workspace_hooks.seed.MAX_FILES", 4)
        refused = await server.agent.post("/v1/sessions", json={})
        assert "at most 4 files" in refused.json()["detail"]


@pytest.mark.parametrize("kind", KINDS)
async def test_seeded_files_belong_to_the_sandbox(state_dir: Path, tmp_path: Path, kind: str) -> None:
    """K09: thousands of small files in one go, with their modes; the agent may change and remove each."""
    folder = tmp_path / "in"
    for n in range(1000):
        (folder / f"d{n % 10}").mkdir(parents=True, exist_ok=True)
        (folder / f"d{n % 10}" / f"f{n}").write_text(f"{n}\n")
    (folder / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o755)
    async with running(state_dir, profiles=profile(kind, seed=({"from": str(folder)},))) as gateway:
        session = await opened(gateway)
        assert await ran(gateway, session, "cat d*/* | sort -n | sha256sum") == sha256_of(1000) + "  -"
        command = "./run; rm d3/f3; echo new > d4/f4; find d0 -type f -perm 644 | wc -l"
        assert await ran(gateway, session, command) == "ran\n100"
        await gateway.close_session(session)


def sha256_of(count: int) -> str:
    return hashlib.sha256("".join(f"{n}\n" for n in range(count)).encode()).hexdigest()


# a caller's own seeds


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Something that callers may seed from, and something beside it."""
    (tmp_path / "public" / "d").mkdir(parents=True)
    (tmp_path / "public" / "d" / "x").write_text("public")
    (tmp_path / "public" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "public-not").write_text("secret")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/public/x", b"public")
    memory.pipe_file("/bucket/secret", b"secret")
    return tmp_path


SEED_FROM = ("./public", "memory://bucket/public")


@pytest.mark.parametrize("source", ["public", "./public/d/x", "file://{0}/public/d", "memory://bucket/public"])
async def test_a_caller_seeds_below_what_is_allowed(state_dir: Path, places: Path, source: str) -> None:
    """design 7: also after a restart, when the session is taken up again."""
    async with running(state_dir, places, profiles=profile("virtual", seed_from=SEED_FROM)) as gateway:
        session = await opened(gateway, seed=[{"from": source.format(places), "to": "in"}, {"path": "i", "text": "i"}])
        text = await ran(gateway, session, "cat $(find in i -type f)")
        assert sorted(text) == sorted("publici")
    async with running(state_dir, places, profiles=profile("virtual", seed_from=SEED_FROM)) as gateway:
        assert [one.state for one in gateway.sessions] == ["open"]


@pytest.mark.parametrize(
    "source",
    [
        "secret",
        "public/../secret",
        "public/out",
        "public-not",
        "/etc/passwd",
        "file:///etc/passwd",
        "local://{0}/secret",
        "memory://bucket/secret",
        "memory://bucket/public/../secret",
        "memory://bucket/public/%2e%2e/secret",
        "memory://bucket/public::file:///etc/passwd",
        "simplecache::memory://bucket/public/x",
        "memory://bucket/public*",
        "MEMORY://bucket/public/x",
        "memory://bucket/public\n/x",
        "http://169.254.169.254/latest",
    ],
)
async def test_a_caller_seeds_nothing_else(state_dir: Path, places: Path, source: str) -> None:
    """design 7, A27: no link, no dots, no escape, no chain, no other spelling leads beside it."""
    async with served(state_dir, places, profiles=profile("virtual", seed_from=SEED_FROM)) as server:
        answer = await server.agent.post("/v1/sessions", json={"seed": [{"from": source.format(places)}]})
        assert (answer.status_code, "may not come from a caller" in answer.json()["detail"]) == (422, True)


async def test_a_caller_seeds_from_nowhere_by_default(state_dir: Path, places: Path) -> None:
    async with running(state_dir, places, profiles=profile("virtual")) as gateway:
        with pytest.raises(Problem, match="may not come from a caller"):
            await opened(gateway, seed=[{"from": "public"}])


@pytest.mark.parametrize(
    ("seed", "says"),
    [
        ("nowhere", "no such file or folder"),
        ("nosuch://place/x", "nosuch:// is not known to fsspec"),
    ],
)
def test_a_seed_that_cannot_be_is_refused_at_the_start(tmp_path: Path, seed: str, says: str) -> None:
    check: Callable[[], None] = functools.partial(
        check_configuration, settings_of(profiles=profile(seed=({"from": seed},))), tmp_path
    )
    with pytest.raises(SettingsError, match=says):
        check()


def test_a_collection_into_memory_is_refused_at_the_start() -> None:
    """It would be gone before anybody could look."""
    with pytest.raises(ValueError, match="ends with its session"):
        settings_of(profiles=profile(collect=({"match": "*", "to": "memory://x"},)))
