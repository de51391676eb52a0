"""Jobs: create, find, acquire, release, delete."""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, cast, delete, func, select, tuple_
from sqlalchemy.orm import Session, defer

from search_spaces.outcome import JobState
from search_spaces.plain import to_plain
from storage import audit, events, leases
from storage.attempts import abandon
from storage.codec import clean, dump_json, job_record, job_summary, owner_of
from storage.errors import JobStateError, UnknownJobError
from storage.events import append_event
from storage.records import ASKED, LATEST, SEARCHED, SHAPE, AnsweredJob, EventKind, JobFilter, JobRecord, Lease, Owner
from storage.service_records import Actor
from storage.tables import JobRow, readable
from storage.webhooks import announce
from storage.workers import charge

WITHOUT_REQUEST = (defer(JobRow.request, raiseload=True), defer(JobRow.reference_losses, raiseload=True))
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
"""32 characters that are not easily confused with each other."""


def create_job(session: Session, now: datetime, request: Mapping[str, Any], devices: int, by: Actor) -> JobRecord:
    """See `Store.create_job`."""
    job = new_row(free_ids(session, now, 1)[0], now, request)
    job.devices = devices
    created = events.new_row(now, job, EventKind.JOB_CREATED, {})
    session.add(job)
    session.flush()  # before its event, which refers to it
    session.add(created)
    audit.record(session, now, by, "job.create", job.id, {"model": job.request.get("model")})
    return job_record(job)


def new_row(job_id: str, now: datetime, request: Mapping[str, Any]) -> JobRow:
    """A new job's row, without a holder."""
    plain = to_plain(request)
    return JobRow(
        id=job_id,
        created=now,
        updated=now,
        state=JobState.QUEUED,
        reason="",
        message="",
        request=plain,
        active_seconds=0.0,
        trial_count=0,
        event_count=0,
        submitter="",
        priority=0,
        devices=1,
        charged_seconds=0.0,
        events_removed=0,
        stored_bytes=len(dump_json(plain)),
        lease_token=0,
    )


def find_job(session: Session, job_id: str | None) -> JobRow:
    """Return a job's row by id or prefix, or the newest one. See `Store.job`."""
    if job_id in (None, LATEST):
        newest = session.scalars(select(JobRow).order_by(JobRow.created.desc(), JobRow.id.desc()).limit(1)).first()
        if newest is None:
            raise UnknownJobError("there is no job yet; start one with `autotune sweep`, or name another database with --db")
        return newest
    if exact := session.get(JobRow, job_id):
        return exact
    query = select(JobRow).where(JobRow.id.startswith(job_id, autoescape=True)).order_by(JobRow.id).limit(2)
    fitting = session.scalars(query).all() if job_id else []
    if len(fitting) > 1:
        raise UnknownJobError(
            f"{job_id!r} is a prefix of several job ids ({fitting[0].id}, {fitting[1].id}, …); give a longer prefix"
        )
    if not fitting:
        raise UnknownJobError(f"there is no job {job_id!r}; check the id, or name another database with --db")
    return fitting[0]


def exact_jobs(session: Session, job_ids: Collection[str]) -> dict[str, JobRecord]:
    """See `Store.exact_jobs`."""
    # PostgreSQL refuses text with a NUL, and no job id has one.
    possible = [job_id for job_id in job_ids if "\0" not in job_id]
    return {row.id: job_record(row) for row in session.scalars(select(JobRow).where(JobRow.id.in_(possible)))}


def jobs(session: Session, limit: int, before: str | None, having: JobFilter) -> list[JobRecord]:
    """See `Store.jobs`."""
    query = _newest(session, select(JobRow), limit, before, having)
    return [job_record(row) for row in session.scalars(query)]


def job_summaries(session: Session, limit: int, before: str | None, having: JobFilter) -> list[JobRecord]:
    """See `Store.job_summaries`."""
    query = _newest(session, select(JobRow).options(*WITHOUT_REQUEST), limit, before, having)
    return [job_summary(row) for row in session.scalars(query)]


def answered_jobs(session: Session, limit: int, submitter: str | None) -> list[AnsweredJob]:
    """See `Store.answered_jobs`."""
    request = readable(JobRow.request)
    numbers = [request[name].as_integer() for name in ("global_batch_size", "sequence_length")]
    # As text: one that is damaged would fail the whole query in PostgreSQL as a number.
    shape_of = [request[("resolved_model", name)].as_string() for name in SHAPE]
    query = select(JobRow, *numbers, *shape_of).options(*WITHOUT_REQUEST).where(JobRow.answer.is_not(None))
    query = _newest(session, query, limit, None, JobFilter(submitter=submitter))
    return [
        AnsweredJob(job=job_summary(row), global_batch_size=batch, sequence_length=length, shape=tuple(shape))
        for row, batch, length, *shape in session.execute(query)
    ]


