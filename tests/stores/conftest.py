"""One store of each kind that needs no server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stores import Store
from tests.stores import objects


@pytest.fixture(params=["file", "memory", "objects"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    objects.register()
    uris = {"file": f"file://{tmp_path}/root", "memory": "memory://root", "objects": "objects://bucket/root"}
    opened = Store.from_uri(uris[request.param])
    yield opened
    await opened.aclose()


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store.from_uri(f"file://{tmp_path}/root")
    yield opened
    await opened.aclose()
