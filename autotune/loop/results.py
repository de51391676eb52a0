"""Convert a runner's result to the stored result, and decide on retries."""

import dataclasses
from collections.abc import Iterable

from autotune.objective.intervals import Spread
from search_spaces.failure import FailureTable
from search_spaces.outcome import RETRIES, Outcome
from search_spaces.trial import TrialResult
from storage.records import AttemptRecord


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


def is_retried(result: TrialResult, attempts: Iterable[AttemptRecord], table: FailureTable) -> bool:
    """Whether a trial is retried after this result, given its attempts so far.

    Each outcome has its own number of retries. Attempts that a killed process left unfinished do not count.
    """
    before = sum(attempt.outcome is result.outcome for attempt in attempts)
    return before < retries_of(result, table)
