"""Attempts: the executions of a trial, which of their results count, and the recording of a result.

On SQLite, all other writers wait during the whole transaction. So everything possible is prepared before it, and each statement
writes its row and returns the needed columns.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from search_spaces.outcome import Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import RankMeasurement, TrialResult
from storage.codec import attempt_record, clean
from storage.errors import UnknownTrialError
from storage.events import append_event
from storage.leases import fenced, lost
from storage.records import AttemptPlacement, AttemptRecord, AttemptState, EventKind, Lease
from storage.tables import AttemptRow, EventRow, JobRow, RankRow, TrialRow, readable, table_of
from storage.trials import columns_of, settle


def start_attempt(session: Session, now: datetime, lease: Lease, trial_number: int) -> AttemptRecord:
    """See `Store.start_attempt`."""
    job = fenced(session, now, lease)
    trial = session.get(TrialRow, (job.id, trial_number))
    if trial is None:
        raise UnknownTrialError(f"job {job.id} has no trial {trial_number}; add it first")
    if trial.outcome is not None:
        raise UnknownTrialError(
            f"trial {trial_number} of job {job.id} ended {trial.outcome}; only planned trials are attempted"
        )
    if trial.attempt_count:
        abandon(session, now, job, trial_number)
    trial.attempt_count += 1
    trial.counted = trial.counted or trial.purpose is Purpose.SEARCH
    attempt = AttemptRow(
        token=secrets.token_hex(16),
        job_id=job.id,
        trial_number=trial_number,
        number=trial.attempt_count,
        state=AttemptState.RUNNING,
        host=lease.owner.host,
        started=now,
    )
    session.add(attempt)
    append_event(session, now, job, EventKind.ATTEMPT_STARTED, _named(attempt))
    return attempt_record(attempt)


def finish_attempt(session: Session, now: datetime, lease: Lease, result: TrialResult, retry: bool) -> bool:
    """See `Store.finish_attempt`."""
    job = fenced(session, now, lease)
    attempt = session.get(AttemptRow, result.attempt)
    if attempt is None or attempt.job_id != job.id:
        raise UnknownTrialError(f"job {job.id} has no attempt {result.attempt!r}; results are of attempts that were started")
    if attempt.result is not None:
        return attempt.state is not AttemptState.SUPERSEDED
    if attempt.state is not AttemptState.RUNNING:
        attempt.state = AttemptState.SUPERSEDED  # it was no longer running when the result came
    else:
        attempt.state = AttemptState.RETRIED if retry else AttemptState.ACCEPTED
    attempt.outcome, attempt.finished, attempt.result = result.outcome, now, to_plain(result)
    if result.ranks:
        session.execute(insert(RankRow), [rank_row(attempt.token, measurement) for measurement in result.ranks])
    if attempt.state is AttemptState.ACCEPTED:
        settle(session.get_one(TrialRow, (job.id, attempt.trial_number)), attempt.started, now, result)
    payload = finished_payload(attempt.trial_number, attempt.number, attempt.state, result)
    append_event(session, now, job, EventKind.ATTEMPT_FINISHED, payload)
    return attempt.state is not AttemptState.SUPERSEDED


def abandon(session: Session, now: datetime, job: JobRow, trial_number: int | None = None) -> None:
    """Abandon the running attempts of a job, or of one of its trials: the trials are planned again."""
    query = select(AttemptRow).where(AttemptRow.job_id == job.id, AttemptRow.state == AttemptState.RUNNING)
    if trial_number is not None:
        query = query.where(AttemptRow.trial_number == trial_number)
    for attempt in session.scalars(query.order_by(AttemptRow.trial_number)).all():
        attempt.state = AttemptState.ABANDONED
        append_event(session, now, job, EventKind.ATTEMPT_ABANDONED, _named(attempt))


def attempts(session: Session, job_id: str, trial_number: int | None) -> list[AttemptRecord]:
    """See `Store.attempts`."""
    query = select(AttemptRow).where(AttemptRow.job_id == job_id)
    if trial_number is not None:
        query = query.where(AttemptRow.trial_number == trial_number)
    rows = session.scalars(query.order_by(AttemptRow.started, AttemptRow.trial_number, AttemptRow.number))
    return [attempt_record(row) for row in rows]


def placements(session: Session, job_id: str, first: int) -> dict[int, AttemptPlacement]:
    """See `Store.placements`."""
    result = readable(AttemptRow.result)
    first_rank = [result["ranks", 0, name].as_string() for name in ("node", "host")]
    node_name = func.coalesce(result["node"].as_string(), *first_rank)
    query = select(AttemptRow.trial_number, AttemptRow.started, node_name).where(AttemptRow.job_id == job_id)
    mine = query.where(AttemptRow.state.in_((AttemptState.RUNNING, AttemptState.ACCEPTED)), AttemptRow.trial_number >= first)
    return {number: AttemptPlacement(started=started, node=node) for number, started, node in session.execute(mine)}


def finished_payload(trial: int, attempt: int, state: AttemptState, result: TrialResult) -> dict[str, Any]:
    """The payload of the event for a result."""
    return {"trial": trial, "attempt": attempt, "state": state, "outcome": result.outcome, "message": result.message}


def _named(attempt: AttemptRow) -> dict[str, Any]:
    return {"trial": attempt.trial_number, "attempt": attempt.number}


_RANK_COLUMNS = frozenset(RankRow.__table__.columns.keys())


def rank_row(attempt: str, measurement: RankMeasurement) -> dict[str, Any]:
    """The columns of one rank's measurement."""
    values = {name: value for name, value in to_plain(measurement).items() if name in _RANK_COLUMNS}
    return values | {"attempt": attempt, "host": clean(measurement.host)}


