"""The fastest answers of all jobs."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from api.auth import Reader, StoreOf
from api.views import answer_view
from autotune.wire.answers import Answer
from autotune.wire.jobs import Leaderboard, LeaderboardEntry
from storage.records import JobRecord

router = APIRouter(prefix="/v1/leaderboard", tags=["jobs"])

MOST_JOBS = 2_000
"""Jobs with an answer that are compared, newest first."""
Workload = tuple[str, str, int, int, int, str]
"""Model, cluster, ranks, global batch size, sequence length, and the model's shape: names of uploaded models are not unique."""
Name = Annotated[str | None, Query(max_length=200)]


@router.get("", operation_id="list_leaderboard")
def list_leaderboard(store: StoreOf, principal: Reader, model: Name = None, cluster: Name = None) -> Leaderboard:
    """The fastest answer for each model and cluster; of jobs with the same ranks, batch, sequence length and shape of
    the model."""
    answers: defaultdict[Workload, list[tuple[Answer, JobRecord]]] = defaultdict(list)
    for answered in store.answered_jobs(MOST_JOBS, None if principal.sees_all else principal.owner):
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
