"""Tells once what drift was found, whichever process finds it."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from autotune.outcome.drift import Drift, step_text
from storage.records import EventRecord, Lease
from storage.store import Store

DRIFT_FOUND = "drift_found"
"""Kind of the event: the baseline was measured again, and the machine is another than before."""
PAGE = 1000


class DriftReporter:
    """What was told is read from the job's events when there is something to tell."""

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        self._store, self._tell = store, tell
        self._told: int | None = None

    def tell(self, lease: Lease, drift: Drift) -> None:
        """Write down the steps that no event tells of yet: later trials add some, and change none."""
        if not drift.found:
            return
        if self._told is None:
            self._told = sum(event.kind == DRIFT_FOUND for event in self._events(lease.job_id))
        for one, other in list(pairwise(drift.levels))[self._told :]:
            message = step_text(one, other)
            trials = {"after_trial": one.last, "until_trial": other.first}
            self._store.add_event(lease, DRIFT_FOUND, {**trials, "speed": other.speed, "message": message})
            self._tell(message)
            self._told += 1

    def _events(self, job_id: str) -> Iterator[EventRecord]:
        after = 0
        while page := self._store.events(job_id, after, PAGE):
            yield from page
            after = page[-1].sequence
