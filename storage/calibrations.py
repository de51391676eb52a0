"""Micro-benchmarks of clusters: stored in full, found by the cluster's fingerprint."""

import contextlib
import itertools
import secrets
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, select
from sqlalchemy.orm import Session

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, MicrobenchmarkResult
from search_spaces.plain import from_plain, to_plain
from storage.codec import reading, record_of
from storage.database import StorePart, reads, writes
from storage.errors import DamagedRowError
from storage.records import CalibrationRecord
from storage.tables import CalibrationRow


class CalibrationStore(StorePart):
    """Micro-benchmarks of clusters."""

    @writes
    def save(
        self,
        session: Session,
        now: datetime,
        fingerprint: str,
        cluster: ClusterSpec,
        result: MicrobenchmarkResult,
        seconds: float,
    ) -> CalibrationRecord:
        """Store the result of a micro-benchmark; `fingerprint` identifies the hardware, in at most 16 characters."""
        row = CalibrationRow(
            id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
            created=now,
            fingerprint=fingerprint,
            cluster=to_plain(cluster),
            environment=dict(result.environment),
            hosts=list(result.hosts),
            seconds=seconds,
            context_bytes=result.context_bytes,
            workspace_bytes=result.workspace_bytes,
            rows=to_plain(result.rows),
        )
        session.add(row)
        return _record(row)

    @reads
    def newest(self, session: Session, fingerprint: str | None = None, limit: int = 50) -> list[CalibrationRecord]:
        """Return micro-benchmarks, newest first, of one fingerprint or of all."""
        query = select(CalibrationRow).order_by(CalibrationRow.created.desc(), CalibrationRow.id.desc())
        if fingerprint is not None:
            query = query.where(CalibrationRow.fingerprint == fingerprint)
        with contextlib.closing(session.scalars(query.execution_options(yield_per=50))) as rows:
            records = (record for row in rows if (record := _readable(row)) is not None)
            return list(itertools.islice(records, limit))

    @writes
    def prune(self, session: Session, now: datetime, before: datetime) -> int:
        """Remove old calibrations that a newer one of the same cluster has replaced."""
        del now
        query = select(CalibrationRow.fingerprint, CalibrationRow.id).order_by(CalibrationRow.created, CalibrationRow.id)
        newest_ids = {row.fingerprint: row.id for row in session.execute(query)}  # the newest of each cluster, which comes last
        old = CalibrationRow.id.not_in(newest_ids.values()) & (CalibrationRow.created < before)
        return int(getattr(session.execute(delete(CalibrationRow).where(old)), "rowcount", 0))


def _readable(row: CalibrationRow) -> CalibrationRecord | None:
    """The calibration; None if it is damaged: callers then use an older one, or none."""
    try:
        return calibration_record(row)
    except DamagedRowError:
        return None


def calibration_record(row: CalibrationRow | Row[Any]) -> CalibrationRecord:
    """Return a calibration as a value.

    Raises:
        DamagedRowError: its row cannot be read.
    """
    with reading(f"calibration {row.id}"):
        return _record(row)


def _record(row: CalibrationRow | Row[Any]) -> CalibrationRecord:
    return record_of(
        CalibrationRecord,
        row,
        cluster=from_plain(ClusterSpec, row.cluster),
        hosts=tuple(row.hosts),
        rows=tuple(from_plain(MeasuredRow, item) for item in row.rows),
    )
