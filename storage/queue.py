"""The queue of the workers: submit jobs, request changes, and claim the next job."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

from search_spaces.outcome import JobState, StopReason
from search_spaces.plain import to_plain
from storage import audit, events, jobs, leases, quotas
from storage.codec import damaged, dump_json, job_record
from storage.database import StorePart, writes
from storage.errors import JobStateError, QuotaExceededError, SubmissionConflictError
from storage.events import append_event
from storage.records import (
    ASKED,
    BUDGET,
    HELD,
    LABELS,
    OVER,
    Ask,
    EventKind,
    JobRecord,
    Lease,
    Owner,
    QueueLimits,
    Submission,
    summary_of,
)
from storage.service_records import Quota, Quotas
from storage.tables import EventRow, JobRow, QuotaRow, SubmissionRow, UsageRow, readable
from storage.trials import abandon
from storage.webhooks import announce
from storage.workers import day_of

_LATER = {Ask.PAUSE: JobState.PAUSING, Ask.STOP: JobState.STOPPING, Ask.CANCEL: JobState.CANCELLING}
"""Request to a running job -> the state that signals it to the holder."""


class QueueStore(StorePart):
    """The queue of the workers."""

    def submit(self, request: Mapping[str, Any], submission: Submission) -> tuple[JobRecord, bool]:
        """Create a job for the workers, in state QUEUED; return it, and whether it is new.

        If the submitter has used the key before with the same body, this returns the earlier job.

        Raises:
            SubmissionConflictError: the key was used with another body.
            QuotaExceededError: the submitter may not have another job, or not one of this size.
        """
        answer = self.submit_all([(request, submission)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @writes
    def submit_all(
        self, session: Session, now: datetime, submissions: Sequence[tuple[Mapping[str, Any], Submission]]
    ) -> list[tuple[JobRecord, bool] | SubmissionConflictError | QuotaExceededError]:
        """Submit several jobs in one transaction. Return for each, in order, what `submit` would return or raise.

        The number of statements does not depend on the number of submissions.

        1. Read the known keys with their jobs, and the use and limits of each submitter.
        2. Create a row for each new job within the quota; a repeated key stands for the first job.
        3. Write the jobs before the rows that refer to them.
        """
        earlier_jobs = _known_keys(session, [submission for _, submission in submissions])
        budget = _QuotaBudget(session, now, [submission for _, submission in submissions])
        free = iter(jobs.free_ids(session, now, len(submissions)))
        answers: list[tuple[JobRow, bool] | SubmissionConflictError | QuotaExceededError] = []
        later: list[EventRow | SubmissionRow] = []
        for request, submission in submissions:
            owner_key = (submission.submitter, submission.key)
            if submission.key is None or owner_key not in earlier_jobs:
                job = jobs.new_row(next(free), now, request)
                job.submitter, job.priority, job.devices = submission.submitter, submission.priority, submission.devices
                job.queued = now
                try:
                    budget.take(submission, job.stored_bytes)
                except QuotaExceededError as error:
                    answers.append(error)
                    continue
                session.add(job)
                audit.record(
                    session, now, submission.by or self.actor, "job.submit", job.id, {"model": job.request.get("model")}
                )
                later += _dependent_rows(now, job, submission)
                answers.append((job, True))
                earlier_jobs[owner_key] = (job, submission.body_hash)
            elif earlier_jobs[owner_key][1] == submission.body_hash:
                answers.append((earlier_jobs[owner_key][0], False))
            else:
                problem = f"the key {submission.key!r} was used before, with another body"
                answers.append(SubmissionConflictError(f"{problem}; use a new key for a new job"))
        session.flush()
        session.add_all(later)
        return [a if isinstance(a, Exception) else (job_record(a[0]), a[1]) for a in answers]

    @writes
    def ask(
        self,
        session: Session,
        now: datetime,
        job_id: str,
        change: Ask,
        budget: Mapping[str, Any] | None = None,
        for_worker: bool = True,
    ) -> JobRecord:
        """Request a change. A job without a holder changes immediately; a holder sees the request by the state in its lease.

        Repeating a pending or completed request changes nothing. Of two requests to a running job, the stronger one wins
        (cancel over stop over pause).

        Args:
            job_id: the job.
            change: the requested change.
            budget: with RESUME, the new totals of `trials` or `max_seconds`. A job that SUCCEEDED continues if one of them is
                larger than before, or if a user had stopped it.
            for_worker: with RESUME, whether a worker may take the job; else it waits for a process that names it.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the request does not fit the job's state.
            QuotaExceededError: the job would be queued again, and its submitter may not have another queued job.
        """
        budget = budget or {}
        job = leases.locked(session, job_id)
        before = job.state
        job.state = _after(job, now, change, budget)
        audit.record(session, now, self.actor, f"job.{change}", job.id, budget)
        if job.state is JobState.QUEUED and before is not JobState.QUEUED:
            quotas.require_quota(session, now, job.submitter, self.actor.limits, 1, 0)
        _change(session, now, job, budget)
        queues = for_worker and job.queued is None
        if job.state is before and (change is not Ask.RESUME or not queues or before is not JobState.QUEUED):
            return job_record(job)
        job.reason = job.message = ""
        if change is Ask.RESUME:
            job.queued = now if for_worker else None
        elif job.state not in HELD:
            abandon(session, now, job)
            leases.free(job)
            job.state, job.reason, job.message = ASKED[_LATER[change]]
        append_event(session, now, job, EventKind.JOB_ASKED, {"ask": change, "state": job.state})
        announce(session, now, job)
        return job_record(job)

    @writes
    def change_request(
        self, session: Session, now: datetime, job_id: str, version: int | None, changes: Mapping[str, Any]
    ) -> JobRecord:
        """Set fields of the job's request; with `version`, only if the job still has this version.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the job has ended and a field is not one of LABELS, or it has changed since that version.
            QuotaExceededError: the submitter may not store more bytes.
        """
        job = leases.locked(session, job_id)
        if job.state in OVER and not changes.keys() <= {*LABELS}:
            remedy = "resume it with a larger budget" if job.state is JobState.SUCCEEDED else "clone it"
            raise JobStateError(f"job {job_id} has ended ({job.state}), so that its request cannot be changed; {remedy}")
        if version is not None and version != job.event_count:
            raise JobStateError(f"job {job_id} has changed since it was read (version {job.event_count}); read it again")
        before = job.stored_bytes
        _change(session, now, job, changes)
        quotas.require_quota(session, now, job.submitter, self.actor.limits, 0, job.stored_bytes - before)
        audit.record(session, now, self.actor, "job.change", job.id, {"fields": sorted(changes)})
        return job_record(job)

    @writes
    def claim(
        self, session: Session, now: datetime, owner: Owner, seconds: float = 30.0, limits: QueueLimits | None = None
    ) -> Lease | None:
        """Acquire the next job of the queue; None: there is nothing to do.

        Jobs of dead processes come first and keep their state. Then come QUEUED jobs: by priority, then by the fewest running
        jobs of the submitter, then in order of queueing. Only one process claims a job.
        """
        limits = limits or QueueLimits()
        if session.get_bind().dialect.name == "postgresql":
            # One claim at a time, else two workers could both take the last job that a submitter may run.
            session.execute(select(func.pg_advisory_xact_lock(4_281_703_165)))  # an arbitrary number without other users
        # Jobs whose process may be dead: their lease has expired, or the process was on this host, where it can be checked.
        gone = or_(JobRow.lease_host.is_(None), JobRow.lease_expires <= now, JobRow.lease_host == owner.host)
        orphaned = select(JobRow).where(JobRow.state.in_(HELD), JobRow.queued.is_not(None), gone, *_suitable(limits))
        for held_job in session.scalars(orphaned.order_by(JobRow.queued, JobRow.id).with_for_update(skip_locked=True)):
            if not leases.is_held(now, held_job):
                return jobs.take(session, now, held_job, owner, seconds, held_job.state)
        job = session.scalars(_waiting(now, limits)).first()
        return None if job is None else jobs.take(session, now, job, owner, seconds, JobState.RUNNING)


class _QuotaBudget:
    """The remaining quotas of the owners of a batch of submissions."""

    def __init__(self, session: Session, now: datetime, submissions: Sequence[Submission]) -> None:
        limited = {item.submitter: item.by.limits for item in submissions if item.by is not None and item.by.limits is not None}
        self._limits: dict[str, Quotas] = {}
        self._had: dict[str, dict[Quota, float]] = {}
        if limited:
            quotas.lock(session, limited)
            for defaults in set(limited.values()):
                owners = [owner for owner, limits in limited.items() if limits == defaults]
                self._limits |= quotas.effective(session, owners, defaults)
            self._had = quotas.taken(session, now, limited)

    def take(self, submission: Submission, size: int) -> None:
        """Take a place in the queue and `size` bytes.

        Raises:
            QuotaExceededError: the quota is not sufficient.
        """
        owner = submission.submitter
        if submission.by is None or submission.by.limits is None:
            return
        had = self._had[owner]
        quotas.require_within(self._limits[owner], had, 1, size)
        had[Quota.QUEUED_JOBS] += 1
        had[Quota.STORED_BYTES] += size


def _known_keys(session: Session, submissions: Sequence[Submission]) -> dict[tuple[str, str | None], tuple[JobRow, str]]:
    """(submitter, key) -> the earlier job with this key, and the hash of its body."""
    keys = [(submission.submitter, submission.key) for submission in submissions if submission.key is not None]
    if not keys:
        return {}
    query = select(SubmissionRow, JobRow).join(JobRow, JobRow.id == SubmissionRow.job_id)
    key_rows = session.execute(query.where(tuple_(SubmissionRow.submitter, SubmissionRow.key).in_(keys))).all()
    return {(row.submitter, row.key): (job, row.body_hash) for row, job in key_rows}


def _dependent_rows(now: datetime, job: JobRow, submission: Submission) -> list[EventRow | SubmissionRow]:
    """The rows that refer to a new job: its first event, and the submission's key."""
    created = events.new_row(now, job, EventKind.JOB_CREATED, {})
    if submission.key is None:
        return [created]
    submission_row = SubmissionRow(
        submitter=submission.submitter, key=submission.key, body_hash=submission.body_hash, job_id=job.id
    )
    return [created, submission_row]


