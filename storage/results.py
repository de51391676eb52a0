"""Record the result of a trial's current attempt in as few statements as possible.

On SQLite, all other writers wait during the whole transaction. So everything possible is prepared before it, and each statement
writes its row and returns the needed columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, insert, update
from sqlalchemy.orm import Session

from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from storage.attempts import finished_payload, rank_row
from storage.leases import lost
from storage.records import AttemptState, EventKind, Lease
from storage.tables import AttemptRow, EventRow, JobRow, RankRow, TrialRow, table_of
from storage.trials import columns_of

_JOBS, _ATTEMPTS, _TRIALS = (table_of(row) for row in (JobRow, AttemptRow, TrialRow))
_CURRENT = (JobRow.id == bindparam("job"), JobRow.lease_token == bindparam("fence"), JobRow.lease_host.is_not(None))
_COUNTED: dict[str, Any] = {"event_count": JobRow.event_count + 1, "updated": bindparam("now")}
_FENCE = update(_JOBS).where(*_CURRENT).values(_COUNTED).returning(JobRow.event_count)
_RUNS = (
    AttemptRow.token == bindparam("attempt"),
    AttemptRow.job_id == bindparam("job"),
    AttemptRow.state == AttemptState.RUNNING,
)
_FINISHED: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("state", "outcome", "finished", "result")}
_NAMED = (AttemptRow.trial_number, AttemptRow.number, AttemptRow.started)
_FINISH = update(_ATTEMPTS).where(*_RUNS).values(_FINISHED).returning(*_NAMED)
_PLACE = (TrialRow.job_id == bindparam("job"), TrialRow.number == bindparam("trial"))
_FIGURES = (
    "outcome", "started", "finished", "peak_memory_bytes", "samples_per_second_mean", "samples_per_second_low",
    "samples_per_second_high",
)  # fmt: skip
_SETTLED: dict[str, Any] = {name: bindparam(f"new_{name}") for name in _FIGURES}
_SETTLE = update(_TRIALS).where(*_PLACE).values(_SETTLED)
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
