"""Find rows that cannot be read: a disk, a restore or a manual change may have damaged them.

Queries of many rows skip damaged ones (`storage.codec`), so only this check reports them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import JSON, Row, Table, select, tuple_
from sqlalchemy.orm import Session

from storage.calibrations import calibration_record
from storage.codec import Damaged, attempt_record, config_of, damage_of, damaged, reading, result_of
from storage.errors import DamagedRowError
from storage.service_records import Damage
from storage.tables import (
    AttemptRow,
    Base,
    CalibrationRow,
    DeliveryRow,
    JobRow,
    JsonList,
    TrialRow,
    WebhookRow,
    of_job,
    table_of,
)
from storage.webhooks import tries_of

BATCH = 200


def damages(session: Session, job_id: str | None = None) -> Iterator[Damage]:
    """Yield the damaged rows of a job, or of the whole database, table by table.

    Rows are read in batches, and one by one if a batch cannot be read.
    """
    for table in Base.metadata.sorted_tables:
        has_job = table is table_of(JobRow) or "job_id" in table.c or "attempt" in table.primary_key.columns
        if job_id is not None and not has_job:
            continue
        key = list(table.primary_key)
        query = select(*key).order_by(*key)
        if job_id is not None:
            query = query.where(of_job(table, job_id))
        with contextlib.closing(session.execute(query.execution_options(yield_per=BATCH))) as key_rows:
            for keys in key_rows.partitions(BATCH):
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
    """Raises:
    DamagedRowError: the row cannot be read.
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
