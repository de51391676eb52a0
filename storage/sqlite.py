"""SQLite: one file, one writer at a time."""

import sqlite3
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from storage.backend import Backend, Fault

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
    """Write-ahead log, foreign keys, and writers that take the lock as they begin."""

    def engine_options(self, busy_seconds: float) -> Mapping[str, Any]:
        del busy_seconds
        return {}

    def set_up(self, engine: Engine, busy_seconds: float) -> None:
        """Take transactions out of the driver's hands, and set each connection's pragmas.

        Left alone the driver begins a transaction at the first write, so a transaction that has read first can find the
        database changed under it and fail. Writers take the lock as they begin instead (BEGIN IMMEDIATE).
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

    def fault(self, error: DatabaseError) -> Fault:
        # SQLite waits for a lock by itself, but not where waiting could deadlock: those come back at once.
        if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Fault.BUSY
        return Fault.OUTAGE if isinstance(error, OperationalError) or type(error) is DatabaseError else Fault.OURS

    def remedy(self, error: DBAPIError) -> tuple[str, str] | None:
        return _REMEDIES.get(_code(error))


def _code(error: DBAPIError) -> int:
    """SQLite's primary result code."""
    return int(getattr(error.orig, "sqlite_errorcode", 0)) & 0xFF
