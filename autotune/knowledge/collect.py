"""Measurements of the jobs of a database."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError
from autotune.knowledge.measurement import Collected, Measurement, measurements_of_job
from autotune.prediction.fitting.trial_history import MOST_CONFIGURATIONS, MOST_JOBS, PAGE, hardware_key
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row, request_of
from search_spaces.errors import SearchSpaceError
from search_spaces.trial_config import stable_hash
from storage.records import JobRecord

if TYPE_CHECKING:
    from storage.store import Store


def job_measurements(store: "Store", job_id: str) -> Collected:
    """The measurements of one job.

    Raises:
        LookupError: there is no such job.
        JobNotResumableError: this version cannot read it.
    """
    job = store.jobs.get(job_id)
    return _collected(store, job, request_of(job))


def local_measurements(store: "Store") -> tuple[Measurement, ...]:
    """The measurements of the newest jobs of which this version can read the request."""
    measurements = list[Measurement]()
    for job in _jobs(store):
        try:
            request = request_from_row(job.request)
        except (AutotuneError, SearchSpaceError):
            continue
        measurements += _collected(store, job, request).measurements
        if len(measurements) >= MOST_CONFIGURATIONS:
            break
    return tuple(measurements)


def _jobs(store: "Store") -> Iterator[JobRecord]:
    before, job_count = None, 0
    while job_count < MOST_JOBS and (page := store.jobs.newest(limit=PAGE, before=before)):
        before, job_count = page[-1].id, job_count + len(page)
        yield from (job for job in page if not job.damage)


def _collected(store: "Store", job: JobRecord, request: JobRequest) -> Collected:
    if request.resolved_cluster is None:
        return Collected(measurements=(), left_out={})
    # One source for each engine on each kind of hardware: these have one protocol.
    source = f"local/{stable_hash([request.engine, hardware_key(request.resolved_cluster)])}"
    return measurements_of_job(request, store.trials.of(job.id), source)
