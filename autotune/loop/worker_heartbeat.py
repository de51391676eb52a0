"""A worker's signs of life in the database: who asks whether the service is ready sees them."""

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
    """Tells from a thread of its own what the worker does, until it is left."""

    def __init__(self, store: Store, seconds: float = BEAT_SECONDS) -> None:
        self._store, self._seconds = store, seconds
        self._id = secrets.token_hex(8)
        self._job_id: str | None = None
        self._runner = self._problem = ""
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="worker-beats", daemon=True)

    def runs(self, job_id: str | None) -> None:
        """Say which job runs."""
        self._job_id = job_id
        self._changed.set()

    def keeps(self, runner: str, problem: str = "") -> None:
        """Say whose ranks are kept, or why they could not be started."""
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
            # A sign of life is worth no more than its moment: the next one tells.
            log.warning("%s", error)

    def _record(self) -> WorkerRecord:
        now = datetime.now(UTC)  # the store puts its own
        return WorkerRecord(
            id=self._id, host=current_owner().host, pid=os.getpid(), started=now, seen=now, job_id=self._job_id,
            runner=self._runner, problem=self._problem,
        )  # fmt: skip
