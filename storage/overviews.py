"""The progress of jobs, for lists of many: counted by the database, without reading trials."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import Purpose
from storage.records import Overview
from storage.tables import TrialRow


def overviews(session: Session, job_ids: Collection[str]) -> dict[str, Overview]:
    """See `Store.overviews`."""
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


def _overview(rows: list[Any]) -> Overview:
    ended = [row for row in rows if row[1] is not None]
    return Overview(
        outcomes={str(outcome): count for _, outcome, count, *_ in ended},
        searched=sum(int(row[3]) for row in rows),
        running=sum(int(row[4]) for row in rows),
        controls=sum(int(row[5]) for row in ended),
        confirmations=sum(int(row[6]) for row in ended),
    )
