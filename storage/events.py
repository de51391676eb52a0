"""What a job reports: numbered events, bounded parts of the output of its ranks, and the last progress of each attempt.

Events are numbered without gaps, and written in the transaction of the change that they report.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from search_spaces.shared_records import LOG_HEAD_BYTES, LOG_TAIL_BYTES, AttemptProgress, JobEvent, JobNews, LogNews, LogPart
from search_spaces.trial import LogLines, Progress
from storage.codec import clean, event_record
from storage.database import StorePart, reads, writes
from storage.errors import UnknownTrialError
from storage.leases import fenced
from storage.records import ENDED, AttemptState, Lease
from storage.tables import AttemptRow, EventRow, JobRow, LogRow, TrialRow, table_of


def append_event(session: Session, now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """Add an event to a job whose row is locked by this transaction; the job's counter gives the sequence number."""
    event = new_row(now, job, kind, payload)
    session.add(event)
    return event


def new_row(now: datetime, job: JobRow, kind: str, payload: Mapping[str, Any]) -> EventRow:
    """Return the event's row and count it. The caller adds it, after the job's row exists."""
    job.event_count += 1
    job.updated = now
    return EventRow(job_id=job.id, sequence=job.event_count, time=now, kind=clean(str(kind)), payload=to_plain(payload))


class EventStore(StorePart):
    """The events of jobs."""

    _COLUMNS = (EventRow.job_id, EventRow.sequence, EventRow.time, EventRow.kind, EventRow.payload)
    """Selecting columns is cheaper than creating a mapped object for each event."""

    @writes
    def add(self, session: Session, now: datetime, lease: Lease, kind: str, payload: Mapping[str, Any]) -> JobEvent:
        """Add an event that no other method writes."""
        return event_record(append_event(session, now, fenced(session, now, lease), kind, payload))

    @reads
    def of(self, session: Session, job_id: str, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Return events of a job with a sequence above `after`, in order."""
        query = select(*self._COLUMNS).where(EventRow.job_id == job_id, EventRow.sequence > after)
        return [event_record(row) for row in session.execute(query.order_by(EventRow.sequence).limit(limit))]

    @reads
    def news(self, session: Session, sequences: Mapping[str, int], limit: int = 1000) -> dict[str, JobNews]:
        """Return the news of the existing jobs. `sequences`: job -> sequence of its last known event.

        All news are from one moment, with at most `limit` events for each job.
        """
        rows: list[Any] = []
        for job_ids in _batches([*sequences]):
            rows += session.execute(select(JobRow.id, JobRow.state, JobRow.event_count).where(JobRow.id.in_(job_ids)))
        job_events: dict[str, list[JobEvent]] = {row.id: [] for row in rows}
        for job_ids in _batches([row.id for row in rows if row.event_count > sequences[row.id]]):
            parts = [
                and_(
                    EventRow.job_id == job_id,
                    EventRow.sequence > sequences[job_id],
                    EventRow.sequence <= sequences[job_id] + limit,
                )
                for job_id in job_ids
            ]
            for row in session.execute(select(*self._COLUMNS).where(or_(*parts)).order_by(EventRow.job_id, EventRow.sequence)):
                job_events[row.job_id].append(event_record(row))
        return {row.id: JobNews(state=row.state, version=row.event_count, events=tuple(job_events[row.id])) for row in rows}


def _batches(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split the ids: SQLite refuses a thousand conditions in one statement ("expression tree is too large")."""
    # Most jobs in one statement.
    jobs_at_once = 200
    return (job_ids[first : first + jobs_at_once] for first in range(0, len(job_ids), jobs_at_once))


class LogStore(StorePart):
    """Output and progress of running ranks."""

    @writes
    def add(
        self, session: Session, now: datetime, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress] = ()
    ) -> None:
        """Store output and progress of ranks in one transaction: callers collect it for some tenths of a second.

        The first LOG_HEAD_BYTES and the last LOG_TAIL_BYTES of each attempt are kept, to the precision of a part;
        `LogPart.start` shows what is missing in between. The output of former attempts is kept too.

        Raises:
            UnknownTrialError: the job has no such attempt.

        1. Check the fence, as in every write.
        2. Append the lines after the trial's last row, in bounded parts; each stores how much its attempt printed before it.
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

    @reads
    def of(
        self,
        session: Session,
        job_id: str,
        trial_number: int,
        after: int = 0,
        limit: int = 1000,
        attempt: int | None = None,
        rank: int | None = None,
    ) -> list[LogPart]:
        """Return the output of a trial's ranks after the part `after`, in order; of one attempt or rank, or of all."""
        return _parts_of(session, job_id, trial_number, after, limit, attempt, rank)

    @reads
    def news(
        self, session: Session, sequences: Mapping[tuple[str, int], int], limit: int = 1000
    ) -> dict[tuple[str, int], LogNews]:
        """Return new output of trials. `sequences`: (job, trial) -> sequence of the last known part. Omits unknown trials."""
        trials = tuple_(TrialRow.job_id, TrialRow.number).in_(list(sequences))
        last = select(func.max(LogRow.sequence)).where(LogRow.job_id == TrialRow.job_id, LogRow.trial_number == TrialRow.number)
        over = or_(TrialRow.outcome.is_not(None), JobRow.state.in_(ENDED))
        query = select(TrialRow.job_id, TrialRow.number, over, last.scalar_subquery()).join(
            JobRow, JobRow.id == TrialRow.job_id
        )
        trial_news: dict[tuple[str, int], LogNews] = {}
        for job_id, number, is_over, newest in session.execute(query.where(trials)):
            after = sequences[job_id, number]
            parts = _parts_of(session, job_id, number, after, limit) if (newest or 0) > after else []
            complete = not parts or parts[-1].sequence == newest
            trial_news[job_id, number] = LogNews(last=newest or 0, over=bool(is_over) and complete, parts=tuple(parts))
        return trial_news

    @reads
    def progress(self, session: Session, job_ids: Collection[str]) -> dict[str, list[AttemptProgress]]:
        """Return the last progress of each running attempt of these jobs, by trial."""
        job_progress: dict[str, list[AttemptProgress]] = {job_id: [] for job_id in job_ids}
        columns = (AttemptRow.job_id, AttemptRow.trial_number, AttemptRow.number, AttemptRow.progress, AttemptRow.progress_time)
        runs = and_(AttemptRow.job_id.in_(job_ids), AttemptRow.state == AttemptState.RUNNING)
        query = select(*columns).where(runs, AttemptRow.progress_time.is_not(None)).order_by(AttemptRow.trial_number)
        for job_id, trial, number, values, time in session.execute(query):
            if (record := _progress_record(trial, number, time, values)) is not None:
                job_progress[job_id].append(record)
        return job_progress


