"""The stores' own figures: a large result into a local folder and into S3, searched and paged; beside plain tools."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import s3fs

from stores import LineIndex, ResultStore, Store
from tests.bench.figures import Figure, at_least, at_most, shown
from tests.bench.http import memory_growth, serving
from tests.bench.peers.run import NotMeasured, run_script
from tests.stores.servers import BUCKET, s3_server

GIGABYTE = 1_000_000_000
S3_BYTES = 300_000_000
GREP_BYTES = 200_000_000
SMALL_BYTES = 100_000
RUNS = 5
SIZES = (1_000, 100_000, 10_000_000, 200_000_000)
LINE = "%012d the quick brown fox jumps over the lazy dog\n"
PEER = "deepagents_files.py"


def measure_stores() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [
            *_gigabyte(),
            *anyio.run(_small, folder),
            *anyio.run(_grep, folder),
            *_s3(folder),
            *_beside_deepagents(folder),
        ]


def _gigabyte() -> list[Figure]:
    """One call that prints 1 GB, which is stored; then a page of lines from its middle. Through `sandgate serve`."""
    with serving(hooks=False) as server:
        session = server.session()
        server.call(session, "bash", command="seq 1 50000")
        command = f"yes 0123456789abcde | head -c {GIGABYTE}"
        started = time.perf_counter()
        with memory_growth(server.process) as grown:
            result = server.call(session, "bash", command=command)
        seconds = time.perf_counter() - started
        [reference] = result["references"]
        if reference["bytes"] != GIGABYTE:
            raise RuntimeError(f"unexpected size: {reference['bytes']}")
        url = f"/v1/sessions/{session}/results/{reference['reference'].rpartition('/')[2]}"
        middle = GIGABYTE // 16 // 2
        page = _median_ms(lambda: server.http.get(url, params={"lines": f"{middle}-{middle + 100}"}).raise_for_status())
    return [
        at_least("1 GB printed, hashed and offloaded to a local folder", GIGABYTE / 1e6 / seconds, "MB/s", 300),
        at_most("1 GB offloaded: gateway memory", grown[0], "MB more", 64),
        at_most("100 lines from the middle of 1 GB, over HTTP, p50", page, "ms", 20),
    ]


async def _small(folder: Path) -> list[Figure]:
    results, data = ResultStore(Store.from_uri(str(folder / "small"))), os.urandom(SMALL_BYTES)
    numbers = iter(range(10_000))

    async def ours() -> None:
        key = str(next(numbers))
        await results.put("s", key, data, "text/plain")
        if b"".join([chunk async for chunk in results.read("s", key)]) != data:
            raise RuntimeError("read back as something else")

    async def plain() -> None:
        path = folder / str(next(numbers))
        path.write_bytes(data)
        path.read_bytes()

    our_ms, plain_ms = await _median_ms_of(ours, 200), await _median_ms_of(plain, 200)
    return [
        at_most("put and get of 100 KB over a plain file, p50", our_ms - plain_ms, "ms more", 1, f"{our_ms:.2f} ms")
    ]


async def _grep(folder: Path) -> list[Figure]:
    """The same file, once by ripgrep and once by our search, to its end; and how soon a first hit is there."""
    path = folder / "grep"
    _write_lines(path, GREP_BYTES)
    results = ResultStore(Store.from_uri(str(folder / "searched")))
    await results.put("s", "k", path, "text/plain")
    rare, index = f"{3_000_000:012d} the q[tuv]ick", LineIndex()
    async for chunk in results.read("s", "k"):
        index.add(chunk)

    async def ours() -> None:
        if len((await results.grep("s", "k", rare, index=index)).lines) != 1:
            raise RuntimeError("not found")

    async def first() -> None:
        await results.grep("s", "k", "lazy (cat|dog)", max_matches=1, index=index)

    program = Path(sys.executable).with_name("rg")

    async def ripgrep() -> None:
        subprocess.run([program, "-n", rare, path], check=True, capture_output=True)

    rg_ms, our_ms, first_ms = [await _median_ms_of(work, RUNS) for work in (ripgrep, ours, first)]
    return [
        at_least("search of 200 MB: ripgrep's time / ours", rg_ms / our_ms, "x", 0.3, f"{our_ms:.0f} ms"),
        at_most("search of 200 MB: first hit", first_ms, "ms", 50),
    ]


def _s3(folder: Path) -> list[Figure]:
    place = folder / "s3"
    place.mkdir()
    path = folder / "object"
    _write_lines(path, S3_BYTES)
    with s3_server(place) as server:
        plain = s3fs.S3FileSystem(**server.options(), skip_instance_cache=True)
        names = iter(range(100))
        plain_ms = _median_ms(lambda: plain.put_file(str(path), f"{BUCKET}/plain/{next(names)}"), runs=3)
        our_ms = anyio.run(_s3_put, server.uri(), server.options(), path)
    note = f"{S3_BYTES / 1e3 / our_ms:.0f} MB/s"
    return [at_least("300 MB into S3: plain s3fs put's time / ours", plain_ms / our_ms, "x", 0.5, note)]


async def _s3_put(uri: str, options: dict[str, object], path: Path) -> float:
    results, names = ResultStore(Store.from_uri(uri, options)), iter(range(100))
    size = path.stat().st_size

    async def put() -> None:
        await results.put_file("s", str(next(names)), path, "text/plain", sha256="-", size=size)

    taken = await _median_ms_of(put, 3)
    await results.aclose()
    return taken


def _beside_deepagents(folder: Path) -> list[Figure]:
    ours = {size: anyio.run(_file_times, folder, size) for size in SIZES}
    try:
        peer = run_script(PEER, [str(size) for size in SIZES])
    except NotMeasured as error:
        return [Figure("peer: deepagents, file system backend", float("nan"), "ms", note=f"not measured: {error}")]
    return [
        shown(
            f"{work} of {size / 1000:,.0f} KB",
            ours[size][work],
            "ms",
            f"deepagents {peer['version']}: {peer['times'][str(size)][work]:.1f} ms",
        )
        for work in ("write", "page", "grep")
        for size in SIZES
    ]


async def _file_times(folder: Path, size: int) -> dict[str, float]:
    results = ResultStore(Store.from_uri(str(folder / "beside")))
    lines = size // len(LINE % 0)
    data, names = "".join(LINE % number for number in range(lines)).encode(), iter(range(100))

    async def write() -> None:
        await results.put("s", f"{size}-{next(names)}", data, "text/plain")

    async def page() -> None:
        await results.lines("s", f"{size}-0", lines // 2, lines // 2 + 99)

    async def grep() -> None:
        if len((await results.grep("s", f"{size}-0", "000000000001 the")).lines) != 1:
            raise RuntimeError("not found")

    works: dict[str, Callable[[], Awaitable[None]]] = {"write": write, "page": page, "grep": grep}
    return {name: await _median_ms_of(work, RUNS) for name, work in works.items()}


def _write_lines(path: Path, size: int) -> None:
    with path.open("w") as file:
        for start in range(0, size // len(LINE % 0), 10_000):
            file.write("".join(LINE % number for number in range(start, start + 10_000)))


def _median_ms(work: Callable[[], Any], runs: int = RUNS) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


async def _median_ms_of(work: Callable[[], Awaitable[None]], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        await work()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)
