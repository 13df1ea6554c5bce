"""`sandgate init`: a configuration to start from."""

import os
from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import Parameter

from gateway.cli.template import default_toml
from gateway.doctor import probe_kinds
from gateway.errors import SettingsError
from gateway.settings import CONFIG_NAME, Settings
from gateway.text import printable
from sandboxes import Probe


def init_command(
    path: Annotated[Path, Parameter(help="The file to write.")] = Path(CONFIG_NAME),
    /,
    *,
    force: Annotated[bool, Parameter(name="--force", negative="", help="Replace what is there.")] = False,
) -> None:
    """Write sandgate.toml with every default, explained, and marked where this machine does not enforce it."""
    kinds = {profile.kind for profile in Settings.model_construct().profiles.values()}
    probes = anyio.run(probe_kinds, sorted(kinds))
    broken = [probe for probe in probes if not probe.works]
    text = default_toml(
        [gap for probe in probes for gap in probe.not_enforced], " ".join(f"NOTE: {_why(probe)}" for probe in broken)
    )
    _write(path, text, force=force)
    print(f"wrote {printable(str(path))}; next: `sandgate doctor`, then `sandgate serve`")
    for probe in broken:
        print(f"note: {printable(_why(probe))}")


def _why(probe: Probe) -> str:
    return f"the kind {probe.kind} does not work on this machine: {probe.reason}. {probe.remedy}".strip()


def _write(path: Path, text: str, *, force: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o644), "w") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(f"{path} is there already", "Replace it with --force, or name another file.") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "Name a file in a folder that you may write to.") from error
