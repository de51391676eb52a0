"""Progress of many jobs, for lists."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from api.auth import Reader, StoreOf, if_visible
from api.views import answer_view
from autotune.loop.budget import Measurements, job_seconds_left
from autotune.wire.jobs import Overview, OverviewList
from storage import records

router = APIRouter(prefix="/v1/overviews", tags=["jobs"])

MOST = 200


@router.get("", operation_id="list_overviews", responses={404: {"description": "One of the jobs does not exist."}})
def list_overviews(
    store: StoreOf,
    principal: Reader,
    jobs: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$")]],
        Query(alias="job", min_length=1, max_length=MOST, description="Jobs, by their whole ids."),
    ],
) -> OverviewList:
    """The progress of these jobs: trials by outcome, and the best so far."""
    records_by_id = store.exact_jobs(jobs)
    visible = [if_visible(records_by_id.get(job_id), principal, job_id, "job") for job_id in dict.fromkeys(jobs)]
    job_overviews = store.overviews([job.id for job in visible])
    return OverviewList(items=tuple(_view(job, job_overviews[job.id]) for job in visible))


def _view(job: records.JobRecord, overview: records.Overview) -> Overview:
    answer = answer_view(job)
    done = Measurements(search=overview.searched, control=overview.controls, confirm=overview.confirmations)
    return Overview(
        job=job.id,
        version=job.version,
        outcomes={str(name): count for name, count in overview.outcomes.items()},
        searched=overview.searched,
        running=overview.running,
        seconds_left=job_seconds_left(job, done),
        best_rate=None if answer is None else answer.rate.mean,
        baseline_rate=None if answer is None or answer.baseline_rate is None else answer.baseline_rate.mean,
        gain=None if answer is None else answer.gain,
        keeps_baseline=answer is not None and answer.keeps_baseline,
    )
