"""Rows as JSON Lines: one job to be taken to another database, or a whole database as a backup.

The first line says what the file is; each further one is `{"table": …, "row": {column: value}}`, tables in the order of their
foreign keys; the last one is `{"end": …}` with the number of rows, so that a file that was cut off is known. Times are ISO 8601
in UTC. Columns that a later version adds are filled with their defaults when an older file is read.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TextIO

from sqlalchemy import Table, func, insert, select
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage.attempts import abandon
from storage.codec import dump_json, load_json
from storage.errors import TransferError
from storage.jobs import find_job
from storage.migrations import HEAD
from storage.records import HELD
from storage.tables import (
    AttemptRow,
    Base,
    CalibrationRow,
    DeliveryRow,
    EventRow,
    JobRow,
    KeyRow,
    LogRow,
    PriorRow,
    RankRow,
    SubmissionRow,
    TrialRow,
    UsageRow,
    UtcDateTime,
    WebhookRow,
    table_of,
)

FORMAT = "autotune-rows"
VERSION = 1
BATCH = 500
OF_A_JOB: tuple[type[Base], ...] = (JobRow, PriorRow, TrialRow, AttemptRow, RankRow, LogRow, EventRow)
EVERYTHING: tuple[type[Base], ...] = (*OF_A_JOB, SubmissionRow, KeyRow, WebhookRow, DeliveryRow, UsageRow, CalibrationRow)
LEFT_OUT = frozenset(("lease_host", "lease_pid", "lease_started", "lease_expires", "lease_seen", "summary"))
"""Who holds a job is nothing that a file can keep, and its summary is made of its request."""


def dump(session: Session, now: datetime, sink: TextIO, job_id: str | None) -> int:
    """See `Store.dump`. May run twice: it begins the file anew."""
    sink.seek(0)
    sink.truncate()
    kind = "database" if job_id is None else "job"
    head = {"format": FORMAT, "version": VERSION, "kind": kind, "schema": HEAD, "written": now.isoformat()}
    sink.write(dump_json(head) + "\n")
    job = None if job_id is None else find_job(session, job_id).id
    count = 0
    for model in EVERYTHING if job is None else OF_A_JOB:
        for row in _rows(session, table_of(model), job):
            sink.write(dump_json({"table": table_of(model).name, "row": row}) + "\n")
            count += 1
    sink.write(dump_json({"end": count}) + "\n")
    return count


def load(session: Session, now: datetime, source: TextIO) -> list[str]:
    """See `Store.load`. May run twice: it reads from the beginning."""
    source.seek(0)
    lines = enumerate(source, 1)
    head = _head(next(lines, (1, ""))[1])
    if head["kind"] == "database" and session.scalar(select(func.count()).select_from(JobRow)):
        raise TransferError("the database has jobs already; restore a backup into a new one, named with --db")
    jobs: list[str] = []
    rows = _parsed(lines)
    for name, batch in itertools.groupby(rows, key=lambda item: item[0]):
        table = _known_table(name)
        while chunk := [row for _, row in itertools.islice(batch, BATCH)]:
            jobs += _insert(session, table, chunk)
    if head["kind"] == "job":
        _settle(session, now, jobs)
    return jobs


def _rows(session: Session, table: Table, job: str | None) -> Iterator[dict[str, Any]]:
    columns = [column for column in table.columns if column.name not in LEFT_OUT]
    query = select(*columns).order_by(*table.primary_key)
    if job is not None:
        query = query.where(_belongs(table, job))
    for row in session.execute(query.execution_options(yield_per=BATCH)):
        yield {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row._mapping.items()}


def _belongs(table: Table, job: str) -> Any:
    if table is table_of(RankRow):
        return table.c.attempt.in_(select(AttemptRow.token).where(AttemptRow.job_id == job))
    return (table.c.id if table is table_of(JobRow) else table.c.job_id) == job


def _head(line: str) -> Mapping[str, Any]:
    head = _json(line, 1)
    if head.get("format") != FORMAT:
        raise TransferError("line 1: is not the head of a file of autotune's rows; make one with `autotune db export`")
    if head.get("version") != VERSION or str(head.get("schema")) > HEAD:
        problem = f"line 1: was written by a newer version of autotune (schema {head.get('schema')}, this one knows {HEAD})"
        raise TransferError(f"{problem}; upgrade autotune")
    if head.get("kind") not in ("job", "database"):
        raise TransferError(f"line 1: kind {head.get('kind')!r} is not known; it is job or database")
    return head


def _parsed(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(table, row) of each line up to the end, which must be there."""
    count = 0
    for number, line in lines:
        item = _json(line, number)
        if "end" in item:
            if item["end"] != count:
                raise TransferError(f"line {number}: {count} rows were read, and {item['end']} were written; take a whole file")
            return
        if not isinstance(item.get("row"), dict):
            raise TransferError(f"line {number}: is no row; take a file as `autotune db export` wrote it")
        count += 1
        yield str(item.get("table")), item["row"]
    raise TransferError(f"the file ends after {count} rows, before its last line; take a whole file")


def _insert(session: Session, table: Table, rows: list[dict[str, Any]]) -> list[str]:
    """Write rows of one table; return the jobs among them."""
    for row in rows:
        if unknown := row.keys() - {column.name for column in table.columns}:
            raise TransferError(f"{table.name}: has no column {min(unknown)!r}; upgrade autotune")
    if table is table_of(CalibrationRow):  # those that are here already are the same: calibrations are never changed
        there = set(session.scalars(select(CalibrationRow.id).where(CalibrationRow.id.in_([row["id"] for row in rows]))))
        rows = [row for row in rows if row["id"] not in there]
        if not rows:
            return []
    decoded = [{name: _value(table, name, value) for name, value in row.items()} for row in rows]
    ids = [str(row["id"]) for row in rows] if table is table_of(JobRow) else []
    for job_id in ids:
        if session.get(JobRow, job_id) is not None:
            problem = f"job {job_id} is in this database already"
            raise TransferError(f"{problem}; remove it with `autotune clean {job_id} --yes`, or name another one with --db")
    session.execute(insert(table), decoded)
    return ids


def _settle(session: Session, now: datetime, jobs: list[str]) -> None:
    """A job that was running elsewhere waits here for a person: nobody's worker begins it without being asked."""
    for job_id in jobs:
        job = session.get_one(JobRow, job_id)
        job.queued = None
        if job.state in (*HELD, JobState.QUEUED):
            abandon(session, now, job)
            job.state, job.reason, job.message = JobState.PAUSED, "imported", "was not finished where it was exported"


def _value(table: Table, name: str, value: Any) -> Any:
    if isinstance(table.c[name].type, UtcDateTime) and value is not None:
        return datetime.fromisoformat(value)
    return value


def _known_table(name: str) -> Table:
    known = {table_of(model).name: table_of(model) for model in EVERYTHING}
    if name not in known:
        raise TransferError(f"table {name!r} is not known to this version; upgrade autotune")
    return known[name]


def _json(line: str, number: int) -> dict[str, Any]:
    try:
        item = load_json(line)
    except json.JSONDecodeError as error:
        raise TransferError(
            f"line {number}: is not JSON ({error.msg}); take a file as `autotune db export` wrote it"
        ) from error
    if not isinstance(item, dict):
        raise TransferError(f"line {number}: is no JSON object; take a file as `autotune db export` wrote it")
    return item
