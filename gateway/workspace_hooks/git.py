"""GitIdentity: who commits in a workspace; and the cloning of a git bundle, which a seed may be."""

import re
import secrets
from pathlib import Path
from typing import Final

import anyio.to_thread

from sandboxes import HOME, Capture, CommandRefused, Sandbox, SandboxContext, SandboxHook, file_chunks

CLONE_SECONDS: Final = 300.0
_BUNDLE: Final = re.compile(rb"# v\d+ git bundle\n")


class GitIdentity(SandboxHook):
    """Writes the name and the address of commits to `~/.gitconfig`; a restored one is left as it is."""

    def __init__(self, name: str, email: str) -> None:
        if any(character in text for text in (name, email) for character in "\n\0"):
            raise ValueError("a name and an address are one line each")
        self._name = name
        self._email = email

    async def on_create(self, ctx: SandboxContext) -> None:
        if not ctx.restored:
            config = f"[user]\n\tname = {_quoted(self._name)}\n\temail = {_quoted(self._email)}\n"
            await ctx.sandbox.write_file(f"{HOME}/.gitconfig", config.encode())


def _quoted(value: str) -> str:
    """A value as git's configuration file writes it (git-config, "Syntax")."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_bundle(path: Path) -> bool:
    """Whether a file was made by `git bundle create`."""
    with path.open("rb") as file:
        return _BUNDLE.match(file.read(64)) is not None


async def clone_bundle(sandbox: Sandbox, bundle: Path, to: str) -> None:
    """Clone it inside, as the sandbox's user; the remote `origin` leads nowhere afterwards. Raises RuntimeError."""
    place = f"{HOME}/.seed-{secrets.token_hex(8)}.bundle"
    with await anyio.to_thread.run_sync(bundle.open, "rb") as file:
        await sandbox.write(place, file_chunks(file))
    try:
        await _git(sandbox, "clone", "--quiet", "--", place, to)
        await _git(sandbox, "-C", to, "rev-parse", "--quiet", "--verify", "HEAD")
    finally:
        await sandbox.remove(place)


async def _git(sandbox: Sandbox, *arguments: str) -> None:
    said = Capture(2000)
    try:
        ran = await sandbox.exec(["git", *arguments], stdout=said, stderr=said, timeout_seconds=CLONE_SECONDS)
    except CommandRefused as error:
        raise RuntimeError("seed: a git bundle needs git in the sandbox; seed a tar, or take another image") from error
    if ran.timed_out or (ran.exit.how, ran.exit.code) != ("exit", 0):
        raise RuntimeError(
            f"seed: git {arguments[0]} failed: {said.text().strip()[:500] or 'the bundle has no HEAD'}; make the "
            "bundle with `git bundle create FILE HEAD BRANCH`"
        )
