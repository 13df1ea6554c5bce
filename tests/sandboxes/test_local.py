"""The local kind passes the suite of all kinds."""

import pytest

from sandboxes import LocalKind, SandboxSpec
from sandboxes.conformance import SandboxConformance
from sandboxes.local import LocalSandbox


@pytest.mark.needs("local")
class TestLocal(SandboxConformance):
    @pytest.fixture
    async def sandbox(self, kind: LocalKind) -> LocalSandbox:
        return await kind.open(SandboxSpec("conformance"))
