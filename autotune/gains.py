"""Gains of jobs for lists of them: the same figure as in each job's best configuration."""

import threading
from collections import OrderedDict

from autotune.errors import AutotuneError
from autotune.jobs.book import read_book
from autotune.jobs.session import session_of
from autotune.verdict import decide
from search_spaces.errors import SearchSpaceError
from search_spaces.trial import Interval
from storage.records import HELD, JobRecord, Overview
from storage.store import Store

MOST_TRIALS = 2_000
"""Of a job whose gain a list has: reading them takes about half a second, once for each version of the job."""
KEPT = 5_000
"""Jobs whose gain is remembered; the one that was asked for longest ago is forgotten first."""


class Gains:
    """Computes gains and remembers them. May be used from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, tuple[int, Interval | None]] = OrderedDict()
        """Job -> its version, and the gain that it had then."""
        self._lock = threading.Lock()

    def of(self, job: JobRecord, far: Overview) -> Interval | None:
        """The best over the baseline; None: the job runs, has too many trials, or has no best or no baseline yet.

        `far`: how far the job is.
        """
        # Of a job that runs it changes with every trial.
        if job.state in HELD or not 0 < sum(far.outcomes.values()) <= MOST_TRIALS:
            return None
        with self._lock:
            known = self._known.get(job.id)
        gain = known[1] if known is not None and known[0] == job.version else self._decided(job)
        with self._lock:
            self._known[job.id] = (job.version, gain)
            self._known.move_to_end(job.id)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return gain

    def _decided(self, job: JobRecord) -> Interval | None:
        try:
            session = session_of(job)
        except (AutotuneError, SearchSpaceError):  # another version opened it; the list shows the other jobs all the same
            return None
        book = read_book(self._store, job.id)
        verdict = decide(book, session.ranking, session.prior, session.baselines)
        return None if verdict is None else verdict.gain
