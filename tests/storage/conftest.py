"""Stores to test on, one backend after another, and processes that share a database."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import storage
from storage.leases import current_owner
from storage.records import Lease
from storage.store import Store
from tests.storage.postgres import PostgresServer

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, from a wheel, for the whole session. Its databases begin with the tables there."""
    with start_postgres(durable=False) as server:
        yield server


@pytest.fixture(scope="module")
def mortal_postgres() -> Iterator[PostgresServer]:
    """A server of a module's own, which may be killed."""
    with start_postgres() as server:
        yield server


@contextmanager
def start_postgres(durable: bool = True) -> Iterator[PostgresServer]:
    """A server with tables to copy; the test is skipped where none starts.

    Its folder is not below pytest's: whatever pytest session starts closes that to all but its user, and root's servers run as
    another user, who could not start again there.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-postgres-") as folder:
        try:
            server = PostgresServer(Path(folder, "data"), durable)
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            pytest.skip(f"no PostgreSQL server starts here: {error}")
        with server:
            Store(server.new_database("migrated")).close()
            yield server


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> Iterator[str]:
    """A database without jobs, with its tables, of each kind that the contract must hold on."""
    if request.param == "sqlite":
        yield f"sqlite:///{shutil.copy(migrated, tmp_path / 'jobs.db')}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.lent_database() as address:
        yield address


@pytest.fixture
def open_again(address: str, clock: Clock) -> Iterator[Callable[[], Store]]:
    """Opens one more store on the test's database."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Store(address, clock=clock))  # type: ignore[return-value]


@pytest.fixture
def store(open_again: Callable[[], Store]) -> Store:
    return open_again()


@pytest.fixture
def lease(store: Store) -> Lease:
    """A job that this process holds."""
    return store.jobs.acquire(store.jobs.create({"model": "m"}).id, current_owner())


@contextmanager
def run_workers(*arguments: str) -> Iterator[Callable[[str], str]]:
    """Start the process that forks workers, and yield what gives it a line and returns its answer."""
    environment = os.environ | {"PYTHONPATH": str(Path(storage.__file__).parents[1])}
    command = [sys.executable, str(WORKER), *arguments]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def tell(line: str) -> str:
            ask.write(line + "\n")
            ask.flush()
            return answers.readline().strip()

        yield tell
        ask.close()


@pytest.fixture
def workers() -> Callable[..., object]:
    """See `run_workers`."""
    return run_workers
