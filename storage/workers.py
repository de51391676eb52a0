"""Heartbeats of workers, and the usage of each submitter's jobs."""

from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage.codec import clean
from storage.records import HELD
from storage.service_records import Usage, WorkerRecord
from storage.tables import JobRow, UsageRow, WorkerRow


def beat(session: Session, now: datetime, worker: WorkerRecord) -> None:
    """See `Store.beat`."""
    row = session.get(WorkerRow, worker.id)
    if row is None:
        session.execute(delete(WorkerRow).where(WorkerRow.seen < now - timedelta(days=1)))
        row = WorkerRow(id=worker.id, host=clean(worker.host), pid=worker.pid, started=now)
        session.add(row)
    row.seen, row.job_id, row.runner, row.problem = now, worker.job_id, worker.runner, clean(worker.problem)


def retire(session: Session, now: datetime, worker_id: str) -> None:
    """See `Store.retire`."""
    del now
    session.execute(delete(WorkerRow).where(WorkerRow.id == worker_id))


def workers(session: Session, now: datetime, seconds: float) -> list[WorkerRecord]:
    """See `Store.workers`."""
    query = (
        select(WorkerRow).where(WorkerRow.seen >= now - timedelta(seconds=seconds)).order_by(WorkerRow.started, WorkerRow.id)
    )
    return [
        WorkerRecord(
            id=row.id, host=row.host, pid=row.pid, started=row.started, seen=row.seen, job_id=row.job_id, runner=row.runner,
            problem=row.problem,
        )
        for row in session.scalars(query)
    ]  # fmt: skip


def charge(session: Session, now: datetime, job: JobRow) -> None:
    """Add the job's device-seconds since the last call to its submitter's usage of the day."""
    seconds = job.active_seconds - job.charged_seconds
    if seconds <= 0.0:
        return
    row = session.get(UsageRow, (job.submitter, day_of(now)), with_for_update=True)
    if row is None:
        row = UsageRow(submitter=job.submitter, day=day_of(now), device_seconds=0.0)
        session.add(row)
    row.device_seconds += seconds * job.devices
    job.charged_seconds = job.active_seconds


def usage(session: Session, now: datetime, submitter: str) -> Usage:
    """See `Store.usage`."""
    row = session.get(UsageRow, (submitter, day_of(now)))
    counts = select(JobRow.state, func.count()).where(JobRow.submitter == submitter).group_by(JobRow.state)
    jobs = dict(session.execute(counts).all())
    return Usage(
        day=day_of(now),
        device_seconds=row.device_seconds if row is not None else 0.0,
        running_jobs=sum(jobs.get(state, 0) for state in HELD),
        queued_jobs=jobs.get(JobState.QUEUED, 0),
    )


def day_of(now: datetime) -> str:
    """The UTC day of a moment, in the format of usage rows."""
    return f"{now:%Y-%m-%d}"