def _newest(session: Session, query: Select[Any], limit: int, before: str | None, having: JobFilter) -> Select[Any]:
    query = query.order_by(JobRow.created.desc(), JobRow.id.desc()).limit(limit)
    if before is not None:
        last = find_job(session, before)
        query = query.where(tuple_(JobRow.created, JobRow.id) < tuple_(last.created, last.id))
    if having.states:
        query = query.where(JobRow.state.in_(having.states))
    if having.submitter is not None:
        query = query.where(JobRow.submitter == having.submitter)
    for tag in having.tags:
        # The list as JSON text has the tag in quotation marks. `replace` is case-sensitive in both databases, LIKE is not.
        listed = readable(JobRow.summary)["tags"].as_string()
        query = query.where(func.replace(listed, f'"{tag}"', "") != listed)
    if words := having.text.split():
        searched = _searched_text()
        # The database lowers both: SQLite lowers only ASCII letters, and a word of other capitals would never be found.
        patterns = (re.sub(r"([/%_])", r"/\1", word) for word in words)
        query = query.where(*(searched.like(func.lower(f"%{pattern}%"), escape="/") for pattern in patterns))
    return query


def _searched_text() -> ColumnElement[str]:
    """What `JobFilter.text` looks at, in lower case. Line ends part the fields, so that no word, which has none, spans two."""
    summary = readable(JobRow.summary)
    fields = [summary[name].as_string() for name in SEARCHED]
    columns = [JobRow.id, cast(JobRow.state, Text), JobRow.message, JobRow.submitter]
    return func.lower(reduce(lambda text, part: text + "\n" + func.coalesce(part, ""), [*columns, *fields]))


def delete_job(session: Session, now: datetime, job_id: str, by: Actor) -> None:
    """See `Store.delete_job`. The database removes dependent rows by their foreign keys."""
    leases.refuse_if_held(now, leases.locked(session, job_id))
    session.execute(delete(JobRow).where(JobRow.id == job_id))
    audit.record(session, now, by, "job.delete", job_id, {})


def acquire(session: Session, now: datetime, job_id: str, owner: Owner, seconds: float) -> Lease:
    """See `Store.acquire`."""
    job = leases.locked(session, job_id)
    leases.refuse_if_held(now, job)
    return take(session, now, job, owner, seconds, JobState.RUNNING)


def take(session: Session, now: datetime, job: JobRow, owner: Owner, seconds: float, state: JobState) -> Lease:
    """Make `owner` the holder of a free job, and set its `state`."""
    former = owner_of(job)
    abandon(session, now, job)
    job.state, job.reason, job.message = state, "", ""
    lease = leases.grant(now, job, owner, seconds)
    append_event(session, now, job, EventKind.JOB_ACQUIRED, {"owner": owner, "taken_from": former})
    return lease


def heartbeat(session: Session, now: datetime, lease: Lease, seconds: float) -> Lease:
    """See `Store.heartbeat`."""
    job = leases.fenced(session, now, lease)
    charge(session, now, job)
    return leases.extend(now, job, seconds)


def release(
    session: Session,
    now: datetime,
    lease: Lease,
    state: JobState,
    reason: str,
    message: str,
    request: Mapping[str, Any] | None,
) -> JobRecord:
    """See `Store.release`."""
    job = leases.fenced(session, now, lease)
    if request is not None and job.request != request:
        raise JobStateError(f"the request of job {job.id} has changed since it was read; read it again")
    abandon(session, now, job)
    if state is JobState.QUEUED and job.state in ASKED:
        # The job is released before the holder saw the request to change it.
        state, reason, message = ASKED[job.state]
    job.state, job.reason, job.message = state, clean(reason), clean(message)
    append_event(session, now, job, EventKind.JOB_RELEASED, {"state": state, "reason": job.reason, "message": job.message})
    leases.free(job)
    charge(session, now, job)
    announce(session, now, job)
    return job_record(job)


def set_reference_losses(session: Session, now: datetime, lease: Lease, losses: Sequence[float]) -> None:
    """See `Store.set_reference_losses`."""
    job = leases.fenced(session, now, lease)
    if losses and not job.reference_losses:
        job.reference_losses = list(losses)
        append_event(session, now, job, EventKind.REFERENCE_SET, {"losses": list(losses)})


def set_answer(session: Session, now: datetime, lease: Lease, answer: dict[str, Any] | None) -> None:
    """See `Store.set_answer`."""
    leases.fenced(session, now, lease).answer = answer


def free_ids(session: Session, now: datetime, count: int) -> list[str]:
    """Return unused ids, which sort by the second of creation: YYYYMMDD-HHMMSS-xxxx."""
    free: set[str] = set()
    while len(free) < count:
        candidates = {
            f"{now:%Y%m%d-%H%M%S}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}" for _ in range(count - len(free))
        }
        free |= candidates - set(session.scalars(select(JobRow.id).where(JobRow.id.in_(candidates))))
    return list(free)
