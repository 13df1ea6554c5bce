"""What every test may use, and the rule for tests whose engine is missing: skipped with the reason, or failed where
`SANDGATE_TEST_REQUIRE` names it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

pytest.register_assert_rewrite("sandboxes.conformance")

from tests.engines import left_in_engine, missing  # noqa: E402

TEMPORARY = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A folder of this run's own: tests make trees too deep for pytest's own clean-up of earlier runs."""
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.stash[TEMPORARY] = tempfile.mkdtemp(prefix="sandgate-tests-")
        config.option.basetemp = f"{config.stash[TEMPORARY]}/run"


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(TEMPORARY, None):
        subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own SANDGATE_* variables are not the tests'."""
    for name in list(os.environ):
        if name.startswith("SANDGATE_") and not name.startswith("SANDGATE_TEST_"):
            monkeypatch.delenv(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for engine in mark.args:
            reason = missing(engine)
            if reason is None:
                continue
            if engine in os.environ.get("SANDGATE_TEST_REQUIRE", "").split(","):
                pytest.fail(f"{engine} is required and does not work here: {reason}", pytrace=False)
            pytest.skip(f"{engine} does not work here: {reason}")


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder for a gateway's state. Sandboxes that outlive its gateways do not outlive the test."""
    folder = tmp_path / "state"
    yield folder
    if (folder / "channels").exists():
        anyio.run(left_in_engine, folder, True)
