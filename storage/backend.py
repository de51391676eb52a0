"""What a kind of database must tell: how connections are set up, and what its errors mean."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DatabaseError, DBAPIError
from sqlalchemy.orm import Session


class Fault(Enum):
    """What an error of the database says."""

    OURS = auto()
    """A broken constraint or statement: it passes as it is."""
    BUSY = auto()
    """Another transaction is in the way: the same work may succeed a moment later."""
    RACE = auto()
    """Another transaction took the same name at the same time: a second try sees it, and further ones mean a fault of ours."""
    LOST = auto()
    """The connection broke, or the server ends or begins: the same work may succeed on another connection."""
    OUTAGE = auto()
    """The database cannot be used, and waiting does not help."""


class Backend(ABC):
    """One kind of database."""

    @abstractmethod
    def engine_options(self, busy_seconds: float) -> Mapping[str, Any]:
        """Arguments for `create_engine`."""

    @abstractmethod
    def set_up(self, engine: Engine, busy_seconds: float) -> None:
        """Make every connection of the engine ready; transactions that write have the execution option `autotune_writes`."""

    @abstractmethod
    def fault(self, error: DatabaseError) -> Fault:
        """What the error says."""

    @abstractmethod
    def remedy(self, error: DBAPIError) -> tuple[str, str] | None:
        """(problem, remedy) of an error that ends the work, in one line each; None: nothing better than its own words."""

    def now(self, session: Session) -> datetime:
        """The time in UTC that every process on this database shares, inside a transaction."""
        del session
        return datetime.now(UTC)

    def readers(self, engine: Engine) -> Engine:
        """The engine as transactions use it that only read: each sees one snapshot."""
        return engine

    @abstractmethod
    def check_room(self, session: Session) -> None:
        """Find out, without waiting, whether something can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly.
            DatabaseError: of the database, which says so itself.
        """

    def mark(self, session: Session) -> str | None:
        """Leave in this transaction what tells later whether it was committed; None: a broken connection cannot hide that."""
        del session
        return None

    def was_committed(self, session: Session, mark: str) -> bool:
        """Whether the transaction that left the mark was committed."""
        raise NotImplementedError(f"{type(self).__name__} leaves no marks, asked for {mark!r}")
