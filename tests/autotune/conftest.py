"""What the tests of this room share."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the drivers of killed processes import `table` by that name too

from storage.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Store]:
    """A fresh SQLite store."""
    with open_store(str(shutil.copy(migrated, tmp_path / "jobs.db"))) as opened:
        yield opened
