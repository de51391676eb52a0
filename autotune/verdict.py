"""Which configuration won, over which rival, and by how much over the baseline."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.intervals import Repeat, Spread
from autotune.jobs.book import Book
from autotune.jobs.drift import NO_DRIFT, Drift, drift_of
from autotune.jobs.drifted import in_order
from autotune.jobs.request import Objective
from autotune.objective import Ranking, peak_bytes
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import SHALLOWER, TrialRecord

CLEARED = (None, Outcome.OK, Outcome.TIMEOUT, Outcome.LOST, Outcome.PREEMPTED, Outcome.CANCELLED)
"""Outcomes of a confirmation that say nothing against its configuration."""

EQUAL = 0.01
"""Relative difference of two estimates below which nobody would trade memory for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a job has found so far."""

    best: TrialRecord
    """The winner's search trial."""
    runner_up: TrialRecord | None
    tie: bool
    """Whether the measurements do not tell winner and runner-up apart; of equal estimates the one with less memory is first."""
    baseline: TrialRecord | None
    """The baseline's search trial; None: no baseline was measured."""
    gain: Interval | None
    """Best over baseline: the ratio of samples/s, or of peak bytes (baseline over best) where memory is the objective."""


def decide(book: Book, ranking: Ranking, prior: Spread, baselines: Sequence[TrialConfig]) -> Verdict | None:
    """Return the verdict that the job's rows support; None: nothing may win.

    What was extrapolated alone leads the search, and wins as soon as it was measured in full. What was measured while the
    machine was another than in the beginning wins as soon as it was measured again, beside the baseline. An environment wins
    where it is told apart from the same layout without it: variables that make no difference are not worth setting.
    """
    drift = drift_of(book, measured_baseline(book, baselines), prior)
    ranked = [trial for trial in ranked_finalists(book, ranking, drift) if _may_be_held_against_others(book, drift, trial)]
    if not ranked:
        return None
    spread = book.spread(prior, drift.cuts())
    first, second = _pair(ranked)
    tie = False
    if second is not None and ranking.objective is not Objective.MEMORY:
        lead = _lead(book, spread, ranking, first.config, second.config)
        tie = lead.low <= 1.0 <= lead.high
        # Where they are not told apart and their estimates are as good as equal, less memory decides.
        as_good = tie and abs(lead.mean - 1.0) <= EQUAL
        if tie and _are_one_layout(first, second):
            first, second = sorted((first, second), key=lambda trial: trial.number)
        elif (peak_bytes(second) < peak_bytes(first)) if as_good else lead.mean < 1.0:
            first, second = second, first
    baseline = measured_baseline(book, baselines)
    gain = _gain(book, spread, ranking, first, baseline) if baseline else None
    return Verdict(best=first, runner_up=second, tie=tie, baseline=baseline, gain=gain)


def ranked_finalists(book: Book, ranking: Ranking, drift: Drift = NO_DRIFT) -> list[TrialRecord]:
    """Search trials that may win, best first, without those whose confirmation went wrong.

    Where the machine drifted, they are in the order of what they would have had on the machine of the first trials, and those
    stand among them that were ended early against a rate of another machine.
    """
    ranked = in_order(book, ranking, drift) if drift.found else ranking.ranked(book.searched)
    return [trial for trial in ranked if _is_cleared(book, ranking, trial)]


def rivals(book: Book, ranking: Ranking, drift: Drift = NO_DRIFT) -> list[TrialRecord]:
    """The trials that confirmations are about: the first of the finalists, and whom it has to be told apart from."""
    ranked = ranked_finalists(book, ranking, drift)
    return [trial for trial in _pair(ranked) if trial is not None] if ranked else []


def _pair(ranked: Sequence[TrialRecord]) -> tuple[TrialRecord, TrialRecord | None]:
    """The best and its rival: the second, or, where the best is an environment on a layout, that layout without it, which
    is the first trial of the layout."""
    best = ranked[0]
    alike = [trial for trial in ranked if _are_one_layout(best, trial)] if best.config.environment else [best]
    plain = min(alike, key=lambda trial: trial.number)
    return best, plain if plain is not best else next(iter(ranked[1:]), None)


