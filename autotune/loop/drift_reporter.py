"""Report each drift once per job, whichever process finds it."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from autotune.outcome.drift import Drift, step_text
from storage.records import EventRecord, Lease
from storage.store import Store

DRIFT_FOUND = "drift_found"
"""Kind of the event: a repeat of the baseline shows that the machine's speed changed."""
PAGE = 1000


class DriftReporter:
    """Writes an event for each change of speed. It reads earlier reports from the job's events when it first needs them."""

    def __init__(self, store: Store, report: Callable[[str], None]) -> None:
        self._store, self._report = store, report
        self._reported: int | None = None

    def report(self, lease: Lease, drift: Drift) -> None:
        """Record the changes that have no event yet. Later trials only add changes."""
        if not drift.found:
            return
        if self._reported is None:
            self._reported = sum(event.kind == DRIFT_FOUND for event in self._events(lease.job_id))
        for one, other in list(pairwise(drift.levels))[self._reported :]:
            message = step_text(one, other)
            trials = {"after_trial": one.last, "until_trial": other.first}
            self._store.add_event(lease, DRIFT_FOUND, {**trials, "speed": other.speed, "message": message})
            self._report(message)
            self._reported += 1

    def _events(self, job_id: str) -> Iterator[EventRecord]:
        after = 0
        while page := self._store.events(job_id, after, PAGE):
            yield from page
            after = page[-1].sequence
