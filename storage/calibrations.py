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
from storage.codec import reading
from storage.errors import DamagedRowError
from storage.records import CalibrationRecord
from storage.tables import CalibrationRow


def save_calibration(
    session: Session, now: datetime, fingerprint: str, cluster: ClusterSpec, result: MicrobenchmarkResult, seconds: float
) -> CalibrationRecord:
    """See `Store.save_calibration`."""
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


def calibrations(session: Session, fingerprint: str | None, limit: int) -> list[CalibrationRecord]:
    """See `Store.calibrations`."""
    query = select(CalibrationRow).order_by(CalibrationRow.created.desc(), CalibrationRow.id.desc())
    if fingerprint is not None:
        query = query.where(CalibrationRow.fingerprint == fingerprint)
    with contextlib.closing(session.scalars(query.execution_options(yield_per=50))) as rows:
        records = (record for row in rows if (record := _readable(row)) is not None)
        return list(itertools.islice(records, limit))


def prune_calibrations(session: Session, now: datetime, before: datetime) -> int:
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
    return CalibrationRecord(
        id=row.id,
        created=row.created,
        fingerprint=row.fingerprint,
        cluster=from_plain(ClusterSpec, row.cluster),
        environment=row.environment,
        hosts=tuple(row.hosts),
        seconds=row.seconds,
        context_bytes=row.context_bytes,
        workspace_bytes=row.workspace_bytes,
        rows=tuple(from_plain(MeasuredRow, item) for item in row.rows),
    )
