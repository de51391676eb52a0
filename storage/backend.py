"""The interface of a kind of database: how connections are set up, and what its errors mean."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DatabaseError, DBAPIError
from sqlalchemy.orm import Session


class Fault(Enum):
    """The meaning of a database error."""

    OURS = auto()
    """A violated constraint or invalid statement: the error is raised unchanged."""
    BUSY = auto()
    """Another transaction holds a lock: the same work may succeed a moment later."""
    RACE = auto()
    """Another transaction took the same name at the same time: a second try sees it; repeated races mean a bug of ours."""
    LOST = auto()
    """The connection broke, or the server is stopping or starting: the same work may succeed on another connection."""
    OUTAGE = auto()
    """The database cannot be used, and waiting does not help."""


class Backend(ABC):
    """One kind of database."""

    @abstractmethod
    def engine_options(self, busy_seconds: float) -> Mapping[str, Any]:
        """Arguments for `create_engine`."""

    @abstractmethod
    def set_up(self, engine: Engine, busy_seconds: float) -> None:
        """Configure every connection of the engine; writing transactions have the execution option `autotune_writes`."""

    @abstractmethod
    def fault(self, error: DatabaseError) -> Fault:
        """Classify the error."""

    @abstractmethod
    def remedy(self, error: DBAPIError) -> tuple[str, str] | None:
        """(problem, remedy) of a fatal error, one line each; None: there is no better text than the error's own."""

    def now(self, session: Session) -> datetime:
        """The UTC time that all processes on this database share, read inside a transaction."""
        del session
        return datetime.now(UTC)

    def readers(self, engine: Engine) -> Engine:
        """The engine for read-only transactions: each sees one snapshot."""
        return engine

    @abstractmethod
    def check_writable(self, session: Session) -> None:
        """Check, without waiting, that the database can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly.
            DatabaseError: the database's own error.
        """

    def mark(self, session: Session) -> str | None:
        """Write a mark in this transaction that later shows whether it was committed; None: a commit is never uncertain."""
        del session
        return None

    def was_committed(self, session: Session, mark: str) -> bool:
        """Whether the transaction that wrote the mark was committed."""
        raise NotImplementedError(f"{type(self).__name__} writes no marks, asked for {mark!r}")
