"""Trials: the planned and finished measurements of a job."""

import contextlib
from datetime import datetime
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from search_spaces.outcome import Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.codec import plain_trial, slim_record, trial_record
from storage.events import append_event
from storage.leases import fenced
from storage.records import AttemptState, EventKind, Lease, TrialRecord
from storage.tables import AttemptRow, JobRow, TrialRow, readable

PART = 1000
"""Rows per fetch."""


def add_trial(
    session: Session,
    now: datetime,
    lease: Lease,
    config: TrialConfig,
    purpose: Purpose,
    fidelity: str,
    repeat: int,
    refusal: TrialResult | None,
) -> TrialRecord:
    """See `Store.add_trial`."""
    job = fenced(session, now, lease)
    same = (TrialRow.config_hash == config.hash, TrialRow.purpose == purpose, TrialRow.repeat == repeat)
    trial = session.scalars(select(TrialRow).where(TrialRow.job_id == job.id, TrialRow.fidelity == fidelity, *same)).first()
    if trial is None:
        trial = _new_trial(now, job, config, purpose, fidelity, repeat)
        session.add(trial)
        if refusal is None:
            append_event(
                session, now, job, EventKind.TRIAL_ADDED, {"trial": trial.number, "config": config, "purpose": purpose}
            )
    if refusal is not None and trial.outcome is None and trial.attempt_count == 0:
        _refuse(session, now, job, trial, refusal)
    if trial.outcome is None or trial.refusal is not None:
        return trial_record(trial, None)  # it has no accepted attempt
    of_trial = (AttemptRow.job_id == trial.job_id, AttemptRow.trial_number == trial.number)
    return trial_record(trial, session.scalars(select(AttemptRow.result).where(*of_trial, _IS_ACCEPTED)).first())


def trials(session: Session, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
    """See `Store.trials`; those with a number of at least `first`, at most `limit`."""
    query = select(TrialRow, AttemptRow.result).outerjoin(AttemptRow, _ACCEPTED)
    mine = query.where(TrialRow.job_id == job_id, TrialRow.number >= first).order_by(TrialRow.number).limit(limit)
    return [trial_record(trial, result) for trial, result in session.execute(mine)]


def plain_trials(session: Session, job_id: str, first: int, limit: int) -> list[dict[str, Any]]:
    """See `Store.plain_trials`."""
    query = select(*TrialRow.__table__.columns, AttemptRow.result).outerjoin(AttemptRow, _ACCEPTED)
    mine = query.where(TrialRow.job_id == job_id, TrialRow.number >= first).order_by(TrialRow.number).limit(limit)
    return [plain_trial(row) for row in session.execute(mine)]


def figures_of(session: Session, job_id: str, first: int, limit: int | None) -> list[TrialRecord]:
    """See `Store.figures_of`. The database extracts the figures from results, and rows are fetched in parts."""
    query = select(*TrialRow.__table__.columns, *_FIGURES).outerjoin(AttemptRow, _ACCEPTED)
    mine = query.where(TrialRow.job_id == job_id, TrialRow.number >= first).order_by(TrialRow.number).limit(limit)
    shared: dict[Any, Any] = {}
    # Closed explicitly, because a damaged row ends this before the last row is fetched.
    with contextlib.closing(session.execute(mine, execution_options={"yield_per": PART})) as rows:
        return [slim_record(row, shared) for row in rows]


# Not the plain column: SQLite would use the index of attempts by state, and scan all accepted attempts of a job for each trial.
_IS_ACCEPTED = func.coalesce(AttemptRow.state, AttemptState.RUNNING) == AttemptState.ACCEPTED
_ACCEPTED = and_(AttemptRow.job_id == TrialRow.job_id, AttemptRow.trial_number == TrialRow.number, _IS_ACCEPTED)
_RESULT = readable(AttemptRow.result)
# Texts are extracted as native types, since JSON would be parsed value by value; lists and possibly infinite numbers stay JSON.
_FIGURES = (
    *(_RESULT[name].as_string().label(f"result_{name}") for name in ("message", "rule", "cause")),
    *(_RESULT[name].label(f"result_{name}") for name in ("unstable", "within_relative_error", "extrapolated", "slow_nodes")),
)
"""Values of a result that `slim_record` needs in addition to the columns of its trial."""


def settle(trial: TrialRow, started: datetime | None, finished: datetime, result: TrialResult) -> None:
    """Close the trial with its final result."""
    trial.outcome = result.outcome
    trial.started, trial.finished = started, finished
    for name, value in columns_of(result).items():
        setattr(trial, name, value)


def columns_of(result: TrialResult) -> dict[str, Any]:
    """The columns of a trial that repeat values of its result."""
    rate = result.samples_per_second
    return {
        "peak_memory_bytes": result.peak_memory_bytes,
        "samples_per_second_mean": None if rate is None else rate.mean,
        "samples_per_second_low": None if rate is None else rate.low,
        "samples_per_second_high": None if rate is None else rate.high,
    }


def _new_trial(now: datetime, job: JobRow, config: TrialConfig, purpose: Purpose, fidelity: str, repeat: int) -> TrialRow:
    number = job.trial_count
    job.trial_count += 1
    return TrialRow(
        job_id=job.id,
        number=number,
        config=config.values(),
        config_hash=config.hash,
        purpose=purpose,
        fidelity=fidelity,
        repeat=repeat,
        counted=False,
        attempt_count=0,
        created=now,
    )


def _refuse(session: Session, now: datetime, job: JobRow, trial: TrialRow, refusal: TrialResult) -> None:
    trial.refusal = to_plain(refusal)
    settle(trial, None, now, refusal)
    payload = {"trial": trial.number, "config": trial.config, "outcome": refusal.outcome, "message": refusal.message}
    append_event(session, now, job, EventKind.TRIAL_REFUSED, payload)