_JOBS, _ATTEMPTS, _TRIALS = (table_of(row) for row in (JobRow, AttemptRow, TrialRow))
_FENCE = (
    update(_JOBS)
    .where(JobRow.id == bindparam("job"), JobRow.lease_token == bindparam("fence"), JobRow.lease_host.is_not(None))
    .values(event_count=JobRow.event_count + 1, updated=bindparam("now"))
    .returning(JobRow.event_count)
)
_RUNS = (
    AttemptRow.token == bindparam("attempt"),
    AttemptRow.job_id == bindparam("job"),
    AttemptRow.state == AttemptState.RUNNING,
)
_NAMED = (AttemptRow.trial_number, AttemptRow.number, AttemptRow.started)
_FINISH = (
    update(_ATTEMPTS)
    .where(*_RUNS)
    .values(**{name: bindparam(f"new_{name}") for name in ("state", "outcome", "finished", "result")})
    .returning(*_NAMED)
)
_FIGURES = (
    "outcome", "started", "finished", "peak_memory_bytes", "samples_per_second_mean", "samples_per_second_low",
    "samples_per_second_high",
)  # fmt: skip
_SETTLE = (
    update(_TRIALS)
    .where(TrialRow.job_id == bindparam("job"), TrialRow.number == bindparam("trial"))
    .values(**{name: bindparam(f"new_{name}") for name in _FIGURES})
)
_RANKS, _EVENT = insert(table_of(RankRow)), insert(table_of(EventRow))


class NotRunningError(Exception):
    """The attempt does not exist or is not its trial's current one; `attempts.finish_attempt` handles that."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A result in the form in which it is written."""

    result: TrialResult
    plain: dict[str, Any]
    ranks: list[dict[str, Any]]
    figures: Mapping[str, Any]


def prepare(result: TrialResult) -> Prepared:
    """Convert the result before the transaction."""
    ranks = [rank_row(result.attempt, measurement) for measurement in result.ranks]
    return Prepared(result, to_plain(result), ranks, columns_of(result))


def finish_running(session: Session, now: datetime, lease: Lease, prepared: Prepared, retry: bool) -> bool:
    """See `Store.finish_attempt`.

    1. Check the fence: number the job's event if the lease is current.
    2. Store the attempt's result if it is running.
    3. Write its ranks, its trial if the result is accepted, and the event.

    Raises:
        NotRunningError: the attempt is not running. The caller must roll back the transaction.
    """
    connection, result = session.connection(), prepared.result
    state = AttemptState.RETRIED if retry else AttemptState.ACCEPTED
    sequence = connection.execute(_FENCE, {"job": lease.job_id, "fence": lease.token, "now": now}).scalar()
    if sequence is None:
        raise lost(lease)
    new = {"new_state": state, "new_outcome": result.outcome, "new_finished": now, "new_result": prepared.plain}
    attempt = connection.execute(_FINISH, {"attempt": result.attempt, "job": lease.job_id, **new}).one_or_none()
    if attempt is None:
        raise NotRunningError(result.attempt)
    if prepared.ranks:
        connection.execute(_RANKS, prepared.ranks)
    if state is AttemptState.ACCEPTED:
        settled = {"new_outcome": result.outcome, "new_started": attempt.started, "new_finished": now}
        figures = {f"new_{name}": value for name, value in prepared.figures.items()}
        connection.execute(_SETTLE, {"job": lease.job_id, "trial": attempt.trial_number, **settled, **figures})
    payload = to_plain(finished_payload(attempt.trial_number, attempt.number, state, result))
    event = {"job_id": lease.job_id, "sequence": sequence, "time": now, "kind": EventKind.ATTEMPT_FINISHED, "payload": payload}
    connection.execute(_EVENT, event)
    return True
