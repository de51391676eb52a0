"""Writes the output and progress of running trials to the store, so that every process that follows the job sees it."""

import time
from collections.abc import Iterator

from autotune.loop.heartbeats import LeaseHeartbeat
from executor.runners.rank_output import HeadAndTail
from search_spaces.shared_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES
from search_spaces.trial import LogLines, Progress
from storage.errors import DatabaseUnavailableError
from storage.store import Store

WRITE_SECONDS = 0.5
"""Time between writes: each is a transaction, and SQLite manages a few hundred per second for all processes together."""
PROGRESS_SECONDS = 1.0
"""Time between two writes of an attempt's progress."""


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
        if time.monotonic() - self._written < WRITE_SECONDS:
            return
        self._written = time.monotonic()
        due = [
            progress
            for progress in self._progress.values()
            if self._written - self._progress_written.get(progress.attempt, 0.0) >= PROGRESS_SECONDS
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
