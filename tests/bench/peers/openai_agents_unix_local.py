# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents>=0.24.0"]
# ///
"""Time the OpenAI Agents SDK's unix-local sandbox: a workspace folder; on Linux the command itself is not confined."""

import asyncio

from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from peer_timing import calls_wanted, check_hi, report, time_async_calls


async def main() -> None:
    client = UnixLocalSandboxClient()
    session = await client.create()
    try:
        async with session:

            async def run() -> None:
                done = await session.exec("echo hi")
                check_hi(done.exit_code, done.stdout.decode())

            calls = calls_wanted()
            report("OpenAI Agents SDK (unix-local)", "openai-agents", await time_async_calls(run, calls), calls)
    finally:
        await client.delete(session)


if __name__ == "__main__":
    asyncio.run(main())
