"""The local kind passes the suite of all kinds."""

from collections.abc import AsyncIterator


import pytest

from sandboxes import LocalKind, SandboxSpec
from sandboxes.local import LocalSandbox
from tests.sandboxes.conformance import SandboxConformance


@pytest.mark.needs("local")
class TestLocal(SandboxConformance):
    @pytest.fixture
    async def sandbox(self, kind: LocalKind) -> AsyncIterator[LocalSandbox]:  # type: ignore[override]
        yield await kind.open(SandboxSpec("conformance"))
