"""Threads that write to the store while the loop is busy: heartbeats, and the output and progress of running trials."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import TracebackType

from executor.runners.rank_process import HeadAndTail
from search_spaces.shared_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES
from search_spaces.trial import LogLines, Progress
from storage.errors import DatabaseUnavailableError, LeaseLostError
from storage.leases import current_owner
from storage.records import Lease, QueueLimits
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

    def __init__(self, store: Store, limits: QueueLimits | None = None, seconds: float = 10.0) -> None:
        self._store, self._seconds, self._limits = store, seconds, limits or QueueLimits()
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
            runner=self._runner, problem=self._problem, runners=" ".join(sorted(self._limits.runners)),
            devices=" ".join(sorted(self._limits.devices or self._limits.local_devices)),
        )  # fmt: skip


class OutputWriter:
    """Collects output and progress and writes them in batches. While the database is down, they wait in a bounded buffer."""

    def __init__(self, store: Store, heartbeat: LeaseHeartbeat) -> None:
        self._store, self._heartbeat = store, heartbeat
        self._printed: dict[str, HeadAndTail[LogLines]] = {}
        self._progress: dict[str, Progress] = {}
        self._progress_written: dict[str, float] = {}
        """Attempt -> time of the last write of its progress."""
        self._written = 0.0

    def add(self, event: LogLines | Progress) -> None:
        """Add an event to the buffer."""
        if isinstance(event, Progress):
            self._progress[event.attempt] = event
            return
        printed = self._printed.setdefault(event.attempt, HeadAndTail(LOG_HEAD_BYTES, LOG_TAIL_BYTES))
        printed.add(event, len(event.text.encode(errors="replace")) + event.left_out)

    def write_due(self) -> None:
        """Write the buffer if the last write is long enough ago. Keep it if the database is unavailable."""
        # Each write is a transaction, and SQLite manages a few hundred per second for all processes together.
        if time.monotonic() - self._written < 0.5:
            return
        self._written = time.monotonic()
        due = [
            progress
            for progress in self._progress.values()
            if self._written - self._progress_written.get(progress.attempt, 0.0) >= 1.0
        ]
        self._write(due)

    def end(self, attempt: str) -> None:
        """Write the buffer before the attempt gets its result, so that readers of the result find the whole output."""
        self._progress.pop(attempt, None)
        self._progress_written.pop(attempt, None)
        self._write([])

    def _write(self, progress: list[Progress]) -> None:
        lines = list(self._lines())
        if not lines and not progress:
            return
        try:
            self._store.logs.add(self._heartbeat.lease, lines, progress)
        except DatabaseUnavailableError:
            for item in lines:  # the loop's own writes decide whether to wait for the database
                self.add(item)
            return
        for progress_report in progress:
            del self._progress[progress_report.attempt]
            self._progress_written[progress_report.attempt] = time.monotonic()

    def _lines(self) -> Iterator[LogLines]:
        """The output since the last write, joined for each attempt and rank; a gap starts a new item."""
        printed, self._printed = self._printed, {}
        for attempt, head_and_tail in printed.items():
            joined: dict[tuple[int, int], LogLines] = {}
            gaps = 0
            for left_out, item in head_and_tail.take():
                gap = left_out + item.left_out
                gaps += gap > 0
                former = joined.get((gaps, item.rank))
                text = item.text if former is None else former.text + item.text
                gap = gap if former is None else former.left_out
                joined[gaps, item.rank] = LogLines(attempt=attempt, rank=item.rank, text=text, left_out=gap)
            yield from joined.values()
