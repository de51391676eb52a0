"""Events: numbered without gaps, written in the transaction of the change that they report."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from storage.codec import clean, event_record
from storage.leases import fenced
from storage.records import EventRecord, JobNews, Lease
from storage.tables import EventRow, JobRow

JOBS_AT_ONCE = 200
"""Most jobs in one statement."""


def append_event(session: Session, now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """Add an event to a job whose row is locked by this transaction; the job's counter gives the sequence number."""
    event = new_row(now, job, kind, payload)
    session.add(event)
    return event


def new_row(now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """Return the event's row and count it. The caller adds it, after the job's row exists."""
    job.event_count += 1
    job.updated = now
    return EventRow(job_id=job.id, sequence=job.event_count, time=now, kind=clean(str(kind)), payload=to_plain(payload))


def add_event(session: Session, now: datetime, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
    """See `Store.add_event`."""
    return event_record(append_event(session, now, fenced(session, now, lease), kind, payload))


def events(session: Session, job_id: str, after: int, limit: int) -> list[EventRecord]:
    """See `Store.events`."""
    query = select(*_COLUMNS).where(EventRow.job_id == job_id, EventRow.sequence > after)
    return [event_record(row) for row in session.execute(query.order_by(EventRow.sequence).limit(limit))]


def news(session: Session, sequences: Mapping[str, int], limit: int) -> dict[str, JobNews]:
    """See `Store.news`."""
    rows: list[Any] = []
    for job_ids in _batches([*sequences]):
        rows += session.execute(select(JobRow.id, JobRow.state, JobRow.event_count).where(JobRow.id.in_(job_ids)))
    job_events: dict[str, list[EventRecord]] = {row.id: [] for row in rows}
    for job_ids in _batches([row.id for row in rows if row.event_count > sequences[row.id]]):
        parts = [
            and_(
                EventRow.job_id == job_id, EventRow.sequence > sequences[job_id], EventRow.sequence <= sequences[job_id] + limit
            )
            for job_id in job_ids
        ]
        for row in session.execute(select(*_COLUMNS).where(or_(*parts)).order_by(EventRow.job_id, EventRow.sequence)):
            job_events[row.job_id].append(event_record(row))
    return {row.id: JobNews(state=row.state, version=row.event_count, events=tuple(job_events[row.id])) for row in rows}


def _batches(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split the ids: SQLite refuses a thousand conditions in one statement ("expression tree is too large")."""
    return (job_ids[first : first + JOBS_AT_ONCE] for first in range(0, len(job_ids), JOBS_AT_ONCE))


_COLUMNS = (EventRow.job_id, EventRow.sequence, EventRow.time, EventRow.kind, EventRow.payload)
"""Selecting columns is cheaper than creating a mapped object for each event."""
