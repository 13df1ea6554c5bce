# /// script
# requires-python = ">=3.11"
# dependencies = ["bashkit>=0.20.1"]
# ///
"""Time bashkit, a bash interpreter inside the process: no process is started, no system call is confined."""

from bashkit import Bash
from peer_timing import calls_wanted, check_hi, report, time_calls


def main() -> None:
    bash = Bash()

    def run() -> None:
        done = bash.execute_sync("echo hi")
        check_hi(done.exit_code, done.stdout)

    calls = calls_wanted()
    report("bashkit", "bashkit", time_calls(run, calls), calls)


if __name__ == "__main__":
    main()
