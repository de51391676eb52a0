"""How far jobs are, for lists of many: counted by the database, no trial is read."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.orm import Session

from search_spaces.outcome import Outcome, Purpose
from storage.records import Overview
from storage.tables import TrialRow


def overviews(session: Session, capacities: Mapping[str, float | None]) -> dict[str, Overview]:
    """See `Store.overviews`."""
    mine = TrialRow.job_id.in_(capacities)
    ran = and_(TrialRow.purpose == Purpose.SEARCH, TrialRow.started.is_not(None))
    rate = case((_may_win(capacities), TrialRow.samples_per_second_mean))
    # What has no outcome has no start either: an attempt tells that it runs.
    running = case((and_(TrialRow.outcome.is_(None), TrialRow.attempt_count > 0), 1), else_=0)
    query = select(
        TrialRow.job_id, TrialRow.outcome, func.count(), func.sum(case((ran, 1), else_=0)), func.sum(running), func.max(rate)
    )
    found: dict[str, list[Any]] = {job_id: [] for job_id in capacities}
    for row in session.execute(query.where(mine).group_by(TrialRow.job_id, TrialRow.outcome)):
        found[row[0]].append(row)
    first = select(TrialRow.job_id, TrialRow.samples_per_second_mean).where(mine, TrialRow.number == 0)
    baselines = {row[0]: row[1] for row in session.execute(first.where(TrialRow.outcome == Outcome.OK))}
    return {job_id: _overview(rows, baselines.get(job_id)) for job_id, rows in found.items()}


def _may_win(capacities: Mapping[str, float | None]) -> ColumnElement[bool]:
    measured = and_(TrialRow.outcome == Outcome.OK, TrialRow.purpose == Purpose.SEARCH)
    known = {job_id: capacity for job_id, capacity in capacities.items() if capacity is not None}
    if not known:
        return measured
    capacity = case(known, value=TrialRow.job_id)
    return and_(measured, or_(capacity.is_(None), TrialRow.peak_memory_bytes <= capacity))


def _overview(rows: list[Any], baseline: float | None) -> Overview:
    rates = [rate for *_, rate in rows if rate is not None]
    return Overview(
        outcomes={str(outcome): count for _, outcome, count, *_ in rows if outcome is not None},
        searched=sum(int(ran) for _, _, _, ran, _, _ in rows),
        running=sum(int(running) for _, _, _, _, running, _ in rows),
        best_rate=max(rates, default=None),
        baseline_rate=baseline,
    )
