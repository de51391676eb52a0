"""Trials, the planned and finished measurements of a job, and attempts, their executions: which results count.

On SQLite, all other writers wait during the whole transaction. So everything possible is prepared before a result is recorded,
and each statement writes its row and returns the needed columns."""

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from search_spaces.outcome import Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.codec import attempt_record, clean, plain_trial, slim_record, trial_record
from storage.database import StorePart, reads, writes
from storage.errors import UnknownTrialError
from storage.events import append_event
from storage.leases import fenced, lost
from storage.records import AttemptPlacement, AttemptRecord, AttemptState, EventKind, Lease, TrialRecord
from storage.tables import AttemptRow, EventRow, JobRow, RankRow, TrialRow, readable, table_of

PART = 1000
"""Rows per fetch."""


class TrialStore(StorePart):
    """The trials of jobs."""

    @writes
    def add(
        self,
        session: Session,
        now: datetime,
        lease: Lease,
        config: TrialConfig,
        purpose: Purpose,
        fidelity: str = "full",
        repeat: int = 0,
        refusal: TrialResult | None = None,
    ) -> TrialRecord:
        """Record a planned trial, or return the existing one (same config, purpose, fidelity and repeat).

        With `refusal`, the candidate was refused before it reached a device: it is stored with that outcome and not counted.
        A refusal of an existing trial closes it if it has no attempt yet, else it is ignored.
        """
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

    @reads
    def of(self, session: Session, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        """Return up to `limit` trials of a job from number `first` on, by number, including refused ones.

        There are none for a job that does not exist.
        """
        query = select(TrialRow, AttemptRow.result).outerjoin(AttemptRow, _ACCEPTED)
        mine = query.where(TrialRow.job_id == job_id, TrialRow.number >= first).order_by(TrialRow.number).limit(limit)
        return [trial_record(trial, result) for trial, result in session.execute(mine)]

    @reads
    def plain(self, session: Session, job_id: str, first: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Like `of`, as plain data for callers that only forward it.

        Each has number, purpose, fidelity, repeat, counted, outcome, config, attempts, created, started, finished, and result,
        which lacks the attempt's token.
        """
        query = select(*TrialRow.__table__.columns, AttemptRow.result).outerjoin(AttemptRow, _ACCEPTED)
        mine = query.where(TrialRow.job_id == job_id, TrialRow.number >= first).order_by(TrialRow.number).limit(limit)
        return [plain_trial(row) for row in session.execute(mine)]

    @reads
    def figures_of(self, session: Session, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        """Return up to `limit` trials of a job from number `first` on, by number, at one moment, with only the figures of their
        results.

        A result has outcome, message, rule, cause, rate, peak, and their accuracy. Values per rank and step are left out, so
        that all trials of a job fit in memory.

        The database extracts the figures from results, and rows are fetched in parts.
        """
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


class NotRunningError(Exception):
    """The attempt does not exist or is not its trial's current one; `AttemptStore.finish` handles that."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A result in the form in which it is written."""

    result: TrialResult
    plain: dict[str, Any]
    ranks: list[dict[str, Any]]
    figures: Mapping[str, Any]


class AttemptStore(StorePart):
    """The attempts of trials."""

    @writes
    def start(self, session: Session, now: datetime, lease: Lease, trial_number: int) -> AttemptRecord:
        """Create an attempt with a new token; a trial of purpose `search` is counted from now on.

        A running attempt of the same trial becomes `abandoned`.

        Raises:
            UnknownTrialError: the trial does not exist, or already has an outcome.
        """
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

    def finish(self, lease: Lease, result: TrialResult, retry: bool = False) -> bool:
        """Record the result of `result.attempt`, with its rank measurements.

        Returns True if it was accepted: the attempt is its trial's current one, and becomes `accepted` (the trial gets its
        outcome) or, with `retry`, `retried` (the trial stays planned). False: the attempt is no longer current; its result is
        stored as `superseded` and never counted. The first result of an attempt stays; a repeated call returns the same.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """
        prepared = prepare(result)
        try:
            return self._finish_running(lease, prepared, retry)
        except NotRunningError:
            return self._finish_any(lease, result, retry)

    @writes
    def _finish_running(self, session: Session, now: datetime, lease: Lease, prepared: Prepared, retry: bool) -> bool:
        """Record the result of a running attempt. See `finish`.

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
        event = {
            "job_id": lease.job_id,
            "sequence": sequence,
            "time": now,
            "kind": EventKind.ATTEMPT_FINISHED,
            "payload": payload,
        }
        connection.execute(_EVENT, event)
        return True

    @writes
    def _finish_any(self, session: Session, now: datetime, lease: Lease, result: TrialResult, retry: bool) -> bool:
        """Record a result of an attempt that is perhaps no longer running. See `finish`."""
        job = fenced(session, now, lease)
        attempt = session.get(AttemptRow, result.attempt)
        if attempt is None or attempt.job_id != job.id:
            raise UnknownTrialError(
                f"job {job.id} has no attempt {result.attempt!r}; results are of attempts that were started"
            )
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

    @reads
    def of(self, session: Session, job_id: str, trial_number: int | None = None) -> list[AttemptRecord]:
        """Return all attempts of a job or of one of its trials, oldest first."""
        query = select(AttemptRow).where(AttemptRow.job_id == job_id)
        if trial_number is not None:
            query = query.where(AttemptRow.trial_number == trial_number)
        rows = session.scalars(query.order_by(AttemptRow.started, AttemptRow.trial_number, AttemptRow.number))
        return [attempt_record(row) for row in rows]

    @reads
    def placements(self, session: Session, job_id: str, first: int = 0) -> dict[int, AttemptPlacement]:
        """Return start time and node of the running or accepted attempt of each trial from number `first` on."""
        result = readable(AttemptRow.result)
        first_rank = [result["ranks", 0, name].as_string() for name in ("node", "host")]
        node_name = func.coalesce(result["node"].as_string(), *first_rank)
        query = select(AttemptRow.trial_number, AttemptRow.started, node_name).where(AttemptRow.job_id == job_id)
        mine = query.where(
            AttemptRow.state.in_((AttemptState.RUNNING, AttemptState.ACCEPTED)), AttemptRow.trial_number >= first
        )
        return {number: AttemptPlacement(started=started, node=node) for number, started, node in session.execute(mine)}


def abandon(session: Session, now: datetime, job: JobRow, trial_number: int | None = None) -> None:
    """Abandon the running attempts of a job, or of one of its trials: the trials are planned again."""
    query = select(AttemptRow).where(AttemptRow.job_id == job.id, AttemptRow.state == AttemptState.RUNNING)
    if trial_number is not None:
        query = query.where(AttemptRow.trial_number == trial_number)
    for attempt in session.scalars(query.order_by(AttemptRow.trial_number)).all():
        attempt.state = AttemptState.ABANDONED
        append_event(session, now, job, EventKind.ATTEMPT_ABANDONED, _named(attempt))


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
_SETTLED_COLUMNS = (
    "outcome", "started", "finished", "peak_memory_bytes", "samples_per_second_mean", "samples_per_second_low",
    "samples_per_second_high",
)  # fmt: skip
_SETTLE = (
    update(_TRIALS)
    .where(TrialRow.job_id == bindparam("job"), TrialRow.number == bindparam("trial"))
    .values(**{name: bindparam(f"new_{name}") for name in _SETTLED_COLUMNS})
)
_RANKS, _EVENT = insert(table_of(RankRow)), insert(table_of(EventRow))


def prepare(result: TrialResult) -> Prepared:
    """Convert the result before the transaction."""
    ranks = [rank_row(result.attempt, measurement) for measurement in result.ranks]
    return Prepared(result, to_plain(result), ranks, columns_of(result))