def _change(session: Session, now: datetime, job: JobRow, changes: Mapping[str, Any]) -> None:
    """Set fields of the job's request; nothing is written if they already have these values.

    Raises:
        DamagedRowError: the request cannot be read.
    """
    plain = to_plain(changes)
    if plain and (damage := job_record(job).damage):
        raise damaged(f"job {job.id}", damage)  # before its damaged request would be overwritten
    if any(job.request.get(name) != value for name, value in plain.items()):
        job.request = {**job.request, **plain}
        # Events keep every value that a field ever had, so all of them count.
        job.stored_bytes += len(dump_json(plain))
        job.summary = summary_of(job.request)
        append_event(session, now, job, EventKind.JOB_CHANGED, plain)


def _waiting(now: datetime, limits: QueueLimits) -> Any:
    """The next job by priority, then by the fewest running jobs of its submitter, then in order of queueing."""
    other = aliased(JobRow)
    running = select(func.count()).where(other.submitter == JobRow.submitter, _held(other, now)).scalar_subquery()
    query = select(JobRow).where(JobRow.state == JobState.QUEUED, JobRow.queued.is_not(None), *_suitable(limits))
    if limits.running_jobs is not None:
        query = query.where(running < limits.running_jobs)
    today = and_(UsageRow.submitter == JobRow.submitter, UsageRow.day == day_of(now))
    used = func.coalesce(select(UsageRow.device_seconds).where(today).scalar_subquery(), 0.0)
    theirs = and_(QuotaRow.owner == JobRow.submitter, QuotaRow.quota == str(Quota.DEVICE_HOURS))
    own_limit = select(QuotaRow.most * 3600.0).where(theirs).scalar_subquery()
    query = query.where(used < func.coalesce(own_limit, math.inf if limits.device_seconds is None else limits.device_seconds))
    query = query.order_by(JobRow.priority.desc(), running.asc(), JobRow.queued, JobRow.id).limit(1)
    return query.with_for_update(skip_locked=True, of=JobRow)


