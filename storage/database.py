"""Transactions on a database: how connections are set up, what is retried, which errors come out."""

import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session

from storage.address import describe
from storage.codec import dump_json, load_json
from storage.errors import DatabaseUnavailableError

T = TypeVar("T")

_REMEDIES = {
    sqlite3.SQLITE_BUSY: ("is locked by another process", "end that process, or name another database with --db"),
    sqlite3.SQLITE_LOCKED: ("is locked by another process", "end that process, or name another database with --db"),
    sqlite3.SQLITE_READONLY: ("is read-only", "make the file and its folder writable, or name another database with --db"),
    sqlite3.SQLITE_PERM: ("may not be accessed", "make the file and its folder writable, or name another database with --db"),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check the path, or name another database with --db"),
    sqlite3.SQLITE_NOTADB: ("is not an SQLite database", "name another file with --db"),
    sqlite3.SQLITE_CORRUPT: ("is damaged", "restore it from a backup, or name another database with --db"),
    sqlite3.SQLITE_FULL: ("has no room: the disk is full", "free some space"),
}


class Database:
    """An engine with the one way of running a transaction. May be used from several threads."""

    def __init__(self, url: URL, busy_seconds: float) -> None:
        """Connects to nothing yet.

        Args:
            url: where the database is.
            busy_seconds: how long a transaction waits for another process's lock before it gives up.

        Raises:
            DatabaseUnavailableError: the driver of this kind of database is not installed.
        """
        self._place = describe(url)
        self._busy_seconds = busy_seconds
        try:
            # Threads are bounded by the callers: a bound here would only turn a short wait into an error.
            self._engine = create_engine(url, max_overflow=-1, json_serializer=dump_json, json_deserializer=load_json)
        except (ImportError, NoSuchModuleError) as error:
            raise DatabaseUnavailableError(f"{self._place}: {error}; install the driver that the address names") from error
        if self._engine.dialect.name == "sqlite":
            _set_up_sqlite(self._engine, busy_seconds)
        self._writer = self._engine.execution_options(autotune_writes=True)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one consistent snapshot."""
        return self._transaction(self._engine, work)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` as one transaction: all of it is kept when this returns, nothing of it when this raises.

        `work` may be run again from its start where another process holds the lock, so it must act on the session alone.

        Raises:
            DatabaseUnavailableError: the lock was not free in time, or the database cannot be written.
        """
        return self._transaction(self._writer, work)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _transaction(self, engine: Engine, work: Callable[[Session], T]) -> T:
        deadline = time.monotonic() + self._busy_seconds
        pause = 0.005
        while True:
            try:
                with Session(engine, expire_on_commit=False) as session, session.begin():
                    return work(session)
            except DatabaseError as error:
                if not _is_outage(error):
                    raise
                # SQLite waits for a lock by itself, but not where waiting could deadlock: those come back at once.
                if not _is_locked(error) or time.monotonic() >= deadline:
                    raise self._unavailable(error) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 0.1)

    def _unavailable(self, error: DBAPIError) -> DatabaseUnavailableError:
        detail = (str(error.orig).splitlines() or ["unknown error"])[0]
        fallback = (f"cannot be used ({detail})", "check that it runs and that the address is right")
        problem, remedy = _REMEDIES.get(_code(error), fallback)
        return DatabaseUnavailableError(f"{self._place}: {problem}; {remedy}")


def _set_up_sqlite(engine: Engine, busy_seconds: float) -> None:
    """Take transactions out of the driver's hands, and set each connection's pragmas.

    Left alone the driver begins a transaction at the first write, so a transaction that has read first can find the database
    changed under it and fail. Writers take the lock as they begin instead (BEGIN IMMEDIATE).
    """

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: Any) -> None:
        try:
            connection.isolation_level = None
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * busy_seconds)}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("autotune_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _code(error: DBAPIError) -> int:
    """SQLite's primary result code; 0 for other databases."""
    return int(getattr(error.orig, "sqlite_errorcode", 0)) & 0xFF


def _is_locked(error: DBAPIError) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _is_outage(error: DBAPIError) -> bool:
    """Whether the database is at fault; broken constraints and statements are ours, and pass as they are."""
    return isinstance(error, OperationalError) or type(error) is DatabaseError
