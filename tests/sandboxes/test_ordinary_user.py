"""The same as an ordinary user: no root, no control groups, the gateway's own uid."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

USER = "12345"
CORE = "TestLocal or test_attacks or bomb or nproc or destroy or gateway"

AGAIN = "import subprocess as s, sys; s.run([sys.executable, '-c', 'import anyio, pytest, sandboxes'], check=True)"


def as_user(python: str, *arguments: str, home: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *(path for path in sys.path if "site-packages" in path)])
    return subprocess.run(
        ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", python, "-B", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": paths, "HOME": home, "SANDGATE_TEST_REQUIRE": "local"},
    )


def readable_python(home: str) -> str:
    """A Python of our own version that the user may read, with our packages; root's own is often below /root."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        if Path(python).exists() and as_user(python, "-c", AGAIN, home=home).returncode == 0:
            return python
    pytest.skip("no Python here that an ordinary user may read")


@pytest.mark.slow
@pytest.mark.needs("local")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user; the other tests ran as one")
def test_core_passes_as_an_ordinary_user() -> None:
    """A01-A38 once more, without root."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv")
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, int(USER), int(USER))
        python = readable_python(home)
        ran = as_user(
            python,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-n",
            "2",
            "--basetemp",
            f"{home}/t",
            "-c",
            str(Path(__file__).parents[2] / "pyproject.toml"),
            str(Path(__file__).parent),
            "-k",
            CORE,
            home=home,
        )
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
        assert " passed" in ran.stdout
