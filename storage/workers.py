"""Workers and nodes: heartbeats of workers, the usage of each submitter's jobs, and nodes in quarantine."""

from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage import audit
from storage.codec import clean, record_of
from storage.database import StorePart, reads, writes
from storage.events import append_event
from storage.leases import fenced
from storage.records import HELD, EventKind, Lease, QuarantineRecord
from storage.service_records import UsageRecord, WorkerRecord
from storage.tables import JobRow, QuarantineRow, UsageRow, WorkerRow


class WorkerStore(StorePart):
    """Workers, and the usage of submitters."""

    @writes
    def beat(self, session: Session, now: datetime, worker: WorkerRecord) -> None:
        """Record a worker's heartbeat and state. The store sets its times."""
        row = session.get(WorkerRow, worker.id)
        if row is None:
            session.execute(delete(WorkerRow).where(WorkerRow.seen < now - timedelta(days=1)))
            row = WorkerRow(id=worker.id, host=clean(worker.host), pid=worker.pid, started=now)
            session.add(row)
        row.seen, row.job_id, row.runner, row.problem = now, worker.job_id, worker.runner, clean(worker.problem)
        row.runners, row.devices = worker.runners, worker.devices

    @writes
    def retire(self, session: Session, now: datetime, worker_id: str) -> None:
        """Remove a worker, if it is known."""
        del now
        session.execute(delete(WorkerRow).where(WorkerRow.id == worker_id))

    @reads
    def alive(self, session: Session, seconds: float = 60.0) -> list[WorkerRecord]:
        """Return the workers with a heartbeat within the last `seconds`."""
        now = self.now(session)
        query = (
            select(WorkerRow)
            .where(WorkerRow.seen >= now - timedelta(seconds=seconds))
            .order_by(WorkerRow.started, WorkerRow.id)
        )
        return [record_of(WorkerRecord, row) for row in session.scalars(query)]

    @reads
    def usage(self, session: Session, submitter: str) -> UsageRecord:
        """Return the usage of a submitter's jobs today (UTC)."""
        now = self.now(session)
        row = session.get(UsageRow, (submitter, day_of(now)))
        counts = select(JobRow.state, func.count()).where(JobRow.submitter == submitter).group_by(JobRow.state)
        jobs = dict(session.execute(counts).all())
        return UsageRecord(
            day=day_of(now),
            device_seconds=row.device_seconds if row is not None else 0.0,
            running_jobs=sum(jobs.get(state, 0) for state in HELD),
            queued_jobs=jobs.get(JobState.QUEUED, 0),
        )


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


def day_of(now: datetime) -> str:
    """The UTC day of a moment, in the format of usage rows."""
    return f"{now:%Y-%m-%d}"


class NodeStore(StorePart):
    """Nodes in quarantine."""

    @writes
    def quarantine(
        self, session: Session, now: datetime, lease: Lease, node: str, reason: str, seconds: float
    ) -> QuarantineRecord:
        """Put a node in quarantine for `seconds`, so that all jobs avoid it, and write an event of the lease's job.

        A node that is already in quarantine gets the new reason and time.
        """
        job = fenced(session, now, lease)
        session.execute(delete(QuarantineRow).where(QuarantineRow.until <= now))
        row = QuarantineRow(
            node=clean(node), reason=clean(reason), job_id=job.id, since=now, until=now + timedelta(seconds=seconds)
        )
        row = session.merge(row)
        payload = {"node": row.node, "reason": row.reason, "until": row.until.isoformat()}
        append_event(session, now, job, EventKind.NODE_QUARANTINED, payload)
        return record_of(QuarantineRecord, row)

    @reads
    def quarantined(self, session: Session) -> list[QuarantineRecord]:
        """Return the nodes that are in quarantine now, by name."""
        now = self.now(session)
        query = select(QuarantineRow).where(QuarantineRow.until > now).order_by(QuarantineRow.node)
        return [record_of(QuarantineRecord, row) for row in session.scalars(query)]

    @writes
    def release(self, session: Session, now: datetime, node: str) -> bool:
        """End the quarantine of a node; return whether it was in quarantine."""
        row = session.get(QuarantineRow, clean(node))
        if row is None:
            return False
        session.delete(row)
        audit.record(session, now, self.actor, "node.release", row.node, {})
        return row.until > now
