# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents[docker]>=0.24.0"]
# ///
"""Time the OpenAI Agents SDK's Docker sandbox: one container, the engine's exec for each command."""

import asyncio

import docker
from agents.sandbox.sandboxes.docker import DockerSandboxClient, DockerSandboxClientOptions
from peer_timing import IMAGE, calls_wanted, check_hi, report, time_async_calls


async def main() -> None:
    client = DockerSandboxClient(docker.from_env())
    session = await client.create(options=DockerSandboxClientOptions(image=IMAGE))
    try:
        async with session:

            async def run() -> None:
                done = await session.exec("echo hi")
                check_hi(done.exit_code, done.stdout.decode())

            calls = calls_wanted()
            report("OpenAI Agents SDK (docker)", "openai-agents", await time_async_calls(run, calls), calls)
    finally:
        await client.delete(session)


if __name__ == "__main__":
    asyncio.run(main())
