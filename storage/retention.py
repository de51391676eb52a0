"""Remove old data: events and output of jobs that have ended, never their trials and results."""

from datetime import datetime

from sqlalchemy import Delete, delete, select
from sqlalchemy.orm import Session

from storage import leases
from storage.errors import UnknownJobError
from storage.records import ENDED
from storage.service_records import DeliveryState
from storage.tables import DeliveryRow, EventRow, JobRow, LogRow, SubmissionRow


def old_jobs(session: Session, before: datetime) -> list[str]:
    """Jobs that ended before this time and still have events."""
    has_events = JobRow.events_removed < JobRow.event_count
    return list(session.scalars(select(JobRow.id).where(JobRow.state.in_(ENDED), JobRow.updated < before, has_events)))


def prune_job(session: Session, now: datetime, job_id: str, before: datetime) -> tuple[int, int]:
    """Remove a job's events and output; return the number of rows of each.

    The counter of its events stays, so that a resumed job continues the numbering.
    """
    del now
    try:
        job = leases.locked(session, job_id)
    except UnknownJobError:  # it was deleted meanwhile
        return 0, 0
    if job.state not in ENDED or job.updated >= before:
        return 0, 0
    job.events_removed = job.event_count
    printed = session.scalars(delete(LogRow).where(LogRow.job_id == job_id).returning(LogRow.size)).all()
    job.stored_bytes -= sum(printed)
    return _count(session, delete(EventRow).where(EventRow.job_id == job_id)), len(printed)


def prune_deliveries(session: Session, now: datetime, before: datetime) -> int:
    """Remove finished deliveries, delivered or given up."""
    del now
    return _count(session, delete(DeliveryRow).where(DeliveryRow.state != DeliveryState.PENDING, DeliveryRow.created < before))


def prune_submissions(session: Session, now: datetime, before: datetime) -> int:
    """Remove the submission keys of jobs that ended: sent again after that, a submission creates a new job."""
    del now
    old = select(JobRow.id).where(JobRow.state.in_(ENDED), JobRow.updated < before)
    return _count(session, delete(SubmissionRow).where(SubmissionRow.job_id.in_(old)))


def _count(session: Session, statement: Delete) -> int:
    return int(getattr(session.execute(statement), "rowcount", 0))
