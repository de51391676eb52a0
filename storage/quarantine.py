"""Nodes in quarantine: all jobs of the database avoid them until their time is over or a user releases them."""

from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from storage import audit
from storage.codec import clean
from storage.events import append_event
from storage.leases import fenced
from storage.records import EventKind, Lease, QuarantineRecord
from storage.service_records import Actor
from storage.tables import QuarantineRow


def quarantine_node(session: Session, now: datetime, lease: Lease, node: str, reason: str, seconds: float) -> QuarantineRecord:
    """See `Store.quarantine_node`."""
    job = fenced(session, now, lease)
    session.execute(delete(QuarantineRow).where(QuarantineRow.until <= now))
    row = QuarantineRow(
        node=clean(node), reason=clean(reason), job_id=job.id, since=now, until=now + timedelta(seconds=seconds)
    )
    row = session.merge(row)
    payload = {"node": row.node, "reason": row.reason, "until": row.until.isoformat()}
    append_event(session, now, job, EventKind.NODE_QUARANTINED, payload)
    return _record(row)


def quarantined_nodes(session: Session, now: datetime) -> list[QuarantineRecord]:
    """See `Store.quarantined_nodes`."""
    query = select(QuarantineRow).where(QuarantineRow.until > now).order_by(QuarantineRow.node)
    return [_record(row) for row in session.scalars(query)]


def release_node(session: Session, now: datetime, node: str, by: Actor) -> bool:
    """See `Store.release_node`."""
    row = session.get(QuarantineRow, clean(node))
    if row is None:
        return False
    session.delete(row)
    audit.record(session, now, by, "node.release", row.node, {})
    return row.until > now


def _record(row: QuarantineRow) -> QuarantineRecord:
    return QuarantineRecord(node=row.node, reason=row.reason, job_id=row.job_id, since=row.since, until=row.until)
