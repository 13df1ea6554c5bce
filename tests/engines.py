"""Which engines work here, and why not: `local`, `docker`, `s3`, `browser`."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

import anyio

from sandboxes import LocalKind


@functools.cache
def missing(engine: str) -> str | None:
    """The reason why an engine does not work on this machine, or None."""
    match engine:
        case "local":
            return anyio.run(_local)
        case "root":
            return None if os.geteuid() == 0 else "needs root"
        case "browser":
            return None if shutil.which("chromium") else "no chromium"
    return f"no test knows the engine {engine!r} yet"


async def _local() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        kind = LocalKind(Path(folder), instance="probe")
        probe = await kind.probe()
        await kind.aclose()
    return None if probe.works else probe.reason
