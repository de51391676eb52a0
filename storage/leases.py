"""Leases as columns of the job's row: who may write a job, until when, and the token that fences out all others; whether a
holder's process still lives."""

import os
import socket
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy.orm import Session, defer

from storage.codec import owner_of
from storage.errors import LeaseHeldError, LeaseLostError, UnknownJobError
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


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux's name for the process-id namespace of the machine itself (PROC_PID_INIT_INO)."""


def current_owner() -> Owner:
    """Return this process as an owner of jobs."""
    process = _look_up(os.getpid())
    return Owner(host=_host(), pid=os.getpid(), started=process[1] if process else 0.0)


def is_dead(owner: Owner) -> bool:
    """Whether `owner` is certainly dead: a process of this host that ended, or whose pid now belongs to another process.

    False for a process of another host, whose state is unknown here.
    """
    if owner.host != _host():
        return False
    if not _exists(owner.pid):
        return True
    process = _look_up(owner.pid)
    if process is None:
        return False
    state, started = process
    # Z and X: the process has ended, and its parent has not collected its exit status.
    return state in ("Z", "X") or (owner.started != 0.0 and abs(started - owner.started) > 0.005)


def _host() -> str:
    """The host name, with the process-id namespace if that is not the machine's own.

    Containers may share a host name and a database file but not their process ids: a pid that is free here can be a live
    holder there.
    """
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if namespace == _INITIAL_PID_NAMESPACE else f"{socket.gethostname()}/{namespace}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _look_up(pid: int) -> tuple[str, float] | None:
    """Return the state of a process and the seconds from boot to its start; None if /proc is missing or hides it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain spaces and parentheses: the fields are counted after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
