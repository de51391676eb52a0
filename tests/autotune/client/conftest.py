"""A service in a thread, its store, and a client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import served

from autotune import Client


@pytest.fixture
def url(store: object, tmp_path: Path) -> Iterator[str]:
    """A service on the database of `store`."""
    with served.service(str(tmp_path / "jobs.db")) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
