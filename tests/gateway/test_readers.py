"""References in the hands of what people read tables with: pandas, pyarrow, duckdb, polars, UPath, fsspec's caches."""

import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import duckdb
import fsspec
import pandas
import polars
import pyarrow.dataset
import pyarrow.parquet
import pytest
from upath import UPath

from gateway.client import Client
from gateway.filesystem import SandgateFileSystem
from tests.gateway.conftest import Served
from tests.gateway.test_filesystem import environment, in_thread  # noqa: F401 - a fixture

pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

ROWS = 20_000
TOTAL = sum(number * number for number in range(ROWS))


@pytest.fixture
async def folder(server: Served, environment: None, tmp_path: Path) -> AsyncIterator[str]:  # noqa: F811
    """A session's `sandgate://` with a table as parquet and CSV, as results (which outlive it) and in its workspace."""
    table = pandas.DataFrame({"number": range(ROWS), "square": [number * number for number in range(ROWS)]})
    table.to_parquet(tmp_path / "table.parquet")
    table.to_csv(tmp_path / "table.csv", index=False)
    async with Client() as client, client.session() as session:
        for name in ("table.parquet", "table.csv"):
            await session.upload(tmp_path / name, name)
            printed = await session.call("bash", {"command": f"cat {name}"})
            assert len(printed.references) == 1
        yield f"sandgate://{session.id}"


READERS: dict[str, Callable[[str, str], int]] = {
    "pandas parquet": lambda parquet, csv: int(pandas.read_parquet(parquet)["square"].sum()),
    "pandas csv": lambda parquet, csv: int(pandas.read_csv(csv)["square"].sum()),
    "pyarrow": lambda parquet, csv: int(
        pyarrow.parquet.read_table(parquet.removeprefix("sandgate://"), filesystem=SandgateFileSystem())["square"]
        .to_pandas()
        .sum()
    ),
    "pyarrow dataset": lambda parquet, csv: int(
        pyarrow.dataset.dataset(csv.removeprefix("sandgate://"), filesystem=SandgateFileSystem(), format="csv")
        .to_table()["square"]
        .to_pandas()
        .sum()
    ),
    "duckdb parquet": lambda parquet, csv: _duckdb(f"SELECT sum(square) FROM read_parquet('{parquet}')"),
    "duckdb csv": lambda parquet, csv: _duckdb(f"SELECT sum(square) FROM read_csv('{csv}')"),
    "polars": lambda parquet, csv: _polars(parquet),
    "UPath": lambda parquet, csv: _upath(csv),
    "simplecache": lambda parquet, csv: int(pandas.read_csv(f"simplecache::{csv}")["square"].sum()),
    "filecache": lambda parquet, csv: int(pandas.read_csv(f"filecache::{csv}")["square"].sum()),
}


def _duckdb(query: str) -> int:
    with duckdb.connect() as connection:
        connection.register_filesystem(SandgateFileSystem())
        [(total,)] = connection.sql(query).fetchall()
    return int(total)


def _polars(parquet: str) -> int:
    with fsspec.open(parquet) as file:
        return int(polars.read_parquet(file)["square"].sum())


def _upath(csv: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = UPath(csv)
        assert path.name in [one.name for one in path.parent.iterdir()]
        return sum(int(line.split(",")[1]) for line in path.read_text().splitlines()[1:])


@pytest.mark.parametrize("reader", READERS)
async def test_tables_are_read_where_they_are(folder: str, reader: str) -> None:
    work = READERS[reader]
    stored = f"{folder}/results/0001-bash-stdout", f"{folder}/results/0002-bash-stdout"
    assert await in_thread(work, *stored) == TOTAL
    assert await in_thread(work, f"{folder}/workspace/table.parquet", f"{folder}/workspace/table.csv") == TOTAL


async def test_tables_are_written_into_the_workspace(folder: str) -> None:
    def work() -> int:
        pandas.DataFrame({"square": [4, 9]}).to_parquet(f"{folder}/workspace/new/written.parquet")
        return int(pandas.read_parquet(f"{folder}/workspace/new/written.parquet")["square"].sum())

    assert await in_thread(work) == 13
