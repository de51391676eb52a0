"""What follows from a trial's result: the stored interval, retries, verifications, and the kind of a failure."""

import dataclasses
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from autotune.objective.intervals import Spread
from search_spaces.failure import FailureTable
from search_spaces.outcome import RETRIES, Outcome
from search_spaces.trial import TrialResult
from storage.records import AttemptState, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


def with_stated_interval(result: TrialResult, spread: Spread) -> TrialResult:
    """Return the result with the interval that combines its own error and the spread between repeats.

    A PRUNED trial's interval already includes both: it was used to end the trial, and its upper end is the bound of the rate.
    """
    if result.samples_per_second is None or result.outcome is Outcome.PRUNED:
        return result
    interval = spread.interval(result.samples_per_second.mean, result.within_relative_error)
    return dataclasses.replace(result, samples_per_second=interval)


def retries_of(result: TrialResult, table: FailureTable) -> int:
    """Number of retries after this result: from the failure table if it has a row for the cause, else from the outcome."""
    row = table.row(result.cause)
    return RETRIES.get(result.outcome, 0) if row is None else row.retries


class Verifying:
    """Determines from the stored attempts which planned trials verify a failure (`FailureRow.verify`)."""

    def __init__(self, store: "Store", table: FailureTable) -> None:
        self._store, self._table = store, table
        self._known: dict[tuple[int, int], bool] = {}

    def is_verification(self, trial: TrialRecord) -> bool:
        """Whether the trial's next attempt verifies a failure."""
        key = (trial.number, trial.attempts)
        if trial.attempts and key not in self._known:
            attempts = self._store.attempts.of(trial.job_id, trial.number)
            retried = [attempt.result for attempt in attempts if attempt.state is AttemptState.RETRIED and attempt.result]
            rows = [self._table.row(result.cause) for result in retried]
            self._known[key] = any(row is not None and row.verify for row in rows)
        return self._known.get(key, False)

    def startable(self, trials: list[TrialRecord], running: Collection[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that may start now: a verification waits until nothing runs, and nothing starts until it has ended.

        The other trials stay planned.
        """
        if any(map(self.is_verification, running)):
            return []
        verification = next(filter(self.is_verification, trials), None)
        if verification is None:
            return trials
        return [] if running else [verification]


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def kind_of_failure(result: TrialResult) -> tuple[str, str | None, str]:
    """Return a key that is equal for failures of the same kind: outcome, cause, and the message without its numbers.

    Ranks, shapes, sizes, ports and addresses are numbers that differ between configurations and attempts.
    """
    return result.outcome.value, result.cause, _NUMBER.sub("", result.message)
