"""What the tests of the search share."""

import shutil
import sys
import threading
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


@pytest.fixture
def working(store: Store) -> Iterator[None]:
    """A worker in a thread, which answers trials from a table."""
    import table

    from autotune.loop.listener import StopSignal
    from autotune.loop.worker import Worker

    stop = StopSignal()
    worker = Worker(store, lambda _session: table.runner(), poll_seconds=0.02)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    yield
    stop.request()
    thread.join(20)
