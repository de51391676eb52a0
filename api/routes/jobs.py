"""Jobs: submit, list, read, control."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from api.auth import Principal, Reader, SettingsOf, Steerer, StoreOf, Submitter, controlled_job, if_visible, visible_job
from api.computing import RequestBatcher
from api.document import ETAG, LOCATED
from api.fields import Integer
from api.submission import JobName, JobNote, JobSubmission, JobTag, JobTags, resolved_submission
from api.views import answer_view, job_summary, job_view, page, page_response
from autotune.errors import RequestError
from autotune.loop.budget import Measurements, job_seconds_left
from autotune.outcome.waiting import waiting_text
from autotune.request.checks import MOST_TAGS, checked_labels
from autotune.request.rows import request_of
from autotune.session.allowed import is_from_outside
from autotune.wire.jobs import (
    Answer,
    Job,
    JobPage,
    Leaderboard,
    LeaderboardEntry,
    Link,
    LinkList,
    Overview,
    OverviewList,
    job_etag,
)  # fmt: skip
from search_spaces.outcome import JobState
from storage.records import JOB, LABELS, ORIGIN, OVER, ApiKey, Ask, JobFilter, JobRecord, Scope, Submission, TrialCounts
from storage.service_records import WorkerRecord
from storage.store import Store

router = APIRouter(prefix="/v1", tags=["jobs"])

JobId = Annotated[str, Path(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$", description="A job's whole id.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most items to return.")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="Your own name for this submission: sent again with the same body, it does not open a second job.",
    ),
]

FROM_SERVICE = {ORIGIN: "service"}
ASKED: dict[int | str, dict[str, Any]] = {202: {"headers": ETAG}, 409: {}}


class BudgetChange(BaseModel):
    """A new total budget; it includes what was already spent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trials: Annotated[Integer, Field(ge=1, le=1_000_000)] | None = None
    max_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


class JobChange(BudgetChange):
    """A new budget, and new labels."""

    name: JobName | None = None
    """Empty: remove the name."""
    tags: JobTags | None = None
    """Replace the previous tags."""
    note: JobNote | None = None
    """Empty: remove the note."""
    team: JobName | None = None
    """Empty: only you and those who see all jobs see it."""


MOST_LINKS = 20
"""Most links of a job that work at the same time."""


class LinkTime(BaseModel):
    """How long a link works."""

    model_config = ConfigDict(extra="forbid", strict=True)

    days: Annotated[Integer, Field(ge=1, le=3650)] = 7


@router.post(
    "/jobs",
    operation_id="submit_job",
    status_code=202,
    responses={202: {"description": "The job waits for a worker.", "headers": LOCATED}, 409: {}},
)
async def submit_job(body: JobSubmission, request: Request, principal: Submitter, response: Response, key: Key = None) -> Job:
    """Submit a tuning job; its address is in `Location`."""
    state = request.app.state
    principal.require_team(body.team or "")
    length = len(await request.body())
    resolved = await resolved_submission(
        body, length, state.settings, state.resolver, state.pools.submitting, hashed=key is not None
    )
    submission = Submission(
        submitter=principal.owner, priority=body.priority, devices=resolved.devices, key=key, body_hash=resolved.body_hash,
        by=principal.actor,
    )  # fmt: skip
    submissions: RequestBatcher[tuple[Mapping[str, Any], Submission], tuple[JobRecord, bool]] = state.submissions
    job, _ = await submissions.ask(({**resolved.row, **FROM_SERVICE}, submission))
    return _located(job, response)


@router.get(
    "/jobs",
    operation_id="list_jobs",
    response_model=JobPage,
    responses={404: {"description": "The job of the cursor no longer exists."}},
)
def list_jobs(
    store: StoreOf,
    principal: Reader,
    limit: Limit = 50,
    cursor: Annotated[
        str | None, Query(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$", description="The `next` of the page before.")
    ] = None,
    state: Annotated[list[JobState] | None, Query(max_length=9, description="States to list; omitted: all.")] = None,
    submitter: Annotated[
        str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="Whose jobs; omitted: all that you may see.")
    ] = None,
    tag: Annotated[
        list[JobTag] | None, Query(max_length=MOST_TAGS, description="List only jobs that have all these tags.")
    ] = None,
    text: Annotated[
        str,
        Query(
            max_length=200,
            pattern=r"^[^\x00]*$",
            description="Words: list only jobs with all of them in their name, note, tags, model, space, strategy, cluster, "
            "runner, id, state, message or submitter.",
        ),
    ] = "",
) -> Response:
    """The newest jobs first, without their whole requests (see GET /v1/jobs/{id}). A page with long rows has fewer items."""
    if cursor is not None:
        visible_job(store, principal, cursor, "cursor")
    having = JobFilter(states=state or (), submitter=submitter, audience=principal.audience, tags=tag or (), text=text)
    numbered_jobs = [*enumerate(store.jobs.summaries(limit + 1, cursor, having), 1)]
    parts, shown, more = page(
        lambda first, most: numbered_jobs[first : first + most],
        0,
        limit,
        lambda item: to_json(job_summary(item[1]), inf_nan_mode="null"),
        lambda item: item[0],
    )
    return page_response(parts, numbered_jobs[shown - 1][1].id if more else None)


