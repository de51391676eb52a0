"""Databases to attack, and the page of what came of it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.ground import HEAVY, Row, page
from tests.storage.conftest import postgres as postgres  # a fixture, used by name
from tests.storage.postgres import PostgresServer

_ROWS: list[Row] = []


@pytest.fixture(scope="session")
def rows() -> Iterator[list[Row]]:
    """What was found; written down in the end, where the variable names the page."""
    yield _ROWS
    if HEAVY:
        Path(os.environ["AUTOTUNE_HOSTILE"]).write_text(page(_ROWS), encoding="utf-8")


@pytest.fixture
def sqlite(tmp_path: Path, migrated: Path) -> str:
    """A file without jobs, with its tables."""
    return f"sqlite:///{shutil.copy(migrated, tmp_path / 'jobs.db')}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """One of each kind, for attacks to which the database matters."""
    if request.param == "sqlite":
        address: str = request.getfixturevalue("sqlite")
        return address
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
