"""The virtual kind passes the suite of all kinds, but for what it says that it cannot do."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from sandboxes import SandboxSpec
from sandboxes.conformance import SandboxConformance
from sandboxes.virtual import CANNOT, VirtualKind, VirtualSandbox


@pytest.fixture
async def kind(tmp_path: Path) -> AsyncIterator[VirtualKind]:
    kind = VirtualKind(tmp_path / "state", instance="test")
    yield kind
    await kind.aclose()


PROGRAMS, SIGNALS, PROCESSES, SIZES, PLAIN_TEXT = CANNOT[:5]


class TestVirtual(SandboxConformance):
    exceptions: ClassVar = {
        "test_exec_tells_a_signal_from_a_code": SIGNALS,
        "test_daemons_die_with_their_call": PROCESSES,
        "test_a_child_that_holds_stdout_does_not_hold_the_call": PROCESSES,
        "test_zombies_are_reaped": PROCESSES,
        "test_descriptor_exhaustion_stays_inside": PROCESSES,
        "test_deep_folders_are_no_trouble": SIZES,
        "test_arguments_that_are_not_text_arrive_as_they_are": PLAIN_TEXT,
        "test_names_that_are_not_plain_text_survive": PLAIN_TEXT,
    }
    output_bytes = 10 << 20
    file_bytes = 9 << 20
    folder_entries = 5000

    @pytest.fixture
    async def sandbox(self, kind: VirtualKind) -> VirtualSandbox:
        return await kind.open(SandboxSpec("conformance"))
