"""A local kind with a state folder of its own; processes and folders are gone after the test."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes import LocalKind, SandboxSpec
from sandboxes.local import LocalSandbox


@pytest.fixture
async def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalKind]:
    kind = LocalKind(tmp_path / "state", instance=f"test-{secrets.token_hex(4)}")
    yield kind
    await kind.aclose()
    monkeypatch.undo()
    workspaces = tmp_path / "state/workspaces"
    for folder in workspaces.iterdir() if workspaces.exists() else ():
        await kind.destroy(folder.name)


@pytest.fixture
async def local(kind: LocalKind) -> LocalSandbox:
    return await kind.open(SandboxSpec("session"))
