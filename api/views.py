"""What the service answers with."""

import math
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from api.point_views import AnswerView, answer_view
from api.submission import shown_fields
from autotune.request.field_names import with_present_names
from search_spaces.plain import to_plain
from storage.log_records import LogRecord, ProgressRecord
from storage.records import AttemptRecord, EventRecord, JobRecord

Plain = dict[str, Any]
MOST_MESSAGE = 1000
"""Characters of a job's message in a list."""


class JobView(BaseModel):
    """A tuning job."""

    id: str
    state: str
    reason: str
    """Why it ended, in a word; empty while it is open."""
    message: str
    model: str
    submitter: str
    priority: int
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds that workers have held it."""
    version: int
    """Grows with every change; the first part of its ETag."""
    answer: AnswerView | None
    """What it has found so far; null: nothing that may win has been measured."""
    request: Plain


class JobSummary(BaseModel):
    """A tuning job as lists show it; GET /v1/jobs/{id} has its whole request."""

    id: str
    state: str
    reason: str
    """Why it ended, in a word; empty while it is open."""
    message: str
    """Its beginning, where it is long."""
    model: str
    submitter: str
    priority: int
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds that workers have held it."""
    version: int
    """Grows with every change; the first part of its ETag."""
    answer: AnswerView | None
    """What it has found so far; null: nothing that may win has been measured."""
    request: Plain
    """The fields that lists show: model, name, tags, note, space, strategy, cluster, ranks, runner, trials, max_seconds."""


class JobPage(BaseModel):
    """Jobs, newest first."""

    items: list[JobSummary]
    next: str | None
    """`cursor` of the next page; null: this is the last one."""


class TrialView(BaseModel):
    """One measurement that the job wants or has."""

    number: int
    """0, 1, 2, … in the order of proposal; 0 is the baseline."""
    purpose: str
    fidelity: str
    repeat: int
    counted: bool
    """Whether it counts against the budget of trials."""
    outcome: str | None
    config: Plain
    attempts: int
    created: datetime
    started: datetime | None
    finished: datetime | None
    result: Plain | None
    """Numbers that are not finite read as null."""


class TrialPage(BaseModel):
    """Trials by number."""

    items: list[TrialView]
    next: int | None
    """`cursor` of the next page; null: there is none now."""


class AttemptView(BaseModel):
    """One execution of a trial."""

    trial: int
    number: int
    state: str
    outcome: str | None
    started: datetime
    finished: datetime | None
    result: Plain | None


class AttemptList(BaseModel):
    """The attempts of a trial, oldest first."""

    items: list[AttemptView]


class EventView(BaseModel):
    """Something that happened to a job."""

    sequence: Annotated[int, Field(ge=1)]
    """1, 2, 3, … without a gap."""
    time: datetime
    kind: str
    payload: Plain


class EventPage(BaseModel):
    """Events in order."""

    items: list[EventView]
    next: int
    """`after` of the next page, which may be empty still."""


class ProgressView(BaseModel):
    """What the ranks of a running attempt did when they were heard last."""

    trial: int
    attempt: int
    """1, 2, … within the trial."""
    phase: str
    step: int
    samples_per_second: float | None
    message: str
    time: datetime


class ProgressList(BaseModel):
    """The running attempts of a job, by trial."""

    items: list[ProgressView]


class LogView(BaseModel):
    """A part of what a rank of a trial printed. It may begin and end within a line."""

    sequence: Annotated[int, Field(ge=1)]
    """Grows over all attempts of the trial; it jumps where parts were left out."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When it was written down."""
    start: int
    """Bytes that the attempt had printed before it, on all ranks, what was left out included."""
    size: int
    """Its own bytes, as UTF-8."""
    text: str


class LogPage(BaseModel):
    """Parts in order."""

    items: list[LogView]
    next: int
    """`after` of the next page, which may be empty still."""


class SpaceView(BaseModel):
    """What a space holds."""

    space: str
    hash: str
    domains: dict[str, list[Any]]
    raw: int
    """Points of the Cartesian product."""
    legal: int
    """Distinct legal configurations."""
    merged: int
    """Points that say the same as a legal one."""
    refused: dict[str, int]
    """Rule -> points that it refuses."""


class RefusalView(BaseModel):
    """A rule that refuses a configuration."""

    rule: str
    message: str
    remedy: str


class ValidationView(BaseModel):
    """Whether a configuration is legal."""

    legal: bool
    config: Plain
    """In canonical form."""
    refusals: list[RefusalView]


class NameList(BaseModel):
    """Names of presets."""

    items: list[str]


class PlainList(BaseModel):
    """Descriptions as plain data."""

    items: list[Plain]


def job_view(job: JobRecord) -> JobView:
    """A job as it is shown. What it resolved to is left out: that is large, and the server's own."""
    return JobView(
        id=job.id,
        state=job.state,
        reason=job.reason,
        message=_message(job),
        model=str(job.request.get("model", "")),
        submitter=job.submitter,
        priority=job.priority,
        created=job.created,
        updated=job.updated,
        active_seconds=int(job.active_seconds),
        version=job.version,
        answer=answer_view(job),
        request=shown_fields(dict(job.request)),
    )


def _message(job: JobRecord) -> str:
    return f"damaged: {job.damage}" if job.damage else job.message


def job_summary(job: JobRecord) -> JobSummary:
    """A job as lists show it."""
    message = _message(job)
    return JobSummary(
        id=job.id,
        state=job.state,
        reason=job.reason,
        message=message if len(message) <= MOST_MESSAGE else message[: MOST_MESSAGE - 1] + "…",
        model=str(job.request.get("model", "")),
        submitter=job.submitter,
        priority=job.priority,
        created=job.created,
        updated=job.updated,
        active_seconds=int(job.active_seconds),
        version=job.version,
        answer=answer_view(job),
        request=with_present_names(job.request),
    )


def attempt_view(attempt: AttemptRecord) -> AttemptView:
    """An attempt as it is shown."""
    return AttemptView(
        trial=attempt.trial_number,
        number=attempt.number,
        state=attempt.state,
        outcome=attempt.outcome,
        started=attempt.started,
        finished=attempt.finished,
        result=_result(attempt.result),
    )


def event_view(event: EventRecord) -> EventView:
    """An event as it is shown."""
    return EventView(sequence=event.sequence, time=event.time, kind=event.kind, payload=dict(event.payload))


def progress_view(sign: ProgressRecord) -> ProgressView:
    """What a running attempt does, as it is shown."""
    rate = sign.samples_per_second
    return ProgressView(
        trial=sign.trial_number,
        attempt=sign.attempt,
        phase=sign.phase,
        step=sign.step,
        samples_per_second=rate if rate is not None and math.isfinite(rate) else None,
        message=sign.message,
        time=sign.time,
    )


def log_view(part: LogRecord) -> LogView:
    """A part of what was printed, as it is shown."""
    return LogView(
        sequence=part.sequence,
        attempt=part.attempt,
        rank=part.rank,
        time=part.time,
        start=part.start,
        size=part.size,
        text=part.text,
    )


def _result(result: Any) -> Plain | None:
    if result is None:
        return None
    plain: Plain = to_plain(result)
    return {name: value for name, value in plain.items() if name != "attempt"}
