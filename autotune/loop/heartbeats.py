"""Heartbeats in the database: they hold a job's lease while the loop is busy, and show the service that a worker runs."""

import logging
import os
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType

from storage.errors import DatabaseUnavailableError, LeaseLostError
from storage.owners import current_owner
from storage.records import Lease
from storage.service_records import WorkerRecord
from storage.store import Store

LEASE_SECONDS = 30.0
BEAT_SECONDS = 5.0
"""Several beats fit into a lease, so one failed write to a busy database does not lose it."""


class LeaseHeartbeat:
    """Extends a lease from its own thread until the context exits."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease
        self._lost: LeaseLostError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    @property
    def lease(self) -> Lease:
        """The current lease.

        Raises:
            LeaseLostError: another process has taken the job.
        """
        if self._lost is not None:
            raise self._lost
        return self._lease

    def __enter__(self) -> "LeaseHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._lease = self._store.jobs.heartbeat(self._lease, LEASE_SECONDS)
            except LeaseLostError as error:
                self._lost = error
                return
            except DatabaseUnavailableError:
                # The database may be back at the next beat; if not, the loop's own writes raise.
                continue


log = logging.getLogger(__name__)


class WorkerHeartbeat:
    """Writes the worker's state from its own thread until the context exits."""

    def __init__(self, store: Store, seconds: float = 10.0) -> None:
        self._store, self._seconds = store, seconds
        self._id = secrets.token_hex(8)
        self._job_id: str | None = None
        self._runner = self._problem = ""
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="worker-heartbeat", daemon=True)

    def set_job(self, job_id: str | None) -> None:
        """Record the running job; None: none runs."""
        self._job_id = job_id
        self._changed.set()

    def set_runner(self, runner: str, problem: str = "") -> None:
        """Record the runner whose ranks are warm, or why they could not be started."""
        self._runner, self._problem = runner, problem
        self._changed.set()

    def __enter__(self) -> "WorkerHeartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            self._safely(lambda: self._store.workers.beat(self._record()))
            self._changed.wait(self._seconds)
        self._safely(lambda: self._store.workers.retire(self._id))

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except DatabaseUnavailableError as error:
            # A missed heartbeat does no harm: the next one replaces it.
            log.warning("%s", error)

    def _record(self) -> WorkerRecord:
        now = datetime.now(UTC)  # the store replaces it by its own time
        return WorkerRecord(
            id=self._id, host=current_owner().host, pid=os.getpid(), started=now, seen=now, job_id=self._job_id,
            runner=self._runner, problem=self._problem,
        )  # fmt: skip
