"""A worker's heartbeat in the database, which the service's readiness check reads."""

import logging
import os
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType

from storage.errors import DatabaseUnavailableError
from storage.owners import current_owner
from storage.service_records import WorkerRecord
from storage.store import Store

BEAT_SECONDS = 10.0
log = logging.getLogger(__name__)


class WorkerHeartbeat:
    """Writes the worker's state from its own thread until the context exits."""

    def __init__(self, store: Store, seconds: float = BEAT_SECONDS) -> None:
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
            self._safely(lambda: self._store.beat(self._record()))
            self._changed.wait(self._seconds)
        self._safely(lambda: self._store.retire(self._id))

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
