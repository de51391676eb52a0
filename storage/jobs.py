"""Jobs: create, find, acquire, release, delete."""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, cast, delete, func, or_, select, tuple_
from sqlalchemy.orm import Session, defer

from search_spaces.outcome import JobState
from search_spaces.plain import to_plain
from storage import audit, events, leases
from storage.codec import clean, damaged, dump_json, job_record, job_summary, owner_of, references_of
from storage.database import StorePart, reads, writes
from storage.errors import JobStateError, UnknownJobError
from storage.events import append_event
from storage.records import (
    ANY_JOB,
    ASKED,
    LATEST,
    SEARCHED,
    SHAPE,
    AnsweredJob,
    Audience,
    EventKind,
    JobFilter,
    JobRecord,
    Lease,
    Owner,
)
from storage.tables import JobRow, PriorRow, readable
from storage.trials import abandon
from storage.webhooks import announce
from storage.workers import charge

WITHOUT_REQUEST = (defer(JobRow.request, raiseload=True), defer(JobRow.reference_losses, raiseload=True))


class JobStore(StorePart):
    """Jobs, and the leases under which processes write them."""

    @writes
    def create(self, session: Session, now: datetime, request: Mapping[str, Any], devices: int = 1) -> JobRecord:
        """Create a job in state QUEUED, whose trials take this many devices."""
        job = new_row(free_ids(session, now, 1)[0], now, request)
        job.devices = devices
        created = events.new_row(now, job, EventKind.JOB_CREATED, {})
        session.add(job)
        session.flush()  # before its event, which refers to it
        session.add(created)
        audit.record(session, now, self.actor, "job.create", job.id, {"model": job.request.get("model")})
        return job_record(job)

    @reads
    def get(self, session: Session, job_id: str | None = None) -> JobRecord:
        """Return a job by its id or a unique prefix of it; None or LATEST: the newest job.

        Raises:
            UnknownJobError: there is none, or the prefix matches several.
        """
        return job_record(find_job(session, job_id))

    @reads
    def exact(self, session: Session, job_ids: Collection[str]) -> dict[str, JobRecord]:
        """Return the existing jobs with exactly these ids."""
        # PostgreSQL refuses text with a NUL, and no job id has one.
        possible = [job_id for job_id in job_ids if "\0" not in job_id]
        return {row.id: job_record(row) for row in session.scalars(select(JobRow).where(JobRow.id.in_(possible)))}

    def exact_in_order(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the result of `exact` for each id, in order; None: there is no such job."""
        jobs_by_id = self.exact(set(job_ids))
        return [jobs_by_id.get(job_id) for job_id in job_ids]

    @reads
    def newest(
        self, session: Session, limit: int = 50, before: str | None = None, having: JobFilter = ANY_JOB
    ) -> list[JobRecord]:
        """Return jobs, newest first; `before` is the id of the last job of the previous page."""
        query = _newest(session, select(JobRow), limit, before, having)
        return [job_record(row) for row in session.scalars(query)]

    @reads
    def summaries(
        self, session: Session, limit: int = 50, before: str | None = None, having: JobFilter = ANY_JOB
    ) -> list[JobRecord]:
        """Like `newest`, with only the fields of each request that lists show: a whole request may have a megabyte."""
        query = _newest(session, select(JobRow).options(*WITHOUT_REQUEST), limit, before, having)
        return [job_summary(row) for row in session.scalars(query)]

    @reads
    def answered(self, session: Session, limit: int, audience: Audience | None = None) -> list[AnsweredJob]:
        """Like `summaries`, of jobs with an answer."""
        request = readable(JobRow.request)
        numbers = [request[name].as_integer() for name in ("global_batch_size", "sequence_length")]
        # As text: one that is damaged would fail the whole query in PostgreSQL as a number.
        shape_of = [request[("resolved_model", name)].as_string() for name in SHAPE]
        query = select(JobRow, *numbers, *shape_of).options(*WITHOUT_REQUEST).where(JobRow.answer.is_not(None))
        query = _newest(session, query, limit, None, JobFilter(audience=audience))
        return [
            AnsweredJob(job=job_summary(row), global_batch_size=batch, sequence_length=length, shape=tuple(shape))
            for row, batch, length, *shape in session.execute(query)
        ]

    @writes
    def delete(self, session: Session, now: datetime, job_id: str) -> None:
        """Remove a job and all of its rows; the database removes those that refer to it by their foreign keys.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it.
        """
        leases.refuse_if_held(now, leases.locked(session, job_id))
        session.execute(delete(JobRow).where(JobRow.id == job_id))
        audit.record(session, now, self.actor, "job.delete", job_id, {})

    @writes
    def acquire(self, session: Session, now: datetime, job_id: str, owner: Owner, seconds: float = 30.0) -> Lease:
        """Acquire the job, if it is free, its lease has expired, or its holder is a dead process of this host.

        The job becomes RUNNING. Running attempts of the former holder become `abandoned`: their trials are planned again.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it; the message names host and process.
        """
        job = leases.locked(session, job_id)
        leases.refuse_if_held(now, job)
        return take(session, now, job, owner, seconds, JobState.RUNNING)

    @writes
    def heartbeat(self, session: Session, now: datetime, lease: Lease, seconds: float = 30.0) -> Lease:
        """Extend the lease and add the time since the last heartbeat to the job's active seconds."""
        job = leases.fenced(session, now, lease)
        charge(session, now, job)
        return leases.extend(now, job, seconds)

    @writes
    def release(
        self,
        session: Session,
        now: datetime,
        lease: Lease,
        state: JobState,
        reason: str,
        message: str,
        request: Mapping[str, Any] | None = None,
    ) -> JobRecord:
        """Release the job in `state`. Attempts that are still running become `abandoned`.

        Raises:
            JobStateError: the job's request is no longer `request`, on which the holder decided: it must decide again.
        """
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

    @writes
    def set_reference_losses(
        self, session: Session, now: datetime, lease: Lease, losses: Sequence[float], name: str = ""
    ) -> None:
        """Set the losses that later trials with this reference are compared with. Only the first call counts.

        `name`: of the reference (`search_spaces.trial.reference_name`).
        """
        job = leases.fenced(session, now, lease)
        references = references_of(job.reference_losses)
        if losses and name not in references:
            job.reference_losses = {**references, name: list(losses)}
            append_event(session, now, job, EventKind.REFERENCE_SET, {"losses": list(losses), "reference": name})

    @writes
    def set_answer(self, session: Session, now: datetime, lease: Lease, answer: Mapping[str, Any] | None) -> None:
        """Store the job's answer so far as plain data, replacing the previous one."""
        leases.fenced(session, now, lease).answer = None if answer is None else dict(answer)

    @writes
    def set_prior(self, session: Session, now: datetime, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store the job's prior, from before its first trial, as plain data; return the stored one.

        The first call counts, because a resumed job decides by its prior.
        """
        job = leases.fenced(session, now, lease)
        row = session.get(PriorRow, job.id)
        if row is None:
            row = PriorRow(job_id=job.id, prior=dict(prior))
            session.add(row)
        return _prior(row)

    @reads
    def prior(self, session: Session, job_id: str) -> Mapping[str, Any] | None:
        """Return the prior of the job with exactly this id; None: it has none."""
        row = session.get(PriorRow, job_id)
        return None if row is None else _prior(row)


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
    """Return a job's row by id or prefix, or the newest one. See `JobStore.get`."""
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


def _newest(session: Session, query: Select[Any], limit: int, before: str | None, having: JobFilter) -> Select[Any]:
    query = query.order_by(JobRow.created.desc(), JobRow.id.desc()).limit(limit)
    if before is not None:
        last = find_job(session, before)
        query = query.where(tuple_(JobRow.created, JobRow.id) < tuple_(last.created, last.id))
    if having.states:
        query = query.where(JobRow.state.in_(having.states))
    if having.submitter is not None:
        query = query.where(JobRow.submitter == having.submitter)
    if having.audience is not None:
        team = readable(JobRow.summary)["team"].as_string()
        query = query.where(or_(JobRow.submitter == having.audience.owner, team.in_(having.audience.teams)))
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


def take(session: Session, now: datetime, job: JobRow, owner: Owner, seconds: float, state: JobState) -> Lease:
    """Make `owner` the holder of a free job, and set its `state`."""
    former = owner_of(job)
    abandon(session, now, job)
    job.state, job.reason, job.message = state, "", ""
    lease = leases.grant(now, job, owner, seconds)
    append_event(session, now, job, EventKind.JOB_ACQUIRED, {"owner": owner, "taken_from": former})
    return lease


def _prior(row: PriorRow) -> Mapping[str, Any]:
    if type(row.prior) is not dict:
        raise damaged(f"prior of job {row.job_id}", "it is not a JSON object")
    return row.prior


def free_ids(session: Session, now: datetime, count: int) -> list[str]:
    """Return unused ids, which sort by the second of creation: YYYYMMDD-HHMMSS-xxxx."""
    alphabet = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 characters that are not easily confused with each other
    free: set[str] = set()
    while len(free) < count:
        candidates = {
            f"{now:%Y%m%d-%H%M%S}-{''.join(secrets.choice(alphabet) for _ in range(4))}" for _ in range(count - len(free))
        }
        free |= candidates - set(session.scalars(select(JobRow.id).where(JobRow.id.in_(candidates))))
    return list(free)
