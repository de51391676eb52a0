"""Rows as JSON Lines: one job to transfer to another database, or a whole database as a backup.

The first line describes the file; each further one is `{"table": …, "row": {column: value}}`, with tables in the order of their
foreign keys; the last one is `{"end": …}` with the number of rows, to detect truncated files. Times are ISO 8601 in UTC.
Only files of this version's schema are read.

A backup is trusted: it comes from the operator of the database. A job's file is not: only the rows of one job are read from it,
each must refer to that job, and owner, holder and charges are not taken from the file.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, TextIO

from sqlalchemy import JSON, BigInteger, Boolean, Column, Enum, Float, Integer, String, Table, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage import audit
from storage.audit import AuditStore
from storage.codec import clean, dump_json, load_json
from storage.database import StorePart, reads, writes
from storage.errors import TransferError
from storage.jobs import find_job
from storage.maintenance import damages
from storage.migrations import HEAD
from storage.records import HELD, ORIGIN
from storage.tables import (
    AttemptRow,
    AuditRow,
    Base,
    CalibrationRow,
    DeliveryRow,
    EventRow,
    JobRow,
    KeyRow,
    LogRow,
    PriorRow,
    QuotaRow,
    RankRow,
    SubmissionRow,
    TrialRow,
    UsageRow,
    UtcDateTime,
    WebhookRow,
    of_job,
    table_of,
)
from storage.trials import abandon

FORMAT = "autotune-rows"
VERSION = 1
REMEDY = "take a file as `autotune db export` wrote it"
BATCH = 500
OF_A_JOB: tuple[type[Base], ...] = (JobRow, PriorRow, TrialRow, AttemptRow, RankRow, LogRow, EventRow)
EVERYTHING: tuple[type[Base], ...] = (
    *OF_A_JOB,
    SubmissionRow,
    KeyRow,
    QuotaRow,
    WebhookRow,
    DeliveryRow,
    UsageRow,
    CalibrationRow,
    AuditRow,
)
LEFT_OUT = frozenset(("lease_host", "lease_pid", "lease_started", "lease_expires", "lease_seen", "summary", "stored_bytes"))
"""Columns that are not exported: the lease is only valid here, and summary and bytes are computed from other columns."""


class TransferStore(StorePart):
    """Files of rows."""

    def dump(self, sink: TextIO, job_id: str | None = None) -> int:
        """Write a job, or with None everything, as JSON Lines from one snapshot; return the count of rows.

        `sink` is truncated first; it must be seekable.

        Raises:
            UnknownJobError: the job does not exist.
        """
        count = self._dump(sink, job_id)
        AuditStore(self.access).record("db.backup" if job_id is None else "db.export", job_id or "", {"rows": count})
        return count

    @reads
    def _dump(self, session: Session, sink: TextIO, job_id: str | None) -> int:
        """May run twice: it truncates the file."""
        now = self.now(session)
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

    @writes
    def load_job(self, session: Session, now: datetime, source: TextIO, submitter: str = "") -> str:
        """Import a job's file that `dump` wrote, atomically; return the job's id.

        The job then belongs to `submitter`, and is PAUSED if it had not ended.

        1. The first row is the job's. It has no holder here, and the importing user sets its owner.
        2. Every other row must belong to the job, or to one of its attempts in the file.
        3. Check that all rows can be read as values, and that the counters exceed the numbers in use.

        The transaction may run twice: it reads the file from the beginning.

        Raises:
            TransferError: the file is invalid, truncated or of another version, or has rows that exist here or of another job.
        """
        rows = _rows_of(source, "job")
        job_id: str | None = None
        attempts: set[str] = set()
        for table, batch in _batches(rows, OF_A_JOB, "a job's file"):
            for number, row in batch:
                if job_id is None:
                    job_id = _owned_here(number, table, row, submitter)
                elif table is table_of(JobRow):
                    raise TransferError(f"line {number}: is a second job; import each job from a file of its own")
                elif not (row["attempt"] in attempts if table is table_of(RankRow) else row["job_id"] == job_id):
                    raise TransferError(f"line {number}: {table.name} of another job; {REMEDY}")
                if table is table_of(AttemptRow):
                    attempts.add(row["token"])
            _insert(session, table, [row for _, row in batch])
        if job_id is None:
            raise TransferError(f"the file has no job; {REMEDY}")
        _require_whole(session, job_id)
        _count_bytes(session, [job_id])
        _settle(session, now, job_id)
        audit.record(session, now, self.actor, "db.import", job_id, {"owner": submitter})
        return job_id

    @writes
    def load(self, session: Session, now: datetime, source: TextIO) -> list[str]:
        """Restore a backup that `dump` wrote, atomically; return the ids of the jobs.

        Jobs that were running continue as after a crash of their processes. The transaction may run twice: it reads the file
        from the beginning.

        Raises:
            TransferError: the file is invalid, truncated or of another version, or the database has jobs already.
        """
        rows = _rows_of(source, "database")
        if session.scalar(select(func.count()).select_from(JobRow)):
            raise TransferError("the database has jobs already; restore a backup into a new one, named with --db")
        jobs: list[str] = []
        for table, batch in _batches(rows, EVERYTHING, "a backup"):
            _insert(session, table, [row for _, row in batch])
            jobs += [row["id"] for _, row in batch if table is table_of(JobRow)]
        _count_bytes(session, jobs)
        audit.record(session, now, self.actor, "db.restore", " ".join(jobs), {"jobs": len(jobs)})
        return jobs


def _rows(session: Session, table: Table, job: str | None) -> Iterator[dict[str, Any]]:
    columns = [column for column in table.columns if column.name not in LEFT_OUT]
    query = select(*columns).order_by(*table.primary_key)
    if job is not None:
        query = query.where(of_job(table, job))
    for row in session.execute(query.execution_options(yield_per=BATCH)):
        yield {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row._mapping.items()}


_Numbered = tuple[int, dict[str, Any]]
"""A row and its line in the file."""


def _rows_of(source: TextIO, kind: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield line number, table and row of each line of a file of this kind."""
    source.seek(0)
    lines = enumerate(source, 1)
    head = _json(next(lines, (1, ""))[1], 1)
    if head.get("format") != FORMAT:
        raise TransferError("line 1: is not the head of a file of autotune's rows; make one with `autotune db export`")
    if (head.get("version"), head.get("schema")) != (VERSION, HEAD):
        problem = f"line 1: was written by another version of autotune (schema {head.get('schema')}, this one reads {HEAD})"
        raise TransferError(f"{problem}; read it with that version, and open its database with this one")
    if head.get("kind") != kind:
        commands = {"job": "`autotune db import`", "database": "`autotune db restore`"}
        if head.get("kind") not in commands:
            raise TransferError(f"line 1: kind {head.get('kind')!r} is not known; it is job or database")
        raise TransferError(f"line 1: is the file of a {head['kind']}, not of a {kind}; read it with {commands[head['kind']]}")
    return _parsed(lines)


