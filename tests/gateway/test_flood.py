"""Output without end: memory stays, digests are right."""

import hashlib

import pytest

from tests.bench.http import memory_growth, serving

pytestmark = [pytest.mark.needs("local"), pytest.mark.slow]

CODE = "import sys; b = b'0123456789abcde\\n' * 65536\nfor _ in range({count}): sys.stdout.buffer.write(b)"
CHUNK = b"0123456789abcde\n" * 65536


def test_gigabytes_of_output_leave_memory_as_it_was() -> None:
    """A19, R24, R19: 3 GiB that no rule stores: head, tail and a count."""
    with serving(hooks=False) as server:
        session = server.session()
        server.call(session, "python", code="print('x' * 100_000)")
        with memory_growth(server.process) as grown:
            result = server.call(session, "python", code=CODE.format(count=3072), timeout_s=120)
    assert result["status"] == "ok"
    assert result["truncated"]
    text = result["content"][0]["text"]
    assert text.startswith("0123456789abcde\n")
    assert text.endswith("0123456789abcde\n")
    assert len(text) < (1 << 20) + 100
    assert grown[0] < 64


def test_stored_flood_is_whole_and_leaves_memory_as_it_was() -> None:
    """A19: 500 MiB offloaded."""
    whole = hashlib.sha256()
    for _ in range(500):
        whole.update(CHUNK)
    with serving(hooks=False) as server:
        session = server.session()
        server.call(session, "bash", command="seq 1 50000")
        with memory_growth(server.process) as grown:
            result = server.call(session, "bash", command=f'python3 -c "{CODE.format(count=500)}"')
    [reference] = result["references"]
    assert (reference["bytes"], reference["sha256"]) == (500 << 20, whole.hexdigest())
    assert grown[0] < 64
