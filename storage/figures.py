"""Counts over all jobs, for who watches the service."""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import JobState
from storage.records import Figures
from storage.tables import JobRow, TrialRow


def figures(session: Session, now: datetime) -> Figures:
    """See `Store.figures`."""
    jobs = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
    ended = select(TrialRow.outcome, func.count()).where(TrialRow.outcome.is_not(None)).group_by(TrialRow.outcome)
    trials = session.execute(ended).all()
    waits = select(func.min(JobRow.queued)).where(JobRow.state == JobState.QUEUED)
    first = session.scalar(waits)
    return Figures(
        jobs={str(state): count for state, count in jobs},
        trials={str(outcome): count for outcome, count in trials},
        longest_wait=max(0.0, (now - first).total_seconds()) if first is not None else 0.0,
    )
