"""The prior of a job from before its first trial. It is immutable, because a resumed job decides by it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from storage import leases
from storage.codec import damaged
from storage.records import Lease
from storage.tables import PriorRow


def set_prior(session: Session, now: datetime, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `Store.set_prior`."""
    job = leases.fenced(session, now, lease)
    row = session.get(PriorRow, job.id)
    if row is None:
        row = PriorRow(job_id=job.id, prior=dict(prior))
        session.add(row)
    return _readable(row)


def prior(session: Session, job_id: str) -> Mapping[str, Any] | None:
    """See `Store.prior`."""
    row = session.get(PriorRow, job_id)
    return None if row is None else _readable(row)


def _readable(row: PriorRow) -> Mapping[str, Any]:
    if type(row.prior) is not dict:
        raise damaged(f"prior of job {row.job_id}", "it is not a JSON object")
    return row.prior
