"""The images, and the gateway in a container: really built, really started by compose, called from outside."""

import io
import json
import os
import secrets
import socket
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.cli.images import build, build_context
from gateway.client import Client

FOLDER = Path(__file__).parents[2] / "docker"
SOCKET = Path("/var/run/docker.sock")
USER = 1234 if os.geteuid() == 0 else os.geteuid()
BASE, PROXY = ("compose.yaml",), ("compose.yaml", "compose.proxy.yaml")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.needs("compose"),
    pytest.mark.xdist_group("compose"),
]
FORBIDDEN = [
    ("GET", "/secrets"),
    ("GET", "/images/json"),
    ("GET", "/containers/json/../../secrets"),
    ("GET", "/containers/sandgate-x/archive?path=/"),
    ("POST", "/build"),
    ("POST", "/images/create?fromImage=debian"),
    ("POST", "/containers/create"),
    ("POST", "/containers/create?name=other"),
    ("POST", "/containers/other/start"),
    ("POST", "/containers/other/exec"),
    ("POST", "/containers/sandgate-x/rename?name=other"),
    ("POST", "/networks/other/connect"),
    ("PUT", "/containers/sandgate-x/archive?path=/"),
    ("DELETE", "/images/sandgate/sandbox"),
    ("DELETE", "/networks/bridge"),
    ("DELETE", "/volumes/other"),
]
PROFILES = {
    "SANDGATE_AGENT__PROFILES": '["default", "open", "ready"]',
    "SANDGATE_PROFILES__OPEN": '{"kind": "docker", "network": "open", "workspace": "disk"}',
    "SANDGATE_PROFILES__READY": '{"kind": "docker", "pool": {"min": 1, "max": 2}}',
}
LIST = """
import io, tarfile
from gateway.cli.images import build_context
print(*tarfile.open(fileobj=io.BytesIO(build_context())).getnames(), sep="\\n")
"""
ASK = """
import docker, json, os, sys
api = docker.APIClient(os.environ["DOCKER_HOST"], version="1.41")
print(json.dumps([api.request(method, f"{api.base_url}/v1.41{path}").json() for method, path in json.load(sys.stdin)]))
"""


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"docker {arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Composed:
    """A gateway under compose."""

    command: Sequence[str]
    environment: dict[str, str]
    state_dir: Path

    def compose(self, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def client(self) -> Client:
        port, token = self.environment["GATEWAY_PORT"], (self.state_dir / "tokens" / "agent").read_text().strip()
        return Client(f"http://127.0.0.1:{port}", token)


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    """Of this code: the engine's cache has what changes seldom."""
    list(build("gateway"))


@contextmanager
def composed(state_dir: Path, files: Sequence[str], user: int = USER) -> Iterator[Composed]:
    """Up and ready; afterwards nothing of it is there."""
    state_dir.mkdir()
    os.chown(state_dir, user, -1)
    project = f"sandgate-test-{secrets.token_hex(4)}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "STATE_DIR": str(state_dir),
        "GATEWAY_USER": f"{user}:{user}",
        "ENGINE_GROUP": str(SOCKET.stat().st_gid),
        "GATEWAY_PORT": str(port),
    }
    named = [word for file in files for word in ("-f", str(FOLDER / file))]
    one = Composed(["docker", "compose", "-p", project, *named], environment, state_dir)
    try:
        one.compose("up", "--wait")
        yield one
    finally:
        said = one.compose("logs", "--no-color")
        one.compose("down", "--volumes")
        print(said)
    instance = (state_dir / "instance").read_text()
    for what in ("container", "volume", "network"):
        for label in (f"com.docker.compose.project={project}", f"sandgate.instance={instance}"):
            everything = ("--all",) if what == "container" else ()
            assert docker(what, "ls", "--quiet", *everything, "--filter", f"label={label}") == ""


