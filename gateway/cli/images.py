"""`sandgate images build`: the images of Docker sandboxes, and of the gateway itself for compose."""

import io
import os
import ssl
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

import gateway
import sandboxes
import stores
from gateway.errors import Unavailable
from gateway.text import printable
from sandboxes import SandboxUnavailable
from sandboxes.container import DEFAULT_IMAGE
from sandboxes.docker import build_image

Image = Literal["sandbox", "gateway"]
TAGS: Final[dict[Image, str]] = {"sandbox": DEFAULT_IMAGE, "gateway": "sandgate/gateway"}
_CONTEXT: Final = Path(__file__).with_name("context")
_ROOT_FILES: Final = ("pyproject.toml", "README.md", "LICENSE")


def images_command(
    action: Annotated[Literal["build"], Parameter(help="What to do.")],
    which: Annotated[Image | None, Parameter(help="Only this one; default: both.")] = None,
    /,
) -> None:
    """Build the images sandgate/sandbox and sandgate/gateway, with Docker's own words as it goes.

    The sandbox: Debian with Python, ripgrep, git and make, and a user for the agent. The gateway: this very code, for
    docker/compose.yaml. The first time takes two minutes; the engine fetches packages from the network, and pip there
    trusts the certificates that it trusts here (PIP_CERT, else this machine's).
    """
    for image in TAGS if which is None else (which,):
        try:
            for line in build(image):
                print(printable(line), flush=True)
        except SandboxUnavailable as error:
            raise Unavailable(error.message, error.remedy) from error
        print(f"built {TAGS[image]}", flush=True)


def build(image: Image) -> Iterator[str]:
    """Build one image; yields what the engine says. Raises SandboxUnavailable."""
    return build_image(build_context(), f"gateway/cli/context/{image}.Dockerfile", TAGS[image])


def build_context() -> bytes:
    """A tar of what a clone has at these places: the code that runs here. The links in `context` lead to files that
    the package holds in their place."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for package in (gateway, sandboxes, stores):
            tar.add(Path(str(package.__file__)).parent, package.__name__, filter=_without_caches)
        for name in _ROOT_FILES:
            tar.add(_CONTEXT / name, name)
        if certificates := next(filter(os.path.isfile, _certificates()), None):
            tar.add(certificates, "ca-bundle.crt")
    return archive.getvalue()


def _certificates() -> Iterator[str]:
    """Where the certificates may be that this machine trusts; the last is Debian's and its kin's."""
    yield os.environ.get("PIP_CERT", "")
    yield ssl.get_default_verify_paths().cafile or ""
    yield "/etc/ssl/certs/ca-certificates.crt"


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name == "__pycache__" else member