def _parts_of(
    session: Session,
    job_id: str,
    trial_number: int,
    after: int,
    limit: int,
    attempt: int | None = None,
    rank: int | None = None,
) -> list[LogPart]:
    query = select(LogRow.sequence, LogRow.attempt, LogRow.rank, LogRow.time, LogRow.start, LogRow.size, LogRow.text).where(
        LogRow.job_id == job_id, LogRow.trial_number == trial_number, LogRow.sequence > after
    )
    if attempt is not None:
        query = query.where(LogRow.attempt == attempt)
    if rank is not None:
        query = query.where(LogRow.rank == rank)
    return [LogPart(**row._mapping) for row in session.execute(query.order_by(LogRow.sequence).limit(limit))]


def _progress_record(trial: int, attempt: int, time: datetime, values: Any) -> AttemptProgress | None:
    """The progress; None if it is damaged: the next report replaces it anyway."""
    try:
        rate = values["samples_per_second"]
        finite_rate = float(rate) if rate is not None and math.isfinite(rate) else None
        return AttemptProgress(trial=trial, attempt=attempt, time=time, **{**values, "samples_per_second": finite_rate})
    except (TypeError, LookupError):
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
    # Longest text of a row. Output is left out in whole rows.
    part_characters = 16_384
    for item in printed:
        text = clean(item.text)
        for begin in range(0, max(1, len(text)), part_characters):
            yield item.rank, 0 if begin else item.left_out, text[begin : begin + part_characters]
