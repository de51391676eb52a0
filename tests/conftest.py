"""What all tests share: small collections of garbage, a database to copy, and a process that ranks are forked from."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from tests.forked_ranks import ForkServer

# How long an example takes is the machine's business: beside other work some would miss any deadline.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests are shared out over processes, one process has all of a module, whose fixtures keep ranks and services.

    All modules that start Ray are one process's: a driver joins the cluster that it finds on its machine.
    """
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.path in with_ray else str(item.path)))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Set aside what is there when a module begins: with torch and Ray imported, each full collection would take half a second.

    Services collect when they start, and measurements before they measure. Nothing stays set aside that a test may wait for:
    the garbage of earlier modules is collected first.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that has its tables, to be copied: to make them takes longer than most tests."""
    from storage.sql import open_store

    path = tmp_path_factory.mktemp("migrated") / "jobs.db"
    open_store(str(path)).close()
    return path


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that ranks are forked from."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks of this module's local runners are forked, where that can be done; see `tests.forked_ranks`."""
    if sys.platform != "linux":
        yield
        return
    server: ForkServer = request.getfixturevalue("fork_server")
    with patch("executor.runners.rank_process.subprocess", server.as_subprocess()):
        yield