def _suitable(limits: QueueLimits) -> list[ColumnElement[bool]]:
    """The conditions on a job's request for this worker."""
    allowed = {("runner",): limits.runners, ("resolved_cluster", "device", "kind"): limits.devices}
    request = readable(JobRow.request)
    conditions = [request[path].as_string().in_(names) for path, names in allowed.items() if names]
    if limits.local_devices:
        kind = request[("resolved_cluster", "device", "kind")].as_string()
        elsewhere = request[("ray_address",)].as_string().is_not(None)
        conditions.append(or_(kind.is_(None), kind.in_(limits.local_devices), elsewhere))
    return conditions


def _held(row: Any, now: datetime) -> ColumnElement[bool]:
    condition: ColumnElement[bool] = and_(row.state.in_(HELD), row.lease_host.is_not(None), row.lease_expires > now)
    return condition


def _after(job: JobRow, now: datetime, change: Ask, budget: Mapping[str, Any]) -> JobState:
    """Return the state that follows immediately.

    Raises:
        JobStateError: the request does not fit the job's state.
    """
    state = job.state
    if change is Ask.RESUME:
        if state in (JobState.PAUSED, JobState.FAILED, JobState.QUEUED):
            return JobState.QUEUED
        if state is JobState.RUNNING:
            return state
        if state is JobState.SUCCEEDED:
            # It has trials or seconds left if its budget is raised, or if a user had stopped it.
            is_raised = any(job.request.get(name) is not None and value > job.request[name] for name, value in budget.items())
            if is_raised or job.reason == StopReason.STOPPED:
                return JobState.QUEUED
            had = [f"{name} above {job.request[name]:g}" for name in BUDGET if job.request.get(name) is not None]
            raise _misfit(job, change, f"give it a larger budget ({' or '.join(had)}), or clone it")
        raise _misfit(job, change, "only a paused, failed or succeeded job can be resumed")
    if state in HELD:
        if leases.is_held(now, job):
            # Of two requests to a running job, the one of the later state in this order wins.
            strength = (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.CANCELLING)
            return max(state, _LATER[change], key=strength.index)
        state = JobState.PAUSED  # its process is dead: there is nothing to wait for
    if state in (JobState.QUEUED, JobState.PAUSED, JobState.FAILED):
        return ASKED[_LATER[change]][0]
    if (state is JobState.CANCELLED and change is Ask.CANCEL) or (job.reason == StopReason.STOPPED and change is Ask.STOP):
        return state  # already done
    raise _misfit(job, change, "it has ended")


def _misfit(job: JobRow, change: Ask, why: str) -> JobStateError:
    return JobStateError(f"job {job.id} is {job.state}, so that it cannot {change}; {why}")
