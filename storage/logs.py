"""Output and progress of running ranks: bounded parts of the output, and the last progress of each attempt."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from search_spaces.trial import LogLines, Progress
from storage.codec import clean
from storage.errors import UnknownTrialError
from storage.leases import fenced
from storage.log_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES, LogNews, LogRecord, ProgressRecord
from storage.records import ENDED, AttemptState, Lease
from storage.tables import AttemptRow, JobRow, LogRow, TrialRow, table_of

PART_CHARACTERS = 16_384
"""Longest text of a row. Output is left out in whole rows."""


def add_output(session: Session, now: datetime, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress]) -> None:
    """See `Store.add_output`.

    1. Check the fence, as in every write.
    2. Append the lines after the trial's last row, in bounded parts; each part stores how much its attempt printed before it.
    3. Remove rows between the attempt's head and its tail.
    """
    job = fenced(session, now, lease)
    for report in progress:
        values = {name: value for name, value in to_plain(report).items() if name != "attempt"}
        attempt = update(AttemptRow).where(AttemptRow.token == report.attempt, AttemptRow.job_id == job.id)
        session.execute(attempt.values(progress=values, progress_time=now))
    by_attempt: defaultdict[str, list[LogLines]] = defaultdict(list)
    for item in lines:
        by_attempt[item.attempt].append(item)
    for token, printed in by_attempt.items():
        job.stored_bytes += _add(session, now, _place(session, job.id, token), printed)


def logs(
    session: Session, job_id: str, trial_number: int, after: int, limit: int, attempt: int | None, rank: int | None
) -> list[LogRecord]:
    """See `Store.logs`."""
    query = select(*_COLUMNS).where(LogRow.job_id == job_id, LogRow.trial_number == trial_number, LogRow.sequence > after)
    if attempt is not None:
        query = query.where(LogRow.attempt == attempt)
    if rank is not None:
        query = query.where(LogRow.rank == rank)
    return [_record(row) for row in session.execute(query.order_by(LogRow.sequence).limit(limit))]


def log_news(session: Session, sequences: Mapping[tuple[str, int], int], limit: int) -> dict[tuple[str, int], LogNews]:
    """See `Store.log_news`."""
    trials = tuple_(TrialRow.job_id, TrialRow.number).in_(list(sequences))
    last = select(func.max(LogRow.sequence)).where(LogRow.job_id == TrialRow.job_id, LogRow.trial_number == TrialRow.number)
    over = or_(TrialRow.outcome.is_not(None), JobRow.state.in_(ENDED))
    query = select(TrialRow.job_id, TrialRow.number, over, last.scalar_subquery()).join(JobRow, JobRow.id == TrialRow.job_id)
    trial_news: dict[tuple[str, int], LogNews] = {}
    for job_id, number, is_over, newest in session.execute(query.where(trials)):
        after = sequences[job_id, number]
        parts = logs(session, job_id, number, after, limit, None, None) if (newest or 0) > after else []
        complete = not parts or parts[-1].sequence == newest
        trial_news[job_id, number] = LogNews(last=newest or 0, over=bool(is_over) and complete, parts=tuple(parts))
    return trial_news


def progress(session: Session, job_ids: Collection[str]) -> dict[str, list[ProgressRecord]]:
    """See `Store.progress`."""
    job_progress: dict[str, list[ProgressRecord]] = {job_id: [] for job_id in job_ids}
    columns = (AttemptRow.job_id, AttemptRow.trial_number, AttemptRow.number, AttemptRow.progress, AttemptRow.progress_time)
    runs = and_(AttemptRow.job_id.in_(job_ids), AttemptRow.state == AttemptState.RUNNING)
    query = select(*columns).where(runs, AttemptRow.progress_time.is_not(None)).order_by(AttemptRow.trial_number)
    for job_id, trial, number, values, time in session.execute(query):
        if (record := _progress_record(trial, number, time, values)) is not None:
            job_progress[job_id].append(record)
    return job_progress


def _progress_record(trial: int, attempt: int, time: datetime, values: Any) -> ProgressRecord | None:
    """The progress; None if it is damaged: the next report replaces it anyway."""
    try:
        return ProgressRecord(trial_number=trial, attempt=attempt, time=time, **values)
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class _LogPosition:
    """The position of the next part of an attempt's output."""

    key: dict[str, Any]
    """The columns that are equal in all of its rows."""
    last: int
    """Sequence of the trial's last row."""
    end: int
    """Bytes that the attempt has printed so far."""


def _place(session: Session, job_id: str, token: str) -> _LogPosition:
    query = select(AttemptRow.trial_number, AttemptRow.number).where(AttemptRow.token == token, AttemptRow.job_id == job_id)
    attempt = session.execute(query).one_or_none()
    if attempt is None:
        raise UnknownTrialError(f"job {job_id} has no attempt {token!r}; output is of attempts that were started")
    of_trial = and_(LogRow.job_id == job_id, LogRow.trial_number == attempt.trial_number)
    end = func.max(LogRow.start + LogRow.size).filter(LogRow.attempt == attempt.number)
    last, printed = session.execute(select(func.max(LogRow.sequence), end).where(of_trial)).one()
    key = {"job_id": job_id, "trial_number": attempt.trial_number, "attempt": attempt.number}
    return _LogPosition(key, last or 0, printed or 0)


def _add(session: Session, now: datetime, attempt: _LogPosition, printed: Sequence[LogLines]) -> int:
    """Write the output; return by how many bytes the stored output grows."""
    rows, end, more = [], attempt.end, 0
    for sequence, (rank, left_out, text) in enumerate(_parts(printed), attempt.last + 1):
        start, size = end + left_out, len(text.encode())
        part = {"sequence": sequence, "rank": rank, "time": now, "start": start, "size": size, "text": text}
        rows.append(attempt.key | part)
        end, more = start + size, more + size
    session.execute(insert(table_of(LogRow)), rows)
    if end > LOG_HEAD_BYTES + LOG_TAIL_BYTES:
        mine = and_(*(getattr(LogRow, name) == value for name, value in attempt.key.items()))
        middle = delete(LogRow).where(mine, LogRow.start >= LOG_HEAD_BYTES, LogRow.start < end - LOG_TAIL_BYTES)
        more -= sum(session.scalars(middle.returning(LogRow.size)))
    return more


def _parts(printed: Sequence[LogLines]) -> Iterator[tuple[int, int, str]]:
    """Yield rank, bytes left out before it, and text of each part."""
    for item in printed:
        text = clean(item.text)
        for begin in range(0, max(1, len(text)), PART_CHARACTERS):
            yield item.rank, 0 if begin else item.left_out, text[begin : begin + PART_CHARACTERS]


_COLUMNS = (LogRow.sequence, LogRow.attempt, LogRow.rank, LogRow.time, LogRow.start, LogRow.size, LogRow.text)


def _record(row: Any) -> LogRecord:
    return LogRecord(**row._mapping)
