"""Counts of jobs and trials for lists and for monitoring: counted by the database, without reading trials."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState, Purpose
from storage.database import StorePart, reads
from storage.records import HELD, BestRate, DurationHistogram, Figures, TrialCounts
from storage.tables import JobRow, TrialRow


class OverviewStore(StorePart):
    """Counts of jobs and trials."""

    @reads
    def of(self, session: Session, job_ids: Collection[str]) -> dict[str, TrialCounts]:
        """Return the progress of these jobs."""
        ran = and_(TrialRow.purpose == Purpose.SEARCH, TrialRow.started.is_not(None))
        # A trial without an outcome has no start time; it runs if it has an attempt.
        running = case((and_(TrialRow.outcome.is_(None), TrialRow.attempt_count > 0), 1), else_=0)
        counts = [func.sum(case((TrialRow.purpose == purpose, 1), else_=0)) for purpose in (Purpose.CONTROL, Purpose.CONFIRM)]
        query = select(
            TrialRow.job_id, TrialRow.outcome, func.count(), func.sum(case((ran, 1), else_=0)), func.sum(running), *counts
        )
        job_rows: dict[str, list[Any]] = {job_id: [] for job_id in job_ids}
        for row in session.execute(query.where(TrialRow.job_id.in_(job_ids)).group_by(TrialRow.job_id, TrialRow.outcome)):
            job_rows[row[0]].append(row)
        return {job_id: _overview(rows) for job_id, rows in job_rows.items()}

    def figures(self) -> Figures:
        """Return counts over all jobs. Does not wait for an unavailable database."""
        return self.database.read_now(self._figures)

    def _figures(self, session: Session) -> Figures:
        now = self.now(session)
        jobs = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        ended = select(TrialRow.outcome, func.count()).where(TrialRow.outcome.is_not(None)).group_by(TrialRow.outcome)
        trials = session.execute(ended).all()
        waits = select(func.min(JobRow.queued)).where(JobRow.state == JobState.QUEUED)
        first = session.scalar(waits)
        return Figures(
            jobs={str(state): count for state, count in jobs},
            trials={str(outcome): count for outcome, count in trials},
            longest_wait=max(0.0, (now - first).total_seconds()) if first is not None else 0.0,
            durations=_durations(session),
            best=_best(session),
        )


def _overview(rows: list[Any]) -> TrialCounts:
    ended = [row for row in rows if row[1] is not None]
    return TrialCounts(
        outcomes={str(outcome): count for _, outcome, count, *_ in ended},
        searched=sum(int(row[3]) for row in rows),
        running=sum(int(row[4]) for row in rows),
        controls=sum(int(row[5]) for row in ended),
        confirmations=sum(int(row[6]) for row in ended),
    )


def _durations(session: Session) -> Mapping[str, DurationHistogram]:
    seconds = _seconds(session)
    # Upper bounds of the histogram of durations, in seconds.
    steps = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
    within = [func.sum(case((seconds <= step, 1), else_=0)) for step in steps]
    query = select(TrialRow.outcome, func.count(), func.sum(seconds), *within).where(TrialRow.started.is_not(None))
    return {
        str(outcome): DurationHistogram(count=count, seconds=float(total), within=dict(zip(steps, counts, strict=True)))
        for outcome, count, total, *counts in session.execute(query.group_by(TrialRow.outcome))
        if outcome is not None
    }


def _seconds(session: Session) -> Any:
    """SQL for the seconds from start to end of a trial, for each kind of database."""
    if session.get_bind().dialect.name == "sqlite":
        return (func.julianday(TrialRow.finished) - func.julianday(TrialRow.started)) * 86400.0
    return func.extract("epoch", TrialRow.finished - TrialRow.started)


def _best(session: Session) -> Mapping[str, BestRate]:
    query = select(JobRow.id, JobRow.submitter, JobRow.answer).where(JobRow.state.in_(HELD))
    return {
        job_id: BestRate(submitter=submitter, samples_per_second=rate)
        for job_id, submitter, answer in session.execute(query)
        if (rate := _rate(answer)) is not None
    }


def _rate(answer: Any) -> float | None:
    """The rate of a job's answer; None: there is none, or it cannot be read."""
    try:
        return float(answer["rate"]["mean"])
    except (TypeError, ValueError, LookupError):
        return None
