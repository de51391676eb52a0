"""Many jobs at a glance: the progress of each, and the fastest answers of all."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from api.auth import Reader, StoreOf, if_visible
from api.views import answer_view
from autotune.loop.budget import Measurements, job_seconds_left
from autotune.wire.jobs import Answer, Leaderboard, LeaderboardEntry, Overview, OverviewList
from storage.records import JobRecord, TrialCounts

router = APIRouter(prefix="/v1", tags=["jobs"])

MOST = 200


@router.get("/overviews", operation_id="list_overviews", responses={404: {"description": "One of the jobs does not exist."}})
def list_overviews(
    store: StoreOf,
    principal: Reader,
    jobs: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$")]],
        Query(alias="job", min_length=1, max_length=MOST, description="Jobs, by their whole ids."),
    ],
) -> OverviewList:
    """The progress of these jobs: trials by outcome, and the best so far."""
    records_by_id = store.jobs.exact(jobs)
    visible = [if_visible(records_by_id.get(job_id), principal, job_id, "job") for job_id in dict.fromkeys(jobs)]
    job_overviews = store.overviews.of([job.id for job in visible])
    return OverviewList(items=tuple(_overview(job, job_overviews[job.id]) for job in visible))


def _overview(job: JobRecord, overview: TrialCounts) -> Overview:
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


MOST_JOBS = 2_000
"""Jobs with an answer that are compared, newest first."""
Workload = tuple[str, str, int, int, int, str]
"""Model, cluster, ranks, global batch size, sequence length, and the model's shape: names of uploaded models are not unique."""
Name = Annotated[str | None, Query(max_length=200)]


@router.get("/leaderboard", operation_id="list_leaderboard")
def list_leaderboard(store: StoreOf, principal: Reader, model: Name = None, cluster: Name = None) -> Leaderboard:
    """The fastest answer for each model and cluster; of jobs with the same ranks, batch, sequence length and shape of
    the model."""
    answers: defaultdict[Workload, list[tuple[Answer, JobRecord]]] = defaultdict(list)
    for answered in store.jobs.answered(MOST_JOBS, None if principal.sees_all else principal.owner):
        job, batch, length = answered.job, answered.global_batch_size, answered.sequence_length
        answer = answer_view(job)
        name, cluster_name = (str(job.request.get(field) or "") for field in ("model", "cluster"))
        if answer is None or not name or not cluster_name or batch is None or length is None:
            continue  # damaged, or a cluster of the user's own, which has no name
        if model in (None, name) and cluster in (None, cluster_name):
            answers[name, cluster_name, job.devices, batch, length, str(answered.shape)].append((answer, job))
    items = tuple(_entry(workload, answers[workload]) for workload in sorted(answers))
    return Leaderboard(items=items, jobs=sum(entry.jobs for entry in items))


def _entry(workload: Workload, answered: Sequence[tuple[Answer, JobRecord]]) -> LeaderboardEntry:
    answer, job = max(answered, key=lambda item: item[0].rate.mean)
    model, cluster, ranks, batch, length, _ = workload
    return LeaderboardEntry(
        model=model, cluster=cluster, ranks=ranks, global_batch_size=batch, sequence_length=length, jobs=len(answered),
        job=job.id, name=str(job.request.get("name") or ""), submitter=job.submitter, created=job.created,
        trial=answer.trial, rate=answer.rate, gain=answer.gain,
    )  # fmt: skip
