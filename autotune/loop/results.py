"""From what a runner returned to what is stored."""

import dataclasses
from collections.abc import Iterable

from autotune.objective.intervals import Spread
from search_spaces.failure import FailureTable
from search_spaces.outcome import RETRIES, Outcome
from search_spaces.trial import TrialResult
from storage.records import AttemptRecord


def with_stated_interval(result: TrialResult, spread: Spread) -> TrialResult:
    """The result with its stated interval: its own error and the spread between repeats.

    That of a PRUNED trial holds both from the start: it was ended by it, and its upper end is the bound that was not enough.
    """
    if result.samples_per_second is None or result.outcome is Outcome.PRUNED:
        return result
    interval = spread.interval(result.samples_per_second.mean, result.within_relative_error)
    return dataclasses.replace(result, samples_per_second=interval)


def retries_of(result: TrialResult, table: FailureTable) -> int:
    """How many further attempts a trial gets after this result: as the failure table says of its cause, if it names one."""
    row = table.row(result.cause)
    return RETRIES.get(result.outcome, 0) if row is None else row.retries


def is_retried(result: TrialResult, attempts: Iterable[AttemptRecord], table: FailureTable) -> bool:
    """Whether a trial gets another attempt after this result, given its attempts so far.

    Each outcome has its own number of retries; attempts that a killed process left behind are not held against the trial.
    """
    before = sum(attempt.outcome is result.outcome for attempt in attempts)
    return before < retries_of(result, table)
