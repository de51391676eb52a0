"""Events: numbered without a gap, in the transaction of the change that they tell."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from storage.codec import clean, event_record
from storage.leases import fenced
from storage.records import EventRecord, Lease
from storage.tables import EventRow, JobRow


def tell(session: Session, now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """Add an event to a job whose row this transaction holds: its counter gives the sequence."""
    event = new_row(now, job, kind, payload)
    session.add(event)
    return event


def new_row(now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """The event's row, counted already, to be added by the caller: the job's must be there before it."""
    job.event_count += 1
    job.updated = now
    return EventRow(job_id=job.id, sequence=job.event_count, time=now, kind=clean(str(kind)), payload=to_plain(payload))


def add_event(session: Session, now: datetime, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
    """See `Store.add_event`."""
    return event_record(tell(session, now, fenced(session, now, lease), kind, payload))


def events(session: Session, job_id: str, after: int, limit: int) -> list[EventRecord]:
    """See `Store.events`."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.sequence > after)
    return [event_record(row) for row in session.scalars(query.order_by(EventRow.sequence).limit(limit))]


def event_counts(session: Session, job_ids: Collection[str]) -> dict[str, int]:
    """See `Store.event_counts`."""
    return dict(session.execute(select(JobRow.id, JobRow.event_count).where(JobRow.id.in_(job_ids))).all())
