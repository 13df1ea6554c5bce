# /// script
# requires-python = ">=3.11"
# dependencies = ["llm-sandbox[docker]>=0.3.46"]
# ///
"""Time llm-sandbox's Docker backend: one container, the engine's exec for each command."""

from llm_sandbox.docker import SandboxDockerSession
from peer_timing import IMAGE, calls_wanted, check_hi, report, time_calls

STAYS = {"command": ["sleep", "600"]}


def main() -> None:
    # The set-up left out makes a virtualenv for Python code; commands do not use it.
    with SandboxDockerSession(image=IMAGE, runtime_configs=STAYS, skip_environment_setup=True) as session:

        def run() -> None:
            done = session.execute_command("sh -c 'echo hi'")
            check_hi(done.exit_code, done.stdout)

        calls = calls_wanted()
        report("llm-sandbox (docker)", "llm-sandbox", time_calls(run, calls), calls)


if __name__ == "__main__":
    main()
