"""Every test gets a prefix of its own in a bucket, and a place for local tiers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import BUCKET, Proxy, point_at, s3_server


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture(autouse=True)
def local_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERYSTEP_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "local"


@pytest.fixture
def s3_url(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in point_at(s3_port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(s3_url: str, s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3_port) as server:
        for name, value in point_at(server.port).items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same tests for a directory and for a server."""
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    found: str = request.getfixturevalue("s3_url")
    return found
