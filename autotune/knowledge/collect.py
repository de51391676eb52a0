"""Measurements of the jobs of a database."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError
from autotune.knowledge.measurement import Collected, Measurement, joined, measurements_of_job
from autotune.prediction.fitting.trial_history import MOST_CONFIGURATIONS, MOST_JOBS, PAGE, hardware_key
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row, request_of
from search_spaces.errors import SearchSpaceError
from search_spaces.trial_config import stable_hash
from storage.records import JobRecord

if TYPE_CHECKING:
    from storage.store import Store

Naming = Callable[[str], str]
"""Returns the name of a source, given a text that identifies it."""


def same_name(text: str) -> str:
    """The name of a source of this database's own measurements."""
    return f"local/{stable_hash([text])}"


def job_measurements(store: "Store", job_id: str, naming: Naming = same_name) -> Collected:
    """The measurements of one job.

    Raises:
        LookupError: there is no such job.
        JobNotResumableError: this version cannot read it.
    """
    job = store.job(job_id)
    return _collected(store, job, request_of(job), naming)


def all_measurements(store: "Store", naming: Naming = same_name, most: int | None = None) -> Collected:
    """The measurements of the jobs, newest first, of which this version can read the request.

    Args:
        store: the database.
        naming: names the sources.
        most: about how many; None: all.
    """
    found, count = list[Collected](), 0
    for job in _jobs(store, most is not None):
        try:
            request = request_from_row(job.request)
        except (AutotuneError, SearchSpaceError):
            found.append(Collected(measurements=(), left_out={"the job is of another version": 1}))
            continue
        found.append(_collected(store, job, request, naming))
        count += len(found[-1].measurements)
        if most is not None and count >= most:
            break
    return joined(found)


def local_measurements(store: "Store") -> tuple[Measurement, ...]:
    """The newest measurements, with which sources are compared."""
    return all_measurements(store, most=MOST_CONFIGURATIONS).measurements


def _jobs(store: "Store", bounded: bool) -> Iterator[JobRecord]:
    before, seen = None, 0
    while (not bounded or seen < MOST_JOBS) and (page := store.jobs(limit=PAGE, before=before)):
        before, seen = page[-1].id, seen + len(page)
        yield from (job for job in page if not job.damage)


def _collected(store: "Store", job: JobRecord, request: JobRequest, naming: Naming) -> Collected:
    if request.resolved_cluster is None:
        return Collected(measurements=(), left_out={})
    # One source for each engine on each kind of hardware: these have one protocol.
    source = naming(stable_hash([request.engine, hardware_key(request.resolved_cluster)]))
    return measurements_of_job(request, store.trials(job.id), source)
