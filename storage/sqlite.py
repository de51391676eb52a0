"""SQLite: one file, one writer at a time."""

import random
import shutil
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.orm import Session

from storage.backend import Backend, Fault
from storage.errors import DatabaseUnavailableError

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


class Sqlite(Backend):
    """Write-ahead log, foreign keys, and writers that take the lock at BEGIN."""

    def engine_options(self, busy_seconds: float) -> Mapping[str, Any]:
        del busy_seconds
        # Reuse the most recent connections, so that the caches (pages, statements) of the others stay small.
        return {"pool_use_lifo": True}

    def set_up(self, engine: Engine, busy_seconds: float) -> None:
        """Disable the driver's transaction handling, and set each connection's pragmas.

        By default, the driver begins a transaction at the first write, so a transaction that has read first can fail because
        the database has changed. Here, writers take the lock when they begin (BEGIN IMMEDIATE).
        """

        @event.listens_for(engine, "connect")
        def connect(connection: sqlite3.Connection, _record: Any) -> None:
            try:
                connection.isolation_level = None
                # Text that is not UTF-8 is a damaged value of one row; the driver's own error would fail the whole query.
                connection.text_factory = _decoded
                connection.execute(f"PRAGMA busy_timeout = {int(1000 * busy_seconds)}")
                # Of new files. Values behind a request of a megabyte are found without reading its 230 pages: 150 such jobs
                # are listed in 3 ms instead of 54.
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA cache_size = -512")  # KiB; small: the operating system caches the file
                connection.execute("PRAGMA busy_timeout = 0")  # from here on, this module waits itself
            except BaseException:
                connection.close()
                raise

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            writes = connection.get_execution_options().get("autotune_writes", False)
            if not writes:
                connection.exec_driver_sql("BEGIN")
            elif not _begin_immediate(connection, busy_seconds):
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises the driver's error if the lock is still taken

    def fault(self, error: DatabaseError) -> Fault:
        # SQLite waits for a lock itself, unless waiting could deadlock: then it returns immediately.
        if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Fault.BUSY
        return Fault.OUTAGE if isinstance(error, OperationalError) or type(error) is DatabaseError else Fault.OURS

    def check_writable(self, session: Session) -> None:
        bind = session.get_bind()
        file = Path(str(bind.engine.url.database))
        free = shutil.disk_usage(file.parent).free
        if free < 64_000_000:  # the write-ahead log of large submissions needs about this much
            raise DatabaseUnavailableError(f"{file}: its disk has {free / 1e6:.0f} MB left; free some space")

    def remedy(self, error: DBAPIError) -> tuple[str, str] | None:
        return _REMEDIES.get(_code(error))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def _begin_immediate(connection: Connection, seconds: float) -> bool:
    """Take the write lock within `seconds`; return whether it was taken.

    SQLite itself would poll with increasing pauses of up to 100 ms. Under constant writes, some waiter would then starve for
    seconds, although the lock is free in between. Here, all waiters poll equally often.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    until = time.monotonic() + seconds
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
            return True
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                return False
        time.sleep(random.uniform(0.001, 0.004))  # a transaction holds the lock for a few milliseconds


def _code(error: DBAPIError) -> int:
    """SQLite's primary result code."""
    return int(getattr(error.orig, "sqlite_errorcode", 0)) & 0xFF
