"""Asking a running gateway: who we are to it, and its refusals as errors of ours."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import anyio

from gateway.cli.failures import only
from gateway.cli.options import state_folder
from gateway.client import Client, ClientError, Session, endpoint
from gateway.errors import SandgateError
from gateway.principals import Role

_T = TypeVar("_T")
_ID_CHARACTERS: Final = 34


class RemoteError(SandgateError):
    """The gateway was not there, or said no."""


def ask(role: Role, state_dir: Path | None, work: Callable[[Client], Awaitable[_T]]) -> _T:
    """Run `work` with a client that holds SANDGATE_TOKEN, or else the token of that role in the state folder."""

    async def run() -> _T:
        async with Client(token=token_of(role, state_dir)) as client:
            return await work(client)

    with refusals():
        return anyio.run(run)


@contextmanager
def refusals() -> Iterator[None]:
    """The client's errors as ours."""
    try:
        yield
    except Exception as raised:
        error = only(raised)
        if isinstance(error, ClientError):
            raise RemoteError(error.message, error.remedy) from error
        raise


def token_of(role: Role, state_dir: Path | None) -> str | None:
    """None where no token can be read: the gateway then says what it wants."""
    if endpoint().token is not None:
        return None
    try:
        return (state_folder(state_dir) / "tokens" / role).read_text().strip()
    except OSError:
        return None


async def find_session(client: Client, name: str) -> Session:
    """The session of that id, or the only one whose id begins so."""
    if len(name) >= _ID_CHARACTERS:
        return await client.attach(name)
    found = [one.id for one in await client.sessions() if one.id.startswith(name)]
    if len(found) != 1:
        what = "no session" if not found else f"{len(found)} sessions"
        raise RemoteError(f"{what} with an id that begins with {name!r}", "sandgate sessions --all lists them.")
    return await client.attach(found[0])
