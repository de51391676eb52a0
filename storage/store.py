"""The store, in an SQLite file or in PostgreSQL.

This module loads SQLAlchemy. Modules of commands that need no database import `Store` for type checking only.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

from storage.address import check_file, describe, parse_address
from storage.audit import AuditStore, local_actor
from storage.calibrations import CalibrationStore
from storage.database import OUTAGE_SECONDS, Database, StoreAccess
from storage.events import EventStore, LogStore
from storage.jobs import JobStore
from storage.keys import KeyStore
from storage.maintenance import MaintenanceStore
from storage.migrations import migrate, stored_revision
from storage.overviews import OverviewStore
from storage.private_files import make_private_file
from storage.queue import QueueStore
from storage.quotas import QuotaStore
from storage.secret_box import SecretBox
from storage.service_records import Actor
from storage.transfer import TransferStore
from storage.trials import AttemptStore, TrialStore
from storage.webhooks import WebhookStore
from storage.workers import NodeStore, WorkerStore


def open_store(url: str, busy_seconds: float = 5.0) -> "Store":
    """Open the store at `url`, create or migrate it if needed, and check that it can be written.

    Args:
        url: path of an SQLite file, `sqlite:///PATH`, or `postgresql://…`.
        busy_seconds: how long each transaction waits for another process's lock.

    Raises:
        DatabaseUnavailableError: it cannot be opened or written, is locked, or has an unknown schema.
    """
    return Store(url, busy_seconds)


class Store:
    """Jobs, trials, attempts and events, stored such that any process can be killed at any point.

    - Its parts have a method for each operation, which is one atomic transaction with its event rows.
    - Methods that take a `Lease` raise LeaseLostError, and write nothing, if the lease is no longer the job's current one.
      An expired lease stays current until another process takes the job: expiry only permits the takeover.
    - A store may be used from several threads, and a database from several processes.
    - Times are UTC.

    Raises:
        DatabaseUnavailableError: the database cannot be reached or written.
    """

    def __init__(
        self,
        url: str,
        busy_seconds: float = 5.0,
        clock: Callable[[], datetime] | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        """Open the database; see `open_store`. `clock` returns the time in UTC; None: the database's clock."""
        address = parse_address(url)
        location = describe(address)
        if address.get_backend_name() == "sqlite":
            check_file(Path(location))
            make_private_file(Path(location))  # SQLite creates its journals with the mode of the file
        self.database = Database(address, busy_seconds, outage_seconds)
        access = StoreAccess(database=self.database, clock=clock, secret_box=SecretBox(address), actor=local_actor())
        self._compose(access)
        try:
            self.database.migrate(lambda session: migrate(session.connection(), location))
        except BaseException:
            self.database.close()
            raise

    def _compose(self, access: StoreAccess) -> None:
        self._access = access
        self.jobs = JobStore(access)
        self.queue = QueueStore(access)
        self.trials = TrialStore(access)
        self.attempts = AttemptStore(access)
        self.events = EventStore(access)
        self.logs = LogStore(access)
        self.overviews = OverviewStore(access)
        self.keys = KeyStore(access)
        self.quotas = QuotaStore(access)
        self.audit = AuditStore(access)
        self.workers = WorkerStore(access)
        self.nodes = NodeStore(access)
        self.webhooks = WebhookStore(access)
        self.calibrations = CalibrationStore(access)
        self.transfer = TransferStore(access)
        self.maintenance = MaintenanceStore(access)

    def by(self, actor: Actor) -> "Store":
        """Return the same store for another actor: the audit log names them, and their quotas apply. It needs no closing.

        An opened store acts for the user of this process, who has no quotas.
        """
        other = copy.copy(self)
        other._compose(replace(self._access, actor=actor))
        return other

    def revision(self) -> str:
        """Read the revision of the tables. Does not wait for an unavailable database."""
        return self.database.read_now(lambda session: stored_revision(session.connection()) or "")

    def check_writable(self) -> None:
        """Check, without waiting, that the database can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly, or the database is unavailable.
        """
        self.database.check_writable()

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self.database.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
