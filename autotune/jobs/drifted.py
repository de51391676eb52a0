"""In which order trials stand that met a machine that drifted."""

import dataclasses
import math
from statistics import fmean

from autotune.jobs.book import Book
from autotune.jobs.drift import Drift
from autotune.objective import Ranking
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from storage.records import TrialRecord


def in_order(book: Book, ranking: Ranking, drift: Drift) -> list[TrialRecord]:
    """Search trials that may win, best first, by what they would have had on the machine of the first trials.

    1. A trial that met that machine has its own rate.
    2. One that was measured again in rounds with the baseline has the baseline's rate times its mean ratio to it there.
    3. Any other has its rate over the least speed that the machine may have had: it comes too high rather than too low, and
       is measured again before it may win.
    4. One that was ended early has its bound in the place of the rate, until it was measured again: what ended it was a rate
       of another machine. With a result of its own it stands with that.
    """
    found = [(_as_measured_again(book, drift, trial), trial) for trial in book.searched]
    corrected = {trial.number: _corrected(book, drift, measured) for measured, trial in found}
    originals = {trial.number: measured for measured, trial in found}
    ranked = ranking.ranked(corrected.values())
    return [originals[trial.number] for trial in ranked]


def _as_measured_again(book: Book, drift: Drift, trial: TrialRecord) -> TrialRecord:
    """The trial; one that was ended early on a machine that drifted, with the result of its confirmation."""
    if trial.outcome is not Outcome.PRUNED or not drift.touches(trial.number):
        return trial
    confirmations = book.confirmations(trial.config)
    again = next((confirmations[number] for number in sorted(book.confirmed(trial.config))), None)
    return trial if again is None else dataclasses.replace(trial, outcome=Outcome.OK, result=again.result)


def _corrected(book: Book, drift: Drift, trial: TrialRecord) -> TrialRecord:
    """The trial with the rate that it is ordered by."""
    told = trial.outcome in (Outcome.OK, Outcome.PRUNED) and trial.result is not None
    if not told or not drift.touches(trial.number) or trial.result is None or trial.result.samples_per_second is None:
        return trial
    rate = _beside_baseline(book, drift, trial)
    if rate is None:
        measured = trial.result.samples_per_second
        bound = measured.high if trial.outcome is Outcome.PRUNED else measured.mean
        rate = bound / drift.least_speed(trial.number)
    return dataclasses.replace(trial, outcome=Outcome.OK, result=_at(trial.result, rate))


def _beside_baseline(book: Book, drift: Drift, trial: TrialRecord) -> float | None:
    """The rate by the rounds that the trial's configuration has in common with the baseline; None: there are none."""
    mine = book.confirmed(trial.config)
    theirs = book.confirmed(book.trial(drift.levels[0].first).config)
    rounds = mine.keys() & theirs.keys()
    if not rounds:
        return None
    ratio = math.exp(fmean(math.log(mine[number].rate / theirs[number].rate) for number in rounds))
    return ratio * math.exp(fmean(math.log(one.repeat.rate) for one in drift.levels[0].readings))


def _at(result: TrialResult, rate: float) -> TrialResult:
    assert result.samples_per_second is not None
    interval = dataclasses.replace(result.samples_per_second, mean=rate)
    return dataclasses.replace(result, samples_per_second=interval)
