"""`sandgate images build`: the image that Docker sandboxes are made of."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gateway.errors import Unavailable
from gateway.text import printable
from sandboxes import SandboxUnavailable
from sandboxes.container import DEFAULT_IMAGE
from sandboxes.docker import build_image


def images_command(
    action: Annotated[Literal["build"], Parameter(help="What to do.")],
    /,
    *,
    tag: Annotated[str, Parameter(name="--tag", help="The image's name; a profile's `image` may name another.")] = (
        DEFAULT_IMAGE
    ),
) -> None:
    """Build the image of Docker sandboxes, with Docker's own words as it goes.

    Debian with Python, ripgrep, git and make, and a user for the agent. The first time takes a minute; the engine
    fetches packages from the network.
    """
    try:
        for line in build_image(dockerfile(), tag):
            print(printable(line), flush=True)
    except SandboxUnavailable as error:
        raise Unavailable(error.message, error.remedy) from error
    print(f"built {printable(tag)}")


def dockerfile() -> bytes:
    """The Dockerfile, a link into `docker/` that becomes a file in the package."""
    return Path(__file__).with_name("sandbox.Dockerfile").read_bytes()
