"""What the helper's last word means, and the engine's frames; the rest is the suite over a real engine."""

import struct

import anyio
import pytest

from sandboxes.channel import Ended
from sandboxes.exec import ended_of
from sandboxes.hijack import Hijacked

pytestmark = pytest.mark.anyio

ID = "0123456789abcdef" * 2
ANSWER = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n"


@pytest.mark.parametrize(
    ("word", "ended"),
    [
        ("ended 0 [1] + Done", Ended("exit", 0, 0)),
        ("ended 2 [1]+  Done(143)", Ended("exit", 143, 2)),
        ("ended 0 [1] + Terminated", Ended("signal", 15, 0)),
        ("ended 0 [1]+  Segmentation fault (core dumped)", Ended("signal", 11, 0)),
        ("ended 1 Done(7)", Ended("exit", 7, 1)),
    ],
)
def test_the_word_of_a_shell_tells_a_signal_from_a_status(word: str, ended: Ended) -> None:
    assert ended_of(word) == ended


@pytest.mark.parametrize(
    "word", ["", "ended", "ended 0 ", "ended 0 [1] + Nonsense", "done 1 1", "ended 0 [1] + Done(1234)"]
)
def test_a_word_that_makes_no_sense_is_no_status(word: str) -> None:
    """R16, R28: nothing is invented where no exit was seen."""
    assert ended_of(word).word == "gone"


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack("!BxxxI", kind, len(data)) + data


async def streams(hijacked: Hijacked) -> tuple[bytes, bytes]:
    found = []
    for stream in (hijacked.stdout, hijacked.stderr):
        data = b""
        try:
            while True:
                data += await stream.receive()
        except anyio.EndOfStream:
            found.append(data)
    return found[0], found[1]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 50, 10_000])
async def test_frames_arrive_whole_however_they_are_cut(size: int) -> None:
    """R22: at every boundary; what the helper says is taken out of the program's standard error."""
    mark = f"\0{ID} ".encode()
    data = ANSWER + b"".join(
        (
            frame(2, mark + b"spawned\n"),
            frame(1, b"out\0"),
            frame(2, b"err\0" + mark[:9]),
            frame(2, b"no\n" + mark[:3]),
            frame(1, b"more"),
            frame(2, mark[3:] + b"ended 0 [1] + Done(3)  \n"),
        )
    )
    hijacked = Hijacked("exec", ID, "1.41")
    for at in range(0, len(data), size):
        hijacked.data_received(data[at : at + size])
    assert hijacked.spawned
    hijacked.connection_lost(None)
    assert await streams(hijacked) == (b"out\0more", b"err\0" + mark[:9] + b"no\n")
    assert ended_of(hijacked.word) == Ended("exit", 3, 0)


async def test_a_program_that_says_the_last_word_itself_does_not_have_it() -> None:
    mark = f"\0{ID} ".encode()
    hijacked = Hijacked("exec", ID, "1.41")
    hijacked.data_received(ANSWER + frame(2, mark + b"ended 0 [1] + Done\n" + mark + b"x" * 5000))
    hijacked.data_received(frame(2, mark + b"ended 0 [1] + Killed\n"))
    hijacked.connection_lost(None)
    assert (await streams(hijacked))[1] == mark + b"x" * 5000
    assert ended_of(hijacked.word) == Ended("signal", 9, 0)


async def test_a_refusal_of_the_engine_is_kept() -> None:
    hijacked = Hijacked("exec", ID, "1.41")
    hijacked.data_received(b'HTTP/1.1 409 Conflict\r\nContent-Length: 9\r\n\r\n{"a": "b"}')
    hijacked.connection_lost(None)
    assert hijacked.refused is not None
    assert hijacked.refused.message == 'the Docker engine refused: {"a": "b"}'
