"""Transactions on a database: retries, errors, and the base of the store's parts, whose methods are transactions."""

import itertools
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.exc import DatabaseError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from storage.address import describe, passwords_of
from storage.backend import Backend, Fault
from storage.codec import dump_json, load_column
from storage.errors import DatabaseUnavailableError
from storage.postgresql import PostgreSQL
from storage.secret_box import SecretBox
from storage.service_records import Actor
from storage.sqlite import Sqlite

P = ParamSpec("P")
T = TypeVar("T")

CONNECTIONS = 20
"""Most connections of a process: several processes share the server's limit."""
POOL_SECONDS = 10.0
"""Longest wait for a connection."""
OUTAGE_SECONDS = 30.0
"""How long a database that was available before may be unavailable, for example during a restart or failover of a server."""


class _CommitLostError(Exception):
    """The connection broke during a commit: it is unknown whether the transaction was committed."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self.mark = mark


class Database:
    """Runs transactions on an engine. Thread-safe."""

    def __init__(self, url: URL, busy_seconds: float, outage_seconds: float = OUTAGE_SECONDS) -> None:
        """Create the engine, without connecting.

        Args:
            url: the address of the database.
            busy_seconds: how long a transaction waits for another process's lock before it gives up.
            outage_seconds: how long a transaction waits for a database that became unavailable after it was used.

        Raises:
            DatabaseUnavailableError: the driver of this kind of database is not installed.
        """
        self._place, self._passwords = describe(url), passwords_of(url)
        self._busy_seconds, self._outage_seconds = busy_seconds, outage_seconds
        self._backend: Backend = Sqlite() if url.get_backend_name() == "sqlite" else PostgreSQL()
        self._was_available = False
        try:
            options = {
                "pool_size": CONNECTIONS,
                "max_overflow": 0,
                "pool_timeout": POOL_SECONDS,
                "json_serializer": dump_json,
                "json_deserializer": load_column,
            }
            driver = url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
            self._engine = create_engine(driver, **options, **self._backend.engine_options(busy_seconds))
        except (ImportError, NoSuchModuleError) as error:
            raise DatabaseUnavailableError(
                f"{self._place}: {error}; the address names a driver: pip install 'autotune-parallel[postgresql]'"
            ) from error
        # The interrupted program reports Ctrl-C itself; the pool would also print a traceback.
        logging.getLogger(f"sqlalchemy.pool.impl.{type(self._engine.pool).__name__}").addFilter(_no_interrupt)
        self._backend.set_up(self._engine, busy_seconds)
        self._writer = self._engine.execution_options(autotune_writes=True)
        self._reader = self._backend.readers(self._engine)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one consistent snapshot."""
        return self._repeated(lambda: self._once(self._reader, work))

    def read_now(self, work: Callable[[Session], T], engine: Engine | None = None) -> T:
        """Run `work` like `read`, without waiting or retrying."""
        try:
            return self._once(engine or self._reader, work)
        except DatabaseError as error:
            raise self._unavailable(error) from error

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` as one transaction: committed when this returns, rolled back when this raises.

        `work` may be run again from its start if another process holds a lock or the connection breaks, so it must only change
        the session. If the connection breaks during the commit, the database is asked whether the commit took place, so that
        the work is committed exactly once.

        Raises:
            DatabaseUnavailableError: the lock was not free in time, or the database cannot be reached or written.
        """
        done: list[T] = []

        def attempt() -> T:
            done.clear()
            return self._once(self._writer, work, done)

        while True:
            try:
                return self._repeated(attempt)
            except _CommitLostError as lost:
                mark = lost.mark
            if self._repeated(partial(self._once, self._writer, partial(self._backend.was_committed, mark=mark))):
                return done[0]

    def migrate(self, work: Callable[[Session], T]) -> T:
        """Run `work`, which must be idempotent, as a transaction without a commit mark, whose table may not exist yet."""
        return self._repeated(lambda: self._once(self._writer, work))

    def now(self, session: Session) -> datetime:
        """The UTC time that all processes on this database share."""
        return self._backend.now(session)

    def check_writable(self) -> None:
        """Check, without waiting, that the database can be written.

        Raises:
            DatabaseUnavailableError: it cannot be written, or soon cannot.
        """
        self.read_now(self._backend.check_writable, self._engine)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _once(self, engine: Engine, work: Callable[[Session], T], done: list[T] | None = None) -> T:
        """Run one transaction. With `done`, it writes a commit mark, and `done` receives the result before the commit."""
        mark = None
        try:
            # Without autoflush, a row that is changed in several places is written once, at the end.
            with Session(engine, expire_on_commit=False, autoflush=False) as session, session.begin():
                mark = None if done is None else self._backend.mark(session)
                result = work(session)
                session.flush()
                if done is not None:
                    done.append(result)
        except PoolTimeoutError as error:
            problem = f"all {CONNECTIONS} connections of this process have been in use for {POOL_SECONDS:.0f} s"
            raise DatabaseUnavailableError(f"{self._place}: {problem}; ask for less at a time") from error
        except DatabaseError as error:
            if done and mark is not None and self._backend.fault(error) is Fault.LOST:
                raise _CommitLostError(mark) from error
            raise
        self._was_available = True
        return result

    def _repeated(self, attempt: Callable[[], T]) -> T:
        """Run the attempt until it succeeds, fails permanently, or the waiting time is over."""
        began = time.monotonic()
        pause = 0.005
        for tries in itertools.count(1):
            try:
                return attempt()
            except DatabaseError as error:
                fault = self._backend.fault(error)
                # RACE: the transaction conflicts with names of another one.
                if fault is Fault.OURS or (fault is Fault.RACE and tries >= 3):
                    raise
                waits = {
                    Fault.BUSY: self._busy_seconds,
                    Fault.RACE: math.inf,
                    Fault.LOST: self._outage_seconds if self._was_available else 0.0,
                }
                if time.monotonic() - began >= waits.get(fault, 0.0):
                    raise self._unavailable(error) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, 1.0 if fault is Fault.LOST else 0.1)
        raise AssertionError("unreachable")

    def _unavailable(self, error: DBAPIError) -> DatabaseUnavailableError:
        detail = (str(error.orig).splitlines() or ["unknown error"])[0]
        for password in self._passwords:
            detail = detail.replace(password, "***")
        fallback = (f"cannot be used ({detail})", "check that it runs and that the address is right")
        problem, remedy = self._backend.remedy(error) or fallback
        return DatabaseUnavailableError(f"{self._place}: {problem}; {remedy}")


def _no_interrupt(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """What the parts of a store share."""

    database: Database
    clock: Callable[[], datetime] | None
    """Returns the time in UTC. None: the database's clock."""
    secret_box: SecretBox
    actor: Actor
    """The audit log names this actor, and their quotas apply."""


class StorePart:
    """A part of the store. Each method that is decorated with `reads` or `writes` is one atomic transaction."""

    def __init__(self, access: StoreAccess) -> None:
        self.access = access
        self.database, self.clock = access.database, access.clock
        self.secret_box, self.actor = access.secret_box, access.actor

    def now(self, session: Session) -> datetime:
        """The time of this transaction in UTC."""
        return self.database.now(session) if self.clock is None else self.clock()


PartT = TypeVar("PartT", bound=StorePart)


def reads(work: Callable[Concatenate[PartT, Session, P], T]) -> Callable[Concatenate[PartT, P], T]:
    """Run the method on one consistent snapshot. Callers leave out the session."""

    @wraps(work)
    def read(part: PartT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return part.database.read(lambda session: work(part, session, *args, **kwargs))

    return read


def writes(work: Callable[Concatenate[PartT, Session, datetime, P], T]) -> Callable[Concatenate[PartT, P], T]:
    """Run the method as one transaction, perhaps more than once. Callers leave out the session and the time."""

    @wraps(work)
    def write(part: PartT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # Read the time inside the transaction: SQLite's writers then hold the lock, so events are ordered by time.
        return part.database.write(lambda session: work(part, session, part.now(session), *args, **kwargs))

    return write
