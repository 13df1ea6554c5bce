"""One store of each kind, on real servers where it needs one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stores import Store
from tests.stores.servers import S3, Sftp, s3_server, sftp_server

KINDS = ["file", "memory", "sftp", pytest.param("s3", marks=pytest.mark.needs("s3"))]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sftp]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = _store(request, tmp_path)
    yield opened
    await opened.aclose()


def _store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "s3":
            server: S3 = request.getfixturevalue("s3")
            return Store.from_uri(server.uri(), server.options())
        case "sftp":
            sftp: Sftp = request.getfixturevalue("sftp")
            return Store.from_uri(sftp.uri())
        case "memory":
            return Store.from_uri("memory://root")
    return Store.from_uri(f"file://{tmp_path}/root")


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store.from_uri(f"file://{tmp_path}/root")
    yield opened
    await opened.aclose()
