"""The system under test: a PostgreSQL server, the API as a separate process, and the CPU time and memory of each."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from storage.records import Scope
from storage.store import Store, open_store
from tests.storage.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
OWNER = "load"
SERVICE = "service"
"""The service's own database user, which distinguishes its server processes from the writers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The target of the load."""

    port: int
    processes: tuple[psutil.Process, ...]
    """The API's processes: the one that was started, and its children."""
    database: str
    """Address for the writers of results."""
    key: str | None
    """An API key; None: none is required."""

    @property
    def headers(self) -> list[str]:
        return [f"Authorization: Bearer {self.key}"] if self.key else []


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds up to an instant, or between two."""

    api: float
    service_database: float
    """Server processes of the database that serve the API."""
    database: float
    """All processes of the database's server."""
    wall: float

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(
            self.api - other.api, self.service_database - other.service_database, self.database - other.database,
            self.wall - other.wall,
        )  # fmt: skip

    def of_a_core(self, seconds: float) -> float:
        return seconds / self.wall


@contextlib.contextmanager
def postgres() -> Iterator[PostgresServer]:
    """A real server, with a user for the service."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, PostgresServer(Path(folder)) as server:
        with psycopg.connect(server.new_database("first"), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {SERVICE} LOGIN SUPERUSER")
        Store(server.new_database("migrated")).close()
        yield server


@contextlib.contextmanager
def service(database: str, keys: bool = True, processes: int = 1) -> Iterator[Place]:
    """`autotune serve --no-worker --workers PROCESSES` on a free port of loopback; ends with the context."""
    with open_store(database) as store:
        key = store.keys.create(OWNER, (Scope.READ, Scope.SUBMIT))[1]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "serve", "--no-worker", "--port", str(port)]
    # Measure the server, not the quotas of one owner.
    for quota, most in (("queued_jobs", "1000000"), ("stored_bytes", "1TB"), ("streams", "1000000")):
        command += ["--quota", f"{quota}={most}"]
    command += [
        "--keys" if keys else "--no-keys",
        "--workers",
        str(processes),
        "--db",
        database.replace("postgres:@", f"{SERVICE}:@"),
    ]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        _wait(port, process)
        started = psutil.Process(process.pid)
        yield Place(
            port=port, processes=(started, *started.children()), database=database, key=key if keys else None
        )  # fmt: skip
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def usage(place: Place) -> Usage:
    """CPU seconds until now."""
    of_service, everything = _database_seconds(place)
    times = [process.cpu_times() for process in place.processes]
    return Usage(sum(one.user + one.system for one in times), of_service, everything, time.perf_counter())


def rss_bytes(place: Place) -> int:
    return max(int(process.memory_info().rss) for process in place.processes)


def _database_seconds(place: Place) -> tuple[float, float]:
    if not place.database.startswith("postgresql"):
        return 0.0, 0.0
    with psycopg.connect(place.database, autocommit=True) as connection:
        mine = {pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_activity WHERE usename = %s", (SERVICE,))}
        main = psutil.Process(connection.info.backend_pid).parent()
    assert main is not None
    seconds: dict[int, float] = {}
    for process in [main, *main.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    # The CPU time of ended server processes is counted in their parent.
    times = main.cpu_times()
    ended = times.children_user + times.children_system
    return sum(value for pid, value in seconds.items() if pid in mine), sum(seconds.values()) + ended


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/livez").close()
            return
        time.sleep(0.1)
    raise SystemExit("the service did not start")
