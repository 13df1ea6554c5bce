"""The session's sandbox as hooks and function tools see it."""

from collections.abc import Awaitable, Callable, Mapping

from gateway.hooks.hook import Executed
from sandboxes import WORKSPACE, Capture, FileRefused, Sandbox

OUTPUT_BYTES = 1 << 20


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
        stdout, stderr = Capture(OUTPUT_BYTES), Capture(OUTPUT_BYTES)
        result = await sandbox.exec(
            ["sh", "-c", command],
            cwd=cwd or WORKSPACE,
            env=env,
            stdout=stdout,
            stderr=stderr,
            timeout_seconds=timeout_seconds,
        )
        code = result.exit.code if result.exit.how == "exit" and not result.timed_out else None
        return Executed(code, stdout.text(), stderr.text(), result.timed_out)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file's bytes; over the limit is FileRefused `content_too_large`, never a part of it."""
        sandbox = await self._open()
        content = bytearray()
        async for chunk in sandbox.read(path, 0, max_bytes + 1):
            content += chunk
        if len(content) > max_bytes:
            raise FileRefused(
                f"{path}: over {max_bytes:,} bytes", "Ask for more with max_bytes.", code="content_too_large"
            )
        return bytes(content)

    async def write_file(self, path: str, content: bytes) -> None:
        sandbox = await self._open()
        await sandbox.write(path, content)
