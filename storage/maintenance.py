"""Maintenance: find rows that cannot be read, and remove old events and output of jobs that have ended.

A disk, a restore or a manual change may have damaged rows. Queries of many rows skip damaged ones (`storage.codec`), so only
`MaintenanceStore.damages` reports them. Trials and their results are never removed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import JSON, Delete, Row, Table, delete, select, tuple_
from sqlalchemy.orm import Session

from storage import leases
from storage.audit import AuditStore
from storage.calibrations import CalibrationStore, calibration_record
from storage.codec import Damaged, attempt_record, config_of, damage_of, damaged, reading, result_of
from storage.database import StorePart, reads, writes
from storage.errors import DamagedRowError, UnknownJobError
from storage.records import ENDED
from storage.service_records import Damage, DeliveryState, Pruned
from storage.tables import (
    AttemptRow,
    Base,
    CalibrationRow,
    DeliveryRow,
    EventRow,
    JobRow,
    JsonList,
    LogRow,
    SubmissionRow,
    TrialRow,
    WebhookRow,
    of_job,
    table_of,
)
from storage.webhooks import tries_of


def damages(session: Session, job_id: str | None = None) -> Iterator[Damage]:
    """Yield the damaged rows of a job, or of the whole database, table by table.

    Rows are read in batches, and one by one if a batch cannot be read.
    """
    batch = 200
    for table in Base.metadata.sorted_tables:
        has_job = table is table_of(JobRow) or "job_id" in table.c or "attempt" in table.primary_key.columns
        if job_id is not None and not has_job:
            continue
        key = list(table.primary_key)
        query = select(*key).order_by(*key)
        if job_id is not None:
            query = query.where(of_job(table, job_id))
        with contextlib.closing(session.execute(query.execution_options(yield_per=batch))) as key_rows:
            for keys in key_rows.partitions(batch):
                yield from _among(session, table, [tuple(key) for key in keys])


def _among(session: Session, table: Table, keys: list[tuple[Any, ...]]) -> Iterator[Damage]:
    key = tuple_(*table.primary_key)
    first_row = f"{table.name} {'/'.join(map(str, keys[0]))}"
    try:
        rows = session.execute(select(table).where(key.in_(keys))).all()
    except (LookupError, ValueError, TypeError) as error:  # an invalid state or time
        if len(keys) > 1:
            for row_key in keys:
                yield from _among(session, table, [row_key])
        else:
            yield Damage(place=first_row, problem=(str(error).splitlines() or ["cannot be read"])[0][:200])
        return
    for row in rows:
        name = "/".join(str(row._mapping[column]) for column in table.primary_key)
        try:
            _check(table, row)
        except DamagedRowError as error:
            yield Damage(place=f"{table.name} {name}", problem=str(error).partition(": ")[2].partition("; ")[0])


def _check(table: Table, row: Row[Any]) -> None:
    """Check that a row can be read.

    Raises:
        DamagedRowError: it cannot.
    """
    with reading(table.name):
        for column in table.columns:
            value = row._mapping[column]
            if not isinstance(column.type, JSON) or value is None:
                continue
            if isinstance(value, Damaged):
                raise damaged(table.name, f"{column.name} is not JSON")
            if not isinstance(value, list if isinstance(column.type, JsonList) else dict):
                raise damaged(table.name, f"{column.name} is {type(value).__name__}")
        if (check := _CHECKS.get(table)) is not None:
            check(row)


def _check_job(row: Row[Any]) -> None:
    if damage := damage_of(row):
        raise damaged("jobs", damage)


def _check_trial(row: Row[Any]) -> None:
    for name, value in config_of(row.config).values().items():
        if not isinstance(value, bool | int | float | str | None):
            raise damaged("trials", f"{name} of its configuration is {type(value).__name__}")
    result_of(row.refusal)


_CHECKS: Mapping[Table, Callable[[Row[Any]], object]] = {
    table_of(JobRow): _check_job,
    table_of(TrialRow): _check_trial,
    table_of(AttemptRow): attempt_record,
    table_of(CalibrationRow): calibration_record,
    table_of(DeliveryRow): lambda row: tries_of(row.tries),
    table_of(WebhookRow): lambda row: urlsplit(row.url).port,
}
"""Functions that check rows beyond the types of their JSON columns."""


class MaintenanceStore(StorePart):
    """Removal of old rows, and the search for damaged ones."""

    @reads
    def damages(self, session: Session) -> list[Damage]:
        """Return all rows that cannot be read. Such a row only fails methods about its own job."""
        return list(damages(session))

    def prune(self, before: datetime) -> Pruned:
        """Remove events and output of jobs that ended before, submission keys, finished deliveries, replaced calibrations."""
        # Audit first, so that rows removed before a crash are recorded too.
        AuditStore(self.access).record("db.prune", "", {"before": before.isoformat()})
        of_jobs = [self._prune_job(job_id, before) for job_id in self._old_jobs(before)]
        return Pruned(
            events=sum(events for events, _ in of_jobs),
            logs=sum(parts for _, parts in of_jobs),
            deliveries=self._prune_deliveries(before),
            submissions=self._prune_submissions(before),
            calibrations=CalibrationStore(self.access).prune(before),
        )

    @reads
    def _old_jobs(self, session: Session, before: datetime) -> list[str]:
        """Jobs that ended before this time and still have events."""
        has_events = JobRow.events_removed < JobRow.event_count
        return list(session.scalars(select(JobRow.id).where(JobRow.state.in_(ENDED), JobRow.updated < before, has_events)))

    @writes
    def _prune_job(self, session: Session, now: datetime, job_id: str, before: datetime) -> tuple[int, int]:
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

    @writes
    def _prune_deliveries(self, session: Session, now: datetime, before: datetime) -> int:
        """Remove finished deliveries, delivered or given up."""
        del now
        return _count(
            session, delete(DeliveryRow).where(DeliveryRow.state != DeliveryState.PENDING, DeliveryRow.created < before)
        )

    @writes
    def _prune_submissions(self, session: Session, now: datetime, before: datetime) -> int:
        """Remove the submission keys of jobs that ended: sent again after that, a submission creates a new job."""
        del now
        old = select(JobRow.id).where(JobRow.state.in_(ENDED), JobRow.updated < before)
        return _count(session, delete(SubmissionRow).where(SubmissionRow.job_id.in_(old)))


def _count(session: Session, statement: Delete) -> int:
    return int(getattr(session.execute(statement), "rowcount", 0))