def _parsed(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield line number, table and row of each line up to the end line, which must exist."""
    count = 0
    for number, line in lines:
        item = _json(line, number)
        if "end" in item:
            if item["end"] != count:
                raise TransferError(f"line {number}: {count} rows were read, and {item['end']} were written; take a whole file")
            return
        if not isinstance(item.get("row"), dict):
            raise TransferError(f"line {number}: is not a row; {REMEDY}")
        count += 1
        yield number, str(item.get("table")), item["row"]
    raise TransferError(f"the file ends after {count} rows, before its last line; take a whole file")


def _batches(
    rows: Iterator[tuple[int, str, dict[str, Any]]], models: tuple[type[Base], ...], of: str
) -> Iterator[tuple[Table, list[_Numbered]]]:
    """Yield batches of at most `BATCH` rows, table by table, with values converted for their columns."""
    tables = {table_of(model).name: table_of(model) for model in models}
    every = {table_of(model).name for model in EVERYTHING}
    for name, batch in itertools.groupby(rows, key=lambda item: item[1]):
        while chunk := list(itertools.islice(batch, BATCH)):
            if name in every and name not in tables:
                raise TransferError(f"line {chunk[0][0]}: rows of {name} do not belong in {of}; leave them out")
            if name not in tables:
                raise TransferError(f"line {chunk[0][0]}: table {name!r} is not known; {REMEDY}")
            yield tables[name], [(number, _checked(tables[name], number, row)) for number, _, row in chunk]


def _checked(table: Table, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with each value converted to its column's kind."""
    columns = {column.name: column for column in table.columns if column.name not in LEFT_OUT}
    if unknown := row.keys() - columns.keys():
        raise TransferError(f"line {number}: {table.name}: has no column {min(unknown)!r}; {REMEDY}")
    values = {}
    for name, value in row.items():
        try:
            values[name] = _value(columns[name], value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TransferError(f"line {number}: {table.name}.{name}: {error}; {REMEDY}") from error
    needed = (c.name for c in columns.values() if not c.nullable and c.server_default is None and c.name not in values)
    if missing := next(needed, None):
        raise TransferError(f"line {number}: {table.name}: lacks {missing!r}; {REMEDY}")
    return values


def _value(column: Column[Any], value: Any) -> Any:
    """Convert a value for the database.

    Raises:
        TypeError, ValueError: it is not of the column's kind.
    """
    kind = column.type
    if value is None:
        if not column.nullable:
            raise TypeError("is missing")
        return None
    if isinstance(kind, UtcDateTime):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError("is a time without a zone")
        return moment
    if isinstance(kind, Enum):
        return kind.python_type(value)
    if isinstance(kind, JSON):
        return _clean(value)
    expected = next(word for base, word in _KINDS.items() if isinstance(kind, base))
    if type(value) not in expected[1]:
        raise TypeError(f"is not {expected[0]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is not a finite number")
    if isinstance(kind, Integer) and not -(2**63) <= value < 2 ** (63 if isinstance(kind, BigInteger) else 31):
        raise ValueError("is out of range")
    if isinstance(value, str) and (len(value) > (getattr(kind, "length", None) or len(value)) or value != clean(value)):
        raise ValueError("is longer than its column, or has invalid characters")
    return value


def _clean(value: Any) -> Any:
    """Return the JSON value with texts that both databases accept."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): _clean(item) for name, item in value.items()}
    return value


_KINDS: dict[type[Any], tuple[str, tuple[type[Any], ...]]] = {
    Boolean: ("true or false", (bool,)),
    Integer: ("a whole number", (int,)),
    Float: ("a number", (int, float)),
    String: ("a text", (str,)),
}
"""Kind of a column -> name and types of its values."""


def _owned_here(number: int, table: Table, row: dict[str, Any], submitter: str) -> str:
    """Make the file's job a job of this database; return its id."""
    if table is not table_of(JobRow):
        raise TransferError(f"line {number}: is a row of {table.name} before the job's; {REMEDY}")
    if not re.fullmatch(r"[0-9]{8}-[0-9]{6}-[a-z0-9]{4}", row["id"]):
        raise TransferError(f"line {number}: jobs.id: is not a job's id; {REMEDY}")
    if row["active_seconds"] < 0 or row.get("devices", 1) < 1:
        raise TransferError(f"line {number}: jobs: a job cannot have negative seconds or no devices; {REMEDY}")
    if isinstance(row["request"], dict):
        row["request"][ORIGIN] = "file"
    # Its past use is not charged here, and no former holder can have its lease.
    row |= {"submitter": submitter, "priority": 0, "lease_token": 0, "queued": None, "charged_seconds": row["active_seconds"]}
    return str(row["id"])


def _insert(session: Session, table: Table, rows: list[dict[str, Any]]) -> None:
    """Write rows of one table."""
    if table is table_of(CalibrationRow):  # existing ones are equal: calibrations never change
        existing = set(session.scalars(select(CalibrationRow.id).where(CalibrationRow.id.in_([row["id"] for row in rows]))))
        rows = [row for row in rows if row["id"] not in existing]
    for row in rows if table is table_of(JobRow) else ():
        if session.get(JobRow, row["id"]) is not None:
            problem = f"job {row['id']} is in this database already"
            raise TransferError(f"{problem}; remove it with `autotune clean {row['id']} --yes`, or name another one with --db")
    try:
        # Group rows by their columns: a statement uses the columns of its first row for all.
        for _, alike in itertools.groupby(rows, key=lambda row: sorted(row)):
            session.execute(insert(table), list(alike))
    except IntegrityError as error:
        problem = f"{table.name}: a row refers to a missing row, or exists already"
        raise TransferError(f"{problem}; {REMEDY}") from error


def _require_whole(session: Session, job_id: str) -> None:
    """Check that the counters exceed all numbers of trials and events, and that every row can be read as a value."""
    job = session.get_one(JobRow, job_id)
    trial = session.scalar(select(func.max(TrialRow.number)).where(TrialRow.job_id == job_id))
    event = session.scalar(select(func.max(EventRow.sequence)).where(EventRow.job_id == job_id))
    if (trial is not None and trial >= job.trial_count) or (event or 0) > job.event_count:
        raise TransferError(f"job {job_id}: has more trials or events than it counts; {REMEDY}")
    if (session.scalar(select(func.min(LogRow.size)).where(LogRow.job_id == job_id)) or 0) < 0:
        raise TransferError(f"job {job_id}: has output with a negative size; {REMEDY}")
    if damage := next(iter(damages(session, job_id)), None):
        raise TransferError(f"{damage.place}: {damage.problem}; {REMEDY}")


def _count_bytes(session: Session, job_ids: list[str]) -> None:
    """Set the stored bytes of each job, which count for its owner's quota: its request and the output of its ranks."""
    session.flush()
    for job_id in job_ids:
        request = session.scalar(select(JobRow.request).where(JobRow.id == job_id))
        printed = session.scalar(select(func.sum(LogRow.size)).where(LogRow.job_id == job_id)) or 0
        size = len(dump_json(request)) + int(printed)
        session.execute(update(JobRow).where(JobRow.id == job_id).values(stored_bytes=size))


def _settle(session: Session, now: datetime, job_id: str) -> None:
    """Pause a job that had not ended: workers must not start an imported job without a user's request."""
    job = session.get_one(JobRow, job_id)
    if job.state in (*HELD, JobState.QUEUED):
        abandon(session, now, job)
        job.state, job.reason, job.message = JobState.PAUSED, "imported", "was not finished where it was exported"


def _json(line: str, number: int) -> dict[str, Any]:
    try:
        item = load_json(line)
    except (ValueError, RecursionError) as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deep, or has too long a number"
        raise TransferError(f"line {number}: is not JSON ({detail}); {REMEDY}") from error
    if not isinstance(item, dict):
        raise TransferError(f"line {number}: is not a JSON object; {REMEDY}")
    return item
