"""Response models of the service."""

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
"""Most characters of a job's message in a list."""


class JobView(BaseModel):
    """A tuning job."""

    id: str
    state: str
    reason: str
    """Why the job ended, in a word; empty while it is open."""
    message: str
    model: str
    submitter: str
    priority: int
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds for which workers have held the job."""
    version: int
    """Grows with every change; the first part of its ETag."""
    answer: AnswerView | None
    """The answer so far; null: no trial that may win was measured."""
    request: Plain


class JobSummary(BaseModel):
    """A tuning job in lists; GET /v1/jobs/{id} returns its whole request."""

    id: str
    state: str
    reason: str
    """Why the job ended, in a word; empty while it is open."""
    message: str
    """Shortened if it is long."""
    model: str
    submitter: str
    priority: int
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds for which workers have held the job."""
    version: int
    """Grows with every change; the first part of its ETag."""
    answer: AnswerView | None
    """The answer so far; null: no trial that may win was measured."""
    request: Plain
    """Only the fields model, name, tags, note, space, strategy, cluster, ranks, runner, trials, max_seconds."""


class JobPage(BaseModel):
    """Jobs, newest first."""

    items: list[JobSummary]
    next: str | None
    """`cursor` of the next page; null: this is the last one."""


class TrialView(BaseModel):
    """A queued, running or ended trial of the job."""

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
    """Numbers that are not finite are null."""


class TrialPage(BaseModel):
    """Trials by number."""

    items: list[TrialView]
    next: int | None
    """`cursor` of the next page; null: there is no next page at present."""


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
    """1, 2, 3, … without gaps."""
    time: datetime
    kind: str
    payload: Plain


class EventPage(BaseModel):
    """Events in order."""

    items: list[EventView]
    next: int
    """`after` of the next page, which may still be empty."""


class ProgressView(BaseModel):
    """The last reported progress of a running attempt."""

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
    """A part of the output of a trial's rank. It may begin and end within a line."""

    sequence: Annotated[int, Field(ge=1)]
    """Increases over all attempts of the trial; it has gaps where parts were dropped."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When it was recorded."""
    start: int
    """Bytes that all ranks of the attempt printed before it, including dropped parts."""
    size: int
    """Size of `text` in bytes, as UTF-8."""
    text: str


class LogPage(BaseModel):
    """Parts in order."""

    items: list[LogView]
    next: int
    """`after` of the next page, which may still be empty."""


class SpaceView(BaseModel):
    """The content of a space."""

    space: str
    hash: str
    domains: dict[str, list[Any]]
    raw: int
    """Points of the Cartesian product."""
    legal: int
    """Distinct legal configurations."""
    merged: int
    """Points that are equivalent to a legal one."""
    refused: dict[str, int]
    """Rule -> number of points that it refuses."""


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
    """The view of a job, without the resolved request, which is large and internal to the server."""
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
    """The view of a job in lists."""
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
    """The view of an attempt."""
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
    """The view of an event."""
    return EventView(sequence=event.sequence, time=event.time, kind=event.kind, payload=dict(event.payload))


def progress_view(record: ProgressRecord) -> ProgressView:
    """The view of the progress of a running attempt."""
    rate = record.samples_per_second
    return ProgressView(
        trial=record.trial_number,
        attempt=record.attempt,
        phase=record.phase,
        step=record.step,
        samples_per_second=rate if rate is not None and math.isfinite(rate) else None,
        message=record.message,
        time=record.time,
    )


def log_view(part: LogRecord) -> LogView:
    """The view of a part of the output."""
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
