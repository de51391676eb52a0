"""PostgreSQL: a server for many machines, which can fail over during transactions."""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

from storage.backend import Backend, Fault
from storage.tables import CommitRow

_REMEDIES = {
    "28000": ("refuses this user", "check user and password in the address"),
    "28P01": ("refuses this password", "check user and password in the address"),
    "3D000": ("does not exist on the server", "create it with createdb, or name another database with --db"),
    "42501": ("may not be written by this user", "grant CREATE and USAGE on its schema, or name another database with --db"),
    "53100": ("has no room: the disk is full", "free some space on the server"),
    "53300": ("has no connection left", "raise max_connections on the server, or run fewer processes"),
    "55P03": ("is locked by another transaction", "end that process, or name another database with --db"),
    "25006": ("is read-only", "name the primary server with --db"),
}


class PostgreSQL(Backend):
    """Snapshots for reads; row locks for writes; the server's clock for all; commit marks."""

    def engine_options(self, busy_seconds: float) -> Mapping[str, Any]:
        timeouts = {
            "lock_timeout": int(1000 * busy_seconds),
            "idle_in_transaction_session_timeout": 60_000,  # a hanging process holds its row locks no longer
            "default_transaction_isolation": r"read\ committed",
        }
        return {
            "connect_args": {
                "connect_timeout": 5,
                "application_name": "autotune",
                # With several hosts in the address: the one that can be written.
                "target_session_attrs": "read-write",
                # A server whose machine is gone never answers: this is detected after 10 + 3 x 5 seconds.
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "options": " ".join(f"-c {name}={value}" for name, value in timeouts.items()),
            },
            "pool_use_lifo": True,
        }

    def set_up(self, engine: Engine, busy_seconds: float) -> None:
        """Nothing to do: the connection options have all settings."""

    def fault(self, error: DatabaseError) -> Fault:
        code = _code(error)
        if code in {"40001", "40P01", "55P03"}:  # serialization_failure, deadlock_detected, lock_not_available
            return Fault.BUSY
        if code == "23505":  # unique_violation
            return Fault.RACE
        # A former primary (read_only_sql_transaction), idle_in_transaction_session_timeout, admin_shutdown, crash_shutdown,
        # cannot_connect_now; 08…: connection exceptions.
        if error.connection_invalidated or code in {"25006", "25P03", "57P01", "57P02", "57P03"} or code[:2] == "08":
            return Fault.LOST
        if isinstance(error, OperationalError | InterfaceError):
            # psycopg sets no code for errors of the connection itself.
            return Fault.OUTAGE if code else Fault.LOST
        return Fault.OUTAGE if code in _REMEDIES else Fault.OURS

    def remedy(self, error: DBAPIError) -> tuple[str, str] | None:
        code_remedy = _REMEDIES.get(_code(error))
        if code_remedy is None and "does not exist" in str(error.orig) and "database" in str(error.orig):
            return _REMEDIES["3D000"]  # while connecting, psycopg only has the server's message
        if code_remedy is None and "authentication failed" in str(error.orig):
            return _REMEDIES["28P01"]
        return code_remedy

    def now(self, session: Session) -> datetime:
        moment = session.scalar(select(func.clock_timestamp()))
        assert isinstance(moment, datetime)
        return moment.astimezone(UTC)

    def readers(self, engine: Engine) -> Engine:
        return engine.execution_options(isolation_level="REPEATABLE READ")

    def check_writable(self, session: Session) -> None:
        self.mark(session)  # the server's disk is not visible, so write something

    def mark(self, session: Session) -> str | None:
        # Not the transaction id: after a crash, the server may assign a lost id to another transaction.
        mark = secrets.token_hex(16)
        session.execute(insert(CommitRow).values(mark=mark, time=func.clock_timestamp()))
        if mark.startswith("000"):
            # How long commit marks are kept.
            session.execute(delete(CommitRow).where(CommitRow.time < func.clock_timestamp() - timedelta(hours=1)))
        return mark

    def was_committed(self, session: Session, mark: str) -> bool:
        # The time of a mark that replaces the mark of a transaction that was not committed.
        never = datetime(1970, 1, 1, tzinfo=UTC)
        # The insertion waits for a transaction with the same mark that is still in progress. After the insertion, that
        # transaction can no longer be committed. The time NEVER identifies this replacement, also if the connection breaks
        # again and this runs a second time.
        session.execute(insert(CommitRow).values(mark=mark, time=never).on_conflict_do_nothing())
        return session.scalar(select(CommitRow.time).where(CommitRow.mark == mark)) != never


def _code(error: DBAPIError) -> str:
    """The server's SQLSTATE; empty for an error of the connection."""
    return str(getattr(error.orig, "sqlstate", None) or "")
