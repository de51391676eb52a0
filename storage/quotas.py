"""Quotas: limits and use of each owner."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from datetime import datetime

from sqlalchemy import case, delete, func, select, text
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage import audit
from storage.database import StorePart, reads, writes
from storage.errors import QuotaExceededError
from storage.service_records import Quota, Quotas, QuotaUseRecord
from storage.tables import JobRow, KeyRow, QuotaRow, UsageRow, WebhookRow
from storage.workers import day_of

REMEDIES: Mapping[Quota, str] = {
    Quota.QUEUED_JOBS: "wait until some have started, or cancel some",
    Quota.STORED_BYTES: "ask the operator of the server to remove old jobs or to raise it (`autotune keys quota`)",
    Quota.STREAMS: "close some",
    Quota.DEVICE_HOURS: "submit again tomorrow (UTC), or ask the operator of the server (`autotune keys quota`)",
    Quota.WEBHOOKS: "delete one that is not needed",
}


def require(quota: Quota, used: float, more: float, most: float | None) -> None:
    """Refuse to exceed a limit.

    Raises:
        QuotaExceededError: `used` plus `more` exceeds `most`.
    """
    if most is not None and used + more > most:
        raise QuotaExceededError(quota, used, most, REMEDIES[quota])


def effective(session: Session, owners: Collection[str], defaults: Quotas) -> dict[str, Quotas]:
    """Return the limits of each owner."""
    limits = dict.fromkeys(owners, defaults)
    quota_names = {field.name for field in fields(Quotas)}
    for row in session.scalars(select(QuotaRow).where(QuotaRow.owner.in_(owners))):
        if row.quota in quota_names:
            limits[row.owner] = replace(limits[row.owner], **{row.quota: None if math.isinf(row.most) else row.most})
    return limits


def taken(session: Session, now: datetime, owners: Collection[str]) -> dict[str, dict[Quota, float]]:
    """Return the use of each owner, for quotas that the database can count.

    This takes two statements for any number of owners. The first only reads the index, however large the requests are.
    """
    used = {owner: {Quota.QUEUED_JOBS: 0.0, Quota.STORED_BYTES: 0.0, Quota.DEVICE_HOURS: 0.0} for owner in owners}
    queued = func.sum(case((JobRow.state == JobState.QUEUED, 1), else_=0))
    jobs = select(JobRow.submitter, queued, func.sum(JobRow.stored_bytes)).where(JobRow.submitter.in_(owners))
    for owner, count, size in session.execute(jobs.group_by(JobRow.submitter)):
        used[owner] |= {Quota.QUEUED_JOBS: float(count), Quota.STORED_BYTES: float(size)}
    today = select(UsageRow.submitter, UsageRow.device_seconds).where(UsageRow.submitter.in_(owners))
    for owner, seconds in session.execute(today.where(UsageRow.day == day_of(now))):
        used[owner][Quota.DEVICE_HOURS] = seconds / 3600
    return used


def lock(session: Session, owners: Collection[str]) -> None:
    """Lock the quotas of these owners until the transaction ends, else two transactions could both take the rest.

    SQLite only has one writer at a time anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        for owner in sorted(owners):
            # The class of these locks is an arbitrary number without other users.
            session.execute(text("SELECT pg_advisory_xact_lock(:kind, hashtext(:owner))"), {"kind": 4_281_703, "owner": owner})


def require_quota(session: Session, now: datetime, owner: str, defaults: Quotas | None, jobs: int, size: int) -> None:
    """Refuse if an owner may not queue `jobs` more jobs, or store `size` more bytes.

    Raises:
        QuotaExceededError: see `require`.
    """
    if defaults is None:
        return
    lock(session, [owner])
    limits, had = effective(session, [owner], defaults)[owner], taken(session, now, [owner])[owner]
    require_within(limits, had, jobs, size)


def require_within(limits: Quotas, had: Mapping[Quota, float], jobs: int, size: int) -> None:
    """`require_quota` with known limits and use."""
    if jobs:
        require(Quota.QUEUED_JOBS, had[Quota.QUEUED_JOBS], jobs, limits.queued_jobs)
        if limits.device_hours is not None and had[Quota.DEVICE_HOURS] >= limits.device_hours:
            hours, most = had[Quota.DEVICE_HOURS], limits.device_hours
            raise QuotaExceededError(Quota.DEVICE_HOURS, hours, most, REMEDIES[Quota.DEVICE_HOURS])
    if size > 0:
        require(Quota.STORED_BYTES, had[Quota.STORED_BYTES], size, limits.stored_bytes)


class QuotaStore(StorePart):
    """Limits and use of owners."""

    @reads
    def limits(self, session: Session, owner: str, defaults: Quotas) -> Quotas:
        """Return the limits of an owner: their own ones if set, else the defaults."""
        return effective(session, [owner], defaults)[owner]

    @reads
    def uses(self, session: Session, owner: str, defaults: Quotas) -> list[QuotaUseRecord]:
        """Return limits and use of an owner. The use of streams is always 0, because the store does not know it."""
        now = self.now(session)
        limits = effective(session, [owner], defaults)[owner]
        overridden = set(session.scalars(select(QuotaRow.quota).where(QuotaRow.owner == owner)))
        webhooks = session.scalar(select(func.count()).where(WebhookRow.owner == owner)) or 0
        had = taken(session, now, [owner])[owner] | {Quota.WEBHOOKS: float(webhooks)}
        return [
            QuotaUseRecord(quota=quota, used=had.get(quota, 0.0), most=limits.of(quota), own=str(quota) in overridden)
            for quota in Quota
        ]

    @writes
    def set_limit(self, session: Session, now: datetime, owner: str, quota: Quota, most: float | None) -> None:
        """Set an owner's limit, `math.inf` for no limit; None: restore the default."""
        session.execute(delete(QuotaRow).where(QuotaRow.owner == owner, QuotaRow.quota == str(quota)))
        if most is not None:
            session.add(QuotaRow(owner=owner, quota=str(quota), most=most))
        limit = "default" if most is None else "none" if math.isinf(most) else most
        audit.record(session, now, self.actor, "quota.set", owner, {"quota": str(quota), "most": limit})

    @reads
    def owners(self, session: Session) -> list[str]:
        """Return all owners with a key or their own limits."""
        return sorted({*session.scalars(select(QuotaRow.owner)), *session.scalars(select(KeyRow.owner))})
