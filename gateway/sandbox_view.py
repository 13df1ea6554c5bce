"""The session's sandbox as hooks and function tools see it."""

from collections.abc import Awaitable, Callable, Mapping

from sandboxes import WORKSPACE, Executed, Sandbox


class SandboxView:
    """Opens the sandbox at the first use; with no sandbox nothing is executable, and asking for it says so."""

    def __init__(self, open_sandbox: Callable[[], Awaitable[Sandbox]], *, is_executable: bool = True) -> None:
        self._open = open_sandbox
        self._is_executable = is_executable

    @property
    def is_executable(self) -> bool:
        return self._is_executable

    @property
    def workspace(self) -> str | None:
        return WORKSPACE if self._is_executable else None

    async def execute(
        self, command: str, *, cwd: str | None = None, timeout_seconds: float = 60, env: Mapping[str, str] | None = None
    ) -> Executed:
        """Run a shell command; on timeout its whole tree is dead."""
        sandbox = await self._open()
        return await sandbox.execute(command, cwd=cwd, timeout_seconds=timeout_seconds, env=env)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file's bytes; over the limit is FileRefused `content_too_large`, never a part of it."""
        sandbox = await self._open()
        return await sandbox.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, content: bytes) -> None:
        sandbox = await self._open()
        await sandbox.write_file(path, content)
