"""Leases as columns of the job's row: who may write a job, until when, and the token that fences out all others."""

from datetime import datetime, timedelta

from sqlalchemy.orm import Session, defer

from storage.codec import owner_of
from storage.errors import LeaseHeldError, LeaseLostError, UnknownJobError
from storage.owners import is_dead
from storage.records import Lease, Owner
from storage.tables import JobRow


def locked(session: Session, job_id: str) -> JobRow:
    """Return the job's row, locked by this transaction until it ends.

    Raises:
        UnknownJobError: the job does not exist.
    """
    # SQLite's writers already lock the whole database, and its compiler omits FOR UPDATE.
    job = session.get(JobRow, job_id, with_for_update=True)
    if job is None:
        raise UnknownJobError(f"there is no job {job_id!r}; check the id, or name another database with --db")
    return job


_WITHOUT_REQUEST = (defer(JobRow.request), defer(JobRow.reference_losses), defer(JobRow.answer))
"""Columns that are slow to read and that writers seldom need: fetched on access."""


def fenced(session: Session, now: datetime, lease: Lease) -> JobRow:
    """Return the row of the lease's job, locked by this transaction, with the holder's seconds counted up to `now`.

    Raises:
        LeaseLostError: the lease is no longer the job's current one.
    """
    job = session.get(JobRow, lease.job_id, with_for_update=True, options=_WITHOUT_REQUEST)
    if job is None or job.lease_host is None or job.lease_token != lease.token:
        raise lost(lease)
    if job.lease_seen is not None and job.lease_expires is not None:
        # Count the time up to the lease's end at most: a suspended machine does not hold the job.
        job.active_seconds += max(0.0, (min(now, job.lease_expires) - job.lease_seen).total_seconds())
    job.lease_seen = now
    return job


def lost(lease: Lease) -> LeaseLostError:
    """The error for a holder whose lease is no longer the job's current one."""
    return LeaseLostError(
        f"job {lease.job_id} was taken over or released, and this process writes it no longer; resume it to go on"
    )


def is_held(now: datetime, job: JobRow) -> bool:
    """Whether the job's lease is valid and its holder is not known to be dead."""
    owner = owner_of(job)
    return owner is not None and job.lease_expires is not None and job.lease_expires > now and not is_dead(owner)


def refuse_if_held(now: datetime, job: JobRow) -> None:
    """Check that the job is free: it has no holder, its lease has expired, or its holder is a dead process of this host.

    Raises:
        LeaseHeldError: a live process holds it.
    """
    owner = owner_of(job)
    if owner is None or not is_held(now, job):
        return
    raise LeaseHeldError(
        f"job {job.id} is held by process {owner.pid} on {owner.host} until {job.lease_expires:%H:%M:%S} UTC; "
        "stop that process, or wait until it ends"
    )


def grant(now: datetime, job: JobRow, owner: Owner, seconds: float) -> Lease:
    """Make `owner` the job's holder under a new token."""
    job.lease_token += 1
    job.lease_host, job.lease_pid, job.lease_started = owner.host, owner.pid, owner.started
    job.lease_seen = now
    return extend(now, job, seconds)


def extend(now: datetime, job: JobRow, seconds: float) -> Lease:
    """Let the holder's lease end `seconds` from now."""
    owner = owner_of(job)
    if owner is None:
        raise LeaseLostError(f"job {job.id} has no holder; acquire it")
    job.updated = now
    job.lease_expires = now + timedelta(seconds=seconds)
    return Lease(job_id=job.id, token=job.lease_token, owner=owner, expires=job.lease_expires, state=job.state)


def free(job: JobRow) -> None:
    """End the lease. The token stays, so that the next lease gets a higher one."""
    job.lease_host = job.lease_pid = job.lease_started = job.lease_expires = job.lease_seen = None
