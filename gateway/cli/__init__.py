"""The command `sandgate`: one command a file, each imported only when it is used."""

import os
import sys
import threading
import time
from typing import Final

LAST_SECONDS: Final = 1.0


def main() -> None:
    """Run the command line and exit with its code."""
    from gateway.cli.app import run

    _leave(run())


def _leave(code: int) -> None:
    """Exit, also where the code of a hook or a tool hangs in a thread: Python would wait for it without end."""
    deadline = time.monotonic() + LAST_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    raise SystemExit(code)
