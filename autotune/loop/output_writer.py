"""What ranks print and do while trials run, written down so that every process that follows the job sees it."""

import time
from collections.abc import Iterator

from autotune.loop.lease_heartbeat import LeaseHeartbeat
from executor.runners.head_and_tail import HeadAndTail
from search_spaces.trial import LogLines, Progress
from storage.errors import DatabaseUnavailableError
from storage.log_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES
from storage.store import Store

WRITE_SECONDS = 0.5
"""How often it is written down: each time is a transaction, of which SQLite makes a few hundred a second for all together."""
PROGRESS_SECONDS = 1.0
"""How often what an attempt does is written down."""


class OutputWriter:
    """Collects what the loop hears, and writes it in batches. What no database takes at the moment waits, bounded."""

    def __init__(self, store: Store, keeper: LeaseHeartbeat) -> None:
        self._store, self._keeper = store, keeper
        self._printed: dict[str, HeadAndTail[LogLines]] = {}
        self._progress: dict[str, Progress] = {}
        self._told: dict[str, float] = {}
        """When what an attempt does was written last."""
        self._written = 0.0

    def hear(self, event: LogLines | Progress) -> None:
        """Take note of it."""
        if isinstance(event, Progress):
            self._progress[event.attempt] = event
            return
        kept = self._printed.setdefault(event.attempt, HeadAndTail(LOG_HEAD_BYTES, LOG_TAIL_BYTES))
        kept.add(event, len(event.text.encode(errors="replace")) + event.left_out)

    def write_due(self) -> None:
        """Write what there is, where the last time is long enough ago. What a broken database does not take waits on."""
        if time.monotonic() - self._written < WRITE_SECONDS:
            return
        self._written = time.monotonic()
        due = [
            sign for sign in self._progress.values() if self._written - self._told.get(sign.attempt, 0.0) >= PROGRESS_SECONDS
        ]
        self._write(due)

    def end(self, attempt: str) -> None:
        """Write what there is before the attempt gets its result: whoever sees that has its whole output."""
        self._progress.pop(attempt, None)
        self._told.pop(attempt, None)
        self._write([])

    def _write(self, progress: list[Progress]) -> None:
        lines = list(self._lines())
        if not lines and not progress:
            return
        try:
            self._store.add_output(self._keeper.lease, lines, progress)
        except DatabaseUnavailableError:
            for item in lines:  # the loop's own writes tell whether it is worth waiting
                self.hear(item)
            return
        for sign in progress:
            del self._progress[sign.attempt]
            self._told[sign.attempt] = time.monotonic()

    def _lines(self) -> Iterator[LogLines]:
        """What was printed since the last time: of each attempt and rank as one, but where something was left out."""
        printed, self._printed = self._printed, {}
        for attempt, kept in printed.items():
            joined: dict[tuple[int, int], LogLines] = {}
            gaps = 0
            for left_out, item in kept.take():
                gap = left_out + item.left_out
                gaps += gap > 0
                former = joined.get((gaps, item.rank))
                text = item.text if former is None else former.text + item.text
                gap = gap if former is None else former.left_out
                joined[gaps, item.rank] = LogLines(attempt=attempt, rank=item.rank, text=text, left_out=gap)
            yield from joined.values()