@pytest.mark.parametrize(("files", "user"), [(BASE, USER), (PROXY, os.geteuid())], ids=["socket", "proxy"])
async def test_a_gateway_under_compose_runs_commands_in_sandboxes_beside_it(
    state_dir: Path, files: tuple[str, ...], user: int
) -> None:
    """A14, R53, and a restart: the sidecar as the README starts it, with the engine's socket and with the proxy; of an
    ordinary user, and of root without any capability."""
    with composed(state_dir, files, user) as one:
        async with one.client() as client, client.session(limits={"memory": 128 << 20}) as session:
            assert (await session.call("bash", {"command": "echo hi | tee kept"})).text == "hi"
            record = await session.record()
            assert (record.kind, record.channel) == ("docker", "direct")
            hog = await session.call("bash", {"command": "exec python3 -c 'bytearray(1 << 30)'"})
            assert hog.status == "oom"
            one.compose("restart", "gateway")
            one.compose("up", "--wait")
            assert (await session.call("bash", {"command": "cat kept"})).text == "hi"
        found = json.loads(one.compose("exec", "-T", "gateway", "sandgate", "doctor", "--json"))
        assert found["works"]
        works = {check["name"] for check in found["checks"] if check["verdict"] == "ok"}
        assert {"kind docker sandgate/sandbox memory", "state folder"} <= works


async def test_the_socket_proxy_lets_through_what_a_gateway_needs_and_no_more(state_dir: Path, tmp_path: Path) -> None:
    """Also for a network, volumes, and sandboxes at the ready."""
    more = tmp_path / "profiles.yaml"
    more.write_text(json.dumps({"services": {"gateway": {"environment": PROFILES}}}))
    with composed(state_dir, (*PROXY, str(more))) as one:
        async with one.client() as client:
            for profile in ("open", "ready"):
                async with client.session(profile) as session:
                    assert (await session.call("bash", {"command": "echo hi"})).text == "hi"
        assert [line for line in one.compose("logs", "--no-color", "engine").splitlines() if " 403 " in line] == []
        answers = json.loads(one.compose("exec", "-T", "gateway", "python3", "-c", ASK, stdin=json.dumps(FORBIDDEN)))
        said = [(call, answer["message"]) for call, answer in zip(FORBIDDEN, answers, strict=True)]
        assert said == [(call, "the socket proxy does not let this call through") for call in FORBIDDEN]
        mounts = json.loads(docker("inspect", one.compose("ps", "-q", "gateway").strip()))[0]["Mounts"]
        assert str(SOCKET) not in {mount["Source"] for mount in mounts}


def test_an_installed_package_has_all_that_images_are_built_from() -> None:
    """The one in the image came as a wheel."""
    named = docker("run", "--rm", "--entrypoint", "python3", "sandgate/gateway", "-c", LIST).split()
    with tarfile.open(fileobj=io.BytesIO(build_context())) as ours:
        assert set(named) | {"ca-bundle.crt"} == set(ours.getnames()) | {"ca-bundle.crt"}


def doctor(outside: Path, inside: Path) -> tuple[int, list[dict[str, str]]]:
    """Its exit code in a container that has the state folder there, and what it says about the kind docker."""
    outside.mkdir()
    os.chown(outside, USER, -1)
    environment = {"SANDGATE_STATE_DIR": str(inside), "SANDGATE_PROFILES__DEFAULT__KIND": "docker"}
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--user", f"{USER}", "--group-add", str(SOCKET.stat().st_gid)),
            *("--volume", f"{SOCKET}:{SOCKET}", "--volume", f"{outside}:{inside}"),
            *(word for name, value in environment.items() for word in ("--env", f"{name}={value}")),
            *("sandgate/gateway", "doctor", "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, [check for check in checks if check["name"].startswith("kind docker")]


def test_doctor_tells_when_the_state_folder_has_another_path_outside(state_dir: Path) -> None:
    code, [check] = doctor(state_dir, Path("/elsewhere"))
    assert (code, check["verdict"]) == (1, "broken")
    assert check["detail"].startswith("the engine does not see the state folder at /elsewhere")
    assert "at the path that it has outside" in check["remedy"]


def test_doctor_tells_when_kills_for_memory_are_not_seen(state_dir: Path) -> None:
    code, checks = doctor(state_dir, state_dir)
    assert code == 0
    [remedy] = [check["remedy"] for check in checks if check["detail"].startswith("not enforced: oom: ")]
    assert "/sys/fs/cgroup" in remedy
