"""A gateway over Docker sandboxes, from the settings to the answer; and what is told where there is no engine."""

import json
from pathlib import Path

import anyio
import pytest

from gateway.build import build_kinds, open_state
from gateway.demo import run_demo
from gateway.settings import Profile
from sandboxes.container import BASE_IMAGE
from tests.gateway.commandline import sandgate
from tests.gateway.conftest import called, opened, running, served

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]
DOCKER = {"default": {"kind": "docker"}}
needs_docker = pytest.mark.needs("docker")


@needs_docker
async def test_a_session_runs_its_tools_in_a_container(state_dir: Path) -> None:
    """bash, python, write, edit, grep, and a large result that is stored and read back."""
    async with running(state_dir, profiles=DOCKER) as gateway:
        session = await opened(gateway, seed=[{"path": "data/a.txt", "text": "needle\n"}])
        record = session.record()
        assert (record.kind, record.channel) == ("docker", "direct")
        assert (await called(gateway, session, "bash", command="id -un; cat data/a.txt")).text == "agent\nneedle"
        assert (await called(gateway, session, "python", code="print(6 * 7)")).text == "42"
        await called(gateway, session, "write_file", file_path="notes.md", content="TODO")
        await called(gateway, session, "edit_file", file_path="notes.md", old_string="TODO", new_string="done")
        assert (await called(gateway, session, "read_file", file_path="notes.md")).text.endswith("\tdone")
        assert (await called(gateway, session, "grep", pattern="needle")).text == "./data/a.txt:1:needle"
        large = await called(gateway, session, "bash", command="seq 100000")
        [reference] = large.references
        page = await called(gateway, session, "read_result", reference=reference.reference, lines="99999-100000")
        assert page.text == "99999\n100000"
        timed_out = await called(gateway, session, "bash", command="sleep 60 & sleep 60", timeout_s=0.3)
        assert timed_out.status == "timeout"
        report = await session.end("closed", "test")
        assert report.failed == ()
    assert list((state_dir / "channels").iterdir()) == []


@needs_docker
async def test_a_session_over_an_image_without_python_says_so(state_dir: Path) -> None:
    """The same tools through the engine's exec; the record names the channel and why."""
    async with running(state_dir, profiles={"default": {"kind": "docker", "image": BASE_IMAGE}}) as gateway:
        session = await opened(gateway, seed=[{"path": "data/a.txt", "text": "needle\n"}])
        record = session.record()
        assert (record.channel, record.channel_reason) == ("engine", f"the image {BASE_IMAGE} has no python3")
        assert (await called(gateway, session, "bash", command="cat data/a.txt; exit 3")).exit_code == 3
        await called(gateway, session, "write_file", file_path="notes.md", content="TODO")
        await called(gateway, session, "edit_file", file_path="notes.md", old_string="TODO", new_string="done")
        assert (await called(gateway, session, "read_file", file_path="notes.md")).text.endswith("\tdone")
        timed_out = await called(gateway, session, "bash", command="echo on; sleep 60 & sleep 60", timeout_s=1)
        assert (timed_out.status, timed_out.content[0].text) == ("timeout", "on\n")
        assert (await session.end("closed", "test")).failed == ()


@needs_docker
async def test_a_workspace_in_memory_is_seeded_again_after_a_loss(state_dir: Path) -> None:
    """A container that dies takes its files along; the call says so, and the next finds the seed, not what was made."""
    async with running(state_dir, profiles=DOCKER) as gateway:
        session = await opened(gateway, seed=[{"path": "a", "text": "seed"}])
        await called(gateway, session, "bash", command="echo changed > a")
        async with anyio.create_task_group() as tasks:
            results = []

            async def call() -> None:
                results.append(await called(gateway, session, "bash", command="sleep 60"))

            tasks.start_soon(call)
            await anyio.sleep(0.3)
            sandbox = await session.sandbox()
            await sandbox.aclose()
        [lost] = results
        assert lost.status == "sandbox_lost"
        assert "its files are lost" in str(lost)
        assert (await called(gateway, session, "bash", command="cat a")).text == "seed"
        await gateway.close_session(session)


@pytest.mark.slow
@needs_docker
async def test_a_workspace_on_disk_survives_the_gateway(state_dir: Path) -> None:
    """R42."""
    profiles = {"default": {"kind": "docker", "workspace": "disk"}}
    async with served(state_dir, profiles=profiles) as server:
        session = await server.session(seed=[{"path": "a", "text": "seed"}])
        await server.call(session, "bash", command="echo -n changed > a")
    async with served(state_dir, profiles=profiles) as server:
        again = await server.call(session, "bash", command="cat a")
        assert again["content"][0]["text"] == "changed"
        closed = await server.agent.delete(f"/v1/sessions/{session['id']}")
        assert closed.status_code == 200


@pytest.mark.slow
@needs_docker
async def test_demo_on_docker_leaves_nothing() -> None:
    report = await run_demo(("docker",))
    assert (report.kind, report.ok, report.left_behind) == ("docker", True, ())


@needs_docker
async def test_missing_image_refuses_the_session_with_the_command(state_dir: Path) -> None:
    profiles = {"default": {"kind": "docker", "image": "sandgate/sandbox:absent"}}
    async with served(state_dir, profiles=profiles) as server:
        answer = await server.agent.post("/v1/sessions", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "sandbox_unavailable")
        assert answer.json()["remedy"] == "make it: sandgate images build"


async def test_no_engine_refuses_the_session_and_names_what_helps(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10: and nothing else is chosen in its place."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{state_dir}/nowhere")
    async with served(state_dir, profiles=DOCKER) as server:
        answer = await server.agent.post("/v1/sessions", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "sandbox_unavailable")
        assert "no Docker engine at" in answer.json()["detail"]
        assert "install and start Docker" in answer.json()["remedy"]


def test_profiles_share_a_kind_where_image_and_workspace_are_the_same(tmp_path: Path) -> None:
    profiles = [
        Profile(kind="docker"),
        Profile(kind="docker", workspace="memory", idle_seconds=5),
        Profile(kind="docker", workspace="disk"),
        Profile(kind="docker", image="python:3.13"),
        Profile(),
    ]
    state = open_state(tmp_path)
    assert sorted(build_kinds(profiles, tmp_path, state)) == [
        "docker python:3.13 memory",
        "docker sandgate/sandbox disk",
        "docker sandgate/sandbox memory",
        "local",
    ]
    state.release()


# commands


@needs_docker
def test_images_build_says_what_it_does(tmp_path: Path) -> None:
    """From the engine's cache here; .ci/run builds it from nothing."""
    done = sandgate("images", "build", "sandbox", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("Step 1/")
    assert done.stdout.splitlines()[-1] == "built sandgate/sandbox"


@pytest.mark.parametrize("command", [("images", "build"), ("doctor", "--port", "0", "--json")])
def test_without_an_engine_commands_say_what_helps(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "sandgate.toml").write_text("[profiles.default]\nkind = 'docker'\n")
    done = sandgate(
        *command, cwd=tmp_path, DOCKER_HOST=f"unix://{tmp_path}/nowhere", SANDGATE_STATE_DIR=str(tmp_path / "state")
    )
    assert done.returncode == 1
    said = done.stderr if command[0] == "images" else json.dumps(json.loads(done.stdout))
    assert "no Docker engine at" in said
    assert "install and start Docker" in said