@router.get(
    "/jobs/{job_id}",
    operation_id="get_job",
    response_model=Job,
    responses={200: {"headers": ETAG}, 304: {"description": "Nothing has changed.", "headers": ETAG}},
)
async def get_job(
    job_id: JobId,
    request: Request,
    principal: Reader,
    response: Response,
    etags: Annotated[str | None, Header(alias="If-None-Match", max_length=200)] = None,
) -> Any:
    """One job."""
    jobs: RequestBatcher[str, JobRecord | None] = request.app.state.jobs
    job = if_visible(await jobs.ask(job_id), principal, job_id)
    tag = etag(job)
    if etags is not None and (etags.strip() == "*" or tag in re.findall(r'"[^"]*"', etags)):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return job_view(job)


@router.post("/jobs/{job_id}/pause", operation_id="pause_job", status_code=202, responses=ASKED)
def pause_job(job_id: JobId, store: StoreOf, principal: Steerer, response: Response) -> Job:
    """Pause the job: running trials finish, then it waits until it is resumed."""
    return _ask(store, principal, job_id, Ask.PAUSE, response)


@router.post("/jobs/{job_id}/resume", operation_id="resume_job", status_code=202, responses=ASKED)
def resume_job(
    job_id: JobId,
    store: StoreOf,
    settings: SettingsOf,
    principal: Steerer,
    response: Response,
    body: BudgetChange | None = None,
) -> Job:
    """Queue a job again that is paused, has failed, or has succeeded and gets a larger budget.

    The server must still allow what it runs.
    """
    job = controlled_job(store, principal, job_id)
    if is_from_outside(job):
        settings.allow_list.require(request_of(job))
    return _ask(store, principal, job_id, Ask.RESUME, response, body)


@router.post("/jobs/{job_id}/stop", operation_id="stop_job", status_code=202, responses=ASKED)
def stop_job(job_id: JobId, store: StoreOf, principal: Steerer, response: Response) -> Job:
    """Stop the job: running trials finish, and the best so far is the result."""
    return _ask(store, principal, job_id, Ask.STOP, response)


@router.post("/jobs/{job_id}/cancel", operation_id="cancel_job", status_code=202, responses=ASKED)
def cancel_job(job_id: JobId, store: StoreOf, principal: Steerer, response: Response) -> Job:
    """Cancel the job: kill its running trials and end it."""
    return _ask(store, principal, job_id, Ask.CANCEL, response)


@router.post("/jobs/{job_id}/clone", operation_id="clone_job", status_code=202, responses={202: {"headers": LOCATED}, 409: {}})
def clone_job(
    job_id: JobId, store: StoreOf, settings: SettingsOf, principal: Submitter, response: Response, key: Key = None
) -> Job:
    """Submit the same request again, if the server still allows what it runs."""
    job = visible_job(store, principal, job_id)
    settings.allow_list.require(request_of(job))
    submission = Submission(
        submitter=principal.owner, priority=job.priority, devices=job.devices, key=key, body_hash=f"clone {job_id}",
        by=principal.actor,
    )  # fmt: skip
    # A team that is not theirs does not see their jobs.
    team = {"team": ""} if job.submitter != principal.owner and job.request.get("team") not in principal.teams else {}
    return _located(store.queue.submit({**job.request, **team, **FROM_SERVICE}, submission)[0], response)


@router.patch("/jobs/{job_id}", operation_id="change_job", responses={200: {"headers": ETAG}, 409: {}, 412: {}})
def change_job(
    job_id: JobId,
    body: JobChange,
    store: StoreOf,
    principal: Steerer,
    response: Response,
    match: Annotated[str | None, Header(alias="If-Match", max_length=200)] = None,
) -> Job:
    """Set the budget or the labels; with `If-Match` only if the job has not changed since. The budget of a job that has ended
    cannot change: resume it with a larger one, or clone it."""
    job = controlled_job(store, principal, job_id)
    changes = body.model_dump(exclude_none=True)
    labels = {name: changes.pop(name) for name in LABELS if name in changes}
    principal.require_team(labels.get("team", ""))
    if job.state in OVER and changes:
        raise HTTPException(409, f"job_id: the job has ended ({job.state}); resume it with a larger budget, or clone it")
    version = None
    if match is not None and match.strip() != "*":
        # The header may have several tags; weak ones (W/) never match.
        if str(job.version) not in re.findall(r'(?<!/)"([0-9]{1,18})-[0-9]{1,18}"', match):
            raise HTTPException(412, "If-Match: the job has changed since; read it again")
        version = job.version
    changes |= checked_labels(labels)
    if not changes:
        raise RequestError("body", "changes nothing", f"give some of {', '.join(JobChange.model_fields)}")
    changed = store.by(principal.actor).queue.change_request(job_id, version, changes)
    response.headers["ETag"] = etag(changed)
    return job_view(changed)


