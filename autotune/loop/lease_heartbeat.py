"""Holds a job's lease while the loop is busy."""

import threading
from types import TracebackType

from storage.errors import DatabaseUnavailableError, LeaseLostError
from storage.records import Lease
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
                self._lease = self._store.heartbeat(self._lease, LEASE_SECONDS)
            except LeaseLostError as error:
                self._lost = error
                return
            except DatabaseUnavailableError:
                # The database may be back at the next beat; if not, the loop's own writes raise.
                continue
