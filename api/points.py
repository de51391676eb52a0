"""The trials of the most recently requested jobs as columns; cached, so that a request costs only what is new."""

import threading
from collections import OrderedDict

from pydantic_core import to_json

from autotune.explain.figures.points import JobPoints
from autotune.forecast import initial_forecaster_of
from autotune.session.resolve import session_of
from storage.records import JobRecord
from storage.store import Store


class PointsBoard:
    """Cache of the most recently requested jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobPoints] = OrderedDict()

    def knows(self, job_id: str) -> bool:
        """Whether the job's trials are cached, so that reading the changes is quick."""
        return job_id in self._jobs

    def read(self, job: JobRecord, since: int) -> bytes:
        """The `Points` of the job as JSON. Raises what `session_of` raises."""
        with self._lock:
            points = self._jobs.get(job.id)
        if points is None:
            session = session_of(job)
            new_points = JobPoints(self._store, job, session, initial_forecaster_of(self._store, job.id, session))
            with self._lock:
                points = self._jobs.setdefault(job.id, new_points)
        body = to_json(points.read(since), inf_nan_mode="null")
        self._keep(job.id)
        return body

    def _keep(self, job_id: str) -> None:
        with self._lock:
            if job_id in self._jobs:
                self._jobs.move_to_end(job_id)
            # A cached trial takes about two kilobytes. The most recently requested job is always kept.
            while len(self._jobs) > 1 and sum(map(len, self._jobs.values())) > 50_000:
                self._jobs.popitem(last=False)
