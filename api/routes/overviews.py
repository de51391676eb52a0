"""How far jobs are, for lists of many."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.auth import Reader, StoreOf, if_visible
from api.point_views import GainView
from autotune.gains import Gains
from autotune.jobs.request import Objective
from search_spaces.trial import Interval
from storage.records import JobRecord, Overview

router = APIRouter(prefix="/v1/overviews", tags=["jobs"])

MOST = 200
JobIds = Annotated[
    list[Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$")]],
    Query(alias="job", min_length=1, max_length=MOST, description="Jobs, by their whole ids."),
]


class OverviewView(BaseModel):
    """How far a job is."""

    job: str
    version: int
    outcomes: dict[str, int]
    """Outcome -> trials."""
    searched: int
    """Search trials that started and have an outcome: the part of the budget that is spent."""
    running: int
    best_rate: float | None
    """Highest samples/s of a search trial that was measured within the capacity; the verdict on it is in `/points`."""
    baseline_rate: float | None
    """Samples/s of the first trial; null: it was not measured."""
    gain: GainView | None
    """Best over baseline, as the best configuration states it; null: it runs, has more than 2,000 trials, or none."""


class OverviewList(BaseModel):
    """Jobs in the order in which they were asked for."""

    items: list[OverviewView]


@router.get("", operation_id="list_overviews", responses={404: {"description": "One of the jobs is not there."}})
def list_overviews(request: Request, store: StoreOf, principal: Reader, jobs: JobIds) -> OverviewList:
    """How far these jobs are: trials by outcome, and the best so far."""
    known = store.exact_jobs(jobs)
    wanted = [if_visible(known.get(job_id), principal, job_id, "job") for job_id in dict.fromkeys(jobs)]
    found = store.overviews({job.id: _capacity(job) for job in wanted})
    gains: Gains = request.app.state.gains
    return OverviewList(items=[_view(job, found[job.id], gains.of(job, found[job.id])) for job in wanted])


def _capacity(job: JobRecord) -> float | None:
    limit = job.request.get("memory_limit_bytes")
    return None if limit is None else limit * (1 - job.request.get("headroom", 0.0))


def _view(job: JobRecord, found: Overview, gain: Interval | None) -> OverviewView:
    of = "peak_memory_bytes" if job.request.get("objective") == Objective.MEMORY else "samples_per_second"
    return OverviewView(
        job=job.id, version=job.version, outcomes=dict(found.outcomes), searched=found.searched, running=found.running,
        best_rate=found.best_rate, baseline_rate=found.baseline_rate,
        gain=None if gain is None else GainView(of=of, mean=gain.mean, low=gain.low, high=gain.high),
    )  # fmt: skip
