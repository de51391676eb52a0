"""Progress of many jobs, for lists."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.auth import Reader, StoreOf, if_visible
from api.point_views import GainView, answer_view
from autotune.loop.job_cost import Measurements, job_seconds_left
from storage.records import JobRecord, Overview

router = APIRouter(prefix="/v1/overviews", tags=["jobs"])

MOST = 200
JobIds = Annotated[
    list[Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$")]],
    Query(alias="job", min_length=1, max_length=MOST, description="Jobs, by their whole ids."),
]


class OverviewView(BaseModel):
    """The progress of a job."""

    job: str
    version: int
    outcomes: dict[str, int]
    """Outcome -> number of trials."""
    searched: int
    """Search trials that started and have an outcome: the spent part of the budget."""
    running: int
    seconds_left: float | None
    """Upper estimate from the job's pace, with controls and confirmations; null: it will not go on, or no trial has ended."""
    best_rate: float | None
    """Samples/s of the answer so far; null: no trial that may win was measured."""
    baseline_rate: float | None
    """Samples/s of the baseline; null: it was not measured."""
    gain: GainView | None
    """The gain of the answer over the baseline; null: one of them was not measured."""
    keeps_baseline: bool
    """Whether the answer so far is to keep the baseline."""


class OverviewList(BaseModel):
    """Jobs in the requested order."""

    items: list[OverviewView]


@router.get("", operation_id="list_overviews", responses={404: {"description": "One of the jobs does not exist."}})
def list_overviews(store: StoreOf, principal: Reader, jobs: JobIds) -> OverviewList:
    """The progress of these jobs: trials by outcome, and the best so far."""
    known = store.exact_jobs(jobs)
    wanted = [if_visible(known.get(job_id), principal, job_id, "job") for job_id in dict.fromkeys(jobs)]
    found = store.overviews([job.id for job in wanted])
    return OverviewList(items=[_view(job, found[job.id]) for job in wanted])


def _view(job: JobRecord, found: Overview) -> OverviewView:
    answer = answer_view(job)
    done = Measurements(search=found.searched, control=found.controls, confirm=found.confirmations)
    return OverviewView(
        job=job.id,
        version=job.version,
        outcomes=dict(found.outcomes),
        searched=found.searched,
        running=found.running,
        seconds_left=job_seconds_left(job, done),
        best_rate=None if answer is None else answer.rate.mean,
        baseline_rate=None if answer is None or answer.baseline_rate is None else answer.baseline_rate.mean,
        gain=None if answer is None else answer.gain,
        keeps_baseline=answer is not None and answer.keeps_baseline,
    )