def _are_one_layout(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two trials differ in their environment at most."""
    return one.config.replace({ENVIRONMENT: other.config.environment}) == other.config


def is_extrapolated(trial: TrialRecord) -> bool:
    """Whether the trial's rate rests on other steps than those that it is the rate of."""
    return trial.result is not None and bool(trial.result.extrapolated)


def _may_be_held_against_others(book: Book, drift: Drift, trial: TrialRecord) -> bool:
    return is_measured_in_full(book, trial) and (not drift.touches(trial.number) or bool(book.confirmed(trial.config)))


def is_measured_in_full(book: Book, trial: TrialRecord) -> bool:
    """Whether a search trial's configuration was timed as it is: by the trial itself, or by a confirmation."""
    return not is_extrapolated(trial) or bool(book.confirmed(trial.config))


def with_whole_result(book: Book, trial: TrialRecord) -> TrialRecord:
    """A search trial with its ranks and steps: those of a confirmation, where there is one, if it was ended early or its own
    are of fewer layers."""
    lacks = trial.fidelity == SHALLOWER or book.trial(trial.number).outcome is Outcome.PRUNED
    confirmed = book.confirmed(trial.config) if lacks else {}
    if not confirmed:
        return book.whole(trial)
    measured = book.whole(book.confirmations(trial.config)[min(confirmed)])
    return dataclasses.replace(trial, result=measured.result)


def spread_of(book: Book, prior: Spread, baselines: Sequence[TrialConfig]) -> Spread:
    """The spread between repeats that this job's own trials show, repeats on different levels of the machine held apart."""
    return book.spread(prior, drift_of(book, measured_baseline(book, baselines), prior).cuts())


def measured_baseline(book: Book, baselines: Sequence[TrialConfig]) -> TrialRecord | None:
    """The first of the baselines that was measured."""
    trials = (book.search_trial(config) for config in baselines)
    return next((trial for trial in trials if trial is not None and trial.outcome is Outcome.OK), None)


def ratio_of(book: Book, spread: Spread, numerator: TrialConfig, denominator: TrialConfig) -> Interval:
    """The ratio of two measured configurations' rates: from interleaved pairs where both have them, else from all repeats."""
    first, second = book.confirmed(numerator), book.confirmed(denominator)
    rounds = sorted(first.keys() & second.keys())
    if rounds:
        return spread.ratio([first[number] for number in rounds], [second[number] for number in rounds])
    return spread.ratio(book.repeats(numerator), book.repeats(denominator))


def _lead(book: Book, spread: Spread, ranking: Ranking, first: TrialConfig, second: TrialConfig) -> Interval:
    """The ratio of what their rates are ranked by."""
    lead = ratio_of(book, spread, first, second)
    if ranking.efficiency is None:
        return lead
    factor = ranking.efficiency(first) / ranking.efficiency(second)
    return Interval(mean=lead.mean * factor, low=lead.low * factor, high=lead.high * factor)


def estimate(book: Book, spread: Spread, config: TrialConfig) -> Interval:
    """Samples/s of a measured configuration from all that its estimate rests on."""
    repeats: list[Repeat] = book.repeats(config)
    return spread.combined(repeats)


def _gain(book: Book, spread: Spread, ranking: Ranking, best: TrialRecord, baseline: TrialRecord) -> Interval:
    if best.config == baseline.config:
        return Interval(mean=1.0, low=1.0, high=1.0)
    if ranking.objective is Objective.MEMORY:
        # Allocator peaks repeat exactly, so that the ratio has no spread.
        ratio = peak_bytes(baseline) / max(peak_bytes(best), 1)
        return Interval(mean=ratio, low=ratio, high=ratio)
    return ratio_of(book, spread, best.config, baseline.config)


def _is_cleared(book: Book, ranking: Ranking, finalist: TrialRecord) -> bool:
    return all(
        trial.outcome in CLEARED and (trial.outcome is not Outcome.OK or ranking.may_win(trial))
        for trial in book.confirmations_of(finalist.config_hash).values()
    )