@router.post("/jobs/{job_id}/links", operation_id="create_link", status_code=201, responses={409: {}})
def create_link(job_id: JobId, body: LinkTime, store: StoreOf, settings: SettingsOf, principal: Steerer) -> Link:
    """Make a link that shows this job, and nothing else, to whoever has it, until it expires or is withdrawn."""
    controlled_job(store, principal, job_id)
    if not settings.share_days:
        raise HTTPException(409, "job_id: this service makes no links; name a team, or start it with --share-days")
    if body.days > settings.share_days:
        raise RequestError("days", f"{body.days} is too long", f"give at most {settings.share_days}")
    if len(_links(store, job_id)) >= MOST_LINKS:
        raise HTTPException(409, f"job_id: has {MOST_LINKS} links already; withdraw one")
    expires = datetime.now(UTC) + timedelta(days=body.days)
    key, token = store.by(principal.actor).keys.create(principal.owner, {Scope.READ, f"{JOB}{job_id}"}, expires)
    return _link(key, token)


@router.get("/jobs/{job_id}/links", operation_id="list_links")
def list_links(job_id: JobId, store: StoreOf, settings: SettingsOf, principal: Steerer) -> LinkList:
    """The links that show this job, without their tokens."""
    controlled_job(store, principal, job_id)
    return LinkList(items=tuple(_links(store, job_id)), most_days=settings.share_days)


@router.delete("/jobs/{job_id}/links/{link_id}", operation_id="withdraw_link", status_code=204)
def withdraw_link(job_id: JobId, link_id: str, store: StoreOf, principal: Steerer) -> Response:
    """Withdraw the link: within 5 seconds it shows nothing more."""
    controlled_job(store, principal, job_id)
    if link_id not in (link.id for link in _links(store, job_id)):
        raise HTTPException(404, f"link_id: there is no link {link_id!r} to this job; list them with GET")
    store.by(principal.actor).keys.revoke(link_id)
    return Response(status_code=204)


def _links(store: Store, job_id: str) -> list[Link]:
    """The links of the job that work, oldest first."""
    now = datetime.now(UTC)
    keys = [key for key in store.keys.all() if key.job == job_id and key.revoked is None]
    return [_link(key) for key in keys if key.expires is None or key.expires > now]


def _link(key: ApiKey, token: str = "") -> Link:
    return Link(id=key.id, owner=key.owner, created=key.created, expires=key.expires, last_used=key.last_used, token=token)


def etag(job: JobRecord) -> str:
    """The job's entity tag."""
    return job_etag(job.version, int(job.active_seconds))


def _ask(
    store: Store, principal: Principal, job_id: str, request: Ask, response: Response, body: BudgetChange | None = None
) -> Job:
    controlled_job(store, principal, job_id)
    job = store.by(principal.actor).queue.ask(job_id, request, None if body is None else body.model_dump(exclude_none=True))
    response.headers["ETag"] = etag(job)
    return job_view(job)


def _located(job: JobRecord, response: Response) -> Job:
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    response.headers["ETag"] = etag(job)
    return job_view(job)


@router.get("/overviews", operation_id="list_overviews", responses={404: {"description": "One of the jobs does not exist."}})
def list_overviews(
    store: StoreOf,
    principal: Reader,
    jobs: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}-[a-z0-9]{4}$")]],
        Query(alias="job", min_length=1, max_length=200, description="Jobs, by their whole ids."),
    ],
) -> OverviewList:
    """The progress of these jobs: trials by outcome, and the best so far."""
    records_by_id = store.jobs.exact(jobs)
    visible = [if_visible(records_by_id.get(job_id), principal, job_id, "job") for job_id in dict.fromkeys(jobs)]
    job_overviews = store.overviews.of([job.id for job in visible])
    workers = store.workers.alive() if any(job.state is JobState.QUEUED for job in visible) else []
    return OverviewList(items=tuple(_overview(job, job_overviews[job.id], workers) for job in visible))


def _overview(job: JobRecord, overview: TrialCounts, workers: Sequence[WorkerRecord]) -> Overview:
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
        waiting=waiting_text(job, workers),
    )


Workload = tuple[str, str, int, int, int, str]
"""Model, cluster, ranks, global batch size, sequence length, and the model's shape: names of uploaded models are not unique."""
Name = Annotated[str | None, Query(max_length=200)]


@router.get("/leaderboard", operation_id="list_leaderboard")
def list_leaderboard(store: StoreOf, principal: Reader, model: Name = None, cluster: Name = None) -> Leaderboard:
    """The fastest answer for each model and cluster; of jobs with the same ranks, batch, sequence length and shape of
    the model."""
    answers: defaultdict[Workload, list[tuple[Answer, JobRecord]]] = defaultdict(list)
    # Jobs with an answer that are compared, newest first.
    for answered in store.jobs.answered(2_000, principal.audience):
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
