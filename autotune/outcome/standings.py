"""How the tried configurations of a job stand to each other: the one estimate that every list, figure and document shows."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.objective.intervals import Repeat, Spread
from autotune.objective.posterior import Array, Observation, Posterior, posterior_of
from autotune.objective.ranking import Ranking, pareto_front, peak_bytes
from autotune.outcome.drift import Drift, drift_of
from autotune.outcome.job_snapshot import JobSnapshot, repeat_of
from autotune.request.request import Objective
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import SHALLOWER, TrialRecord

MOST_CONTENDERS = 64
"""Configurations whose rates are estimated together, those that came out fastest; slower ones keep their own measurement."""
CLEARED = (None, Outcome.OK, Outcome.TIMEOUT, Outcome.LOST, Outcome.PREEMPTED, Outcome.CANCELLED)
"""Outcomes of a confirmation that say nothing against its configuration."""
SEARCH_BLOCK = 0
"""Block of the measurements of the search. Rounds of confirmation are blocks of their own, from 1 on."""


@dataclass(frozen=True)
class Standings:
    """The contenders of a job: configurations that may win, and the baseline."""

    book: JobSnapshot
    ranking: Ranking
    drift: Drift
    baseline: TrialRecord | None
    """The baseline's search trial; None: no baseline was measured."""
    contenders: tuple[TrialRecord, ...]
    """Search trials, one for each configuration."""
    posterior: Posterior
    """Of their rates, by place in `contenders`."""
    repeats: tuple[int, ...]
    """Measurements that each one's rate rests on."""
    confirmed: frozenset[int]
    """Places of those that were measured again."""

    @cached_property
    def places(self) -> dict[str, int]:
        """Hash of a configuration -> its place in `contenders`."""
        return {trial.config_hash: place for place, trial in enumerate(self.contenders)}

    @cached_property
    def ranked_by(self) -> Posterior:
        """The posterior of what rates are ranked by: rates themselves, times the efficiency where the answer is for another
        cluster."""
        if self.ranking.efficiency is None:
            return self.posterior
        shift = np.log([self.ranking.efficiency(trial.config) for trial in self.contenders])
        return Posterior(self.posterior.draws + shift[:, None], self.posterior.weights)

    @cached_property
    def means(self) -> Array:
        """Mean of the logarithm of what each contender is ranked by."""
        return self.ranked_by.means()

    @cached_property
    def order(self) -> list[int]:
        """Places, best first by the objective: by mean rate, or by peak memory and then rate."""
        if self.ranking.objective is Objective.MEMORY:
            return sorted(
                range(len(self.contenders)), key=lambda place: (peak_bytes(self.contenders[place]), -self.means[place])
            )
        return sorted(range(len(self.contenders)), key=lambda place: (-self.means[place], place))

    def is_decidable(self, place: int) -> bool:
        """Whether the contender may be the answer: it was timed as it is, on the machine of the first trials or again later."""
        trial = self.contenders[place]
        return place in self.confirmed or not (is_extrapolated(trial) or self.drift.touches(trial.number))

    def rate(self, trial: TrialRecord) -> Interval | None:
        """Samples/s of a search trial's configuration, from all that was measured of it; None: it has no rate."""
        place = self.places.get(trial.config_hash)
        if place is not None:
            return self.posterior.rate(place)
        return trial.result.samples_per_second if trial.result is not None else None

    def repeats_of(self, trial: TrialRecord) -> int:
        """How many measurements the rate of a measured search trial's configuration rests on."""
        place = self.places.get(trial.config_hash)
        return 1 if place is None else self.repeats[place]

    def ratio(self, trial: TrialRecord, other: TrialRecord) -> Interval | None:
        """The rate of one search trial's configuration over another's; None: one of them has no rate."""
        first, second = self.places.get(trial.config_hash), self.places.get(other.config_hash)
        if first is not None and second is not None:
            return self.posterior.ratio(first, second)
        one, two = self.rate(trial), self.rate(other)
        if one is None or two is None:
            return None
        # One of them may not win, and stands by its own measurement: the errors of the two are independent.
        mean = one.mean / two.mean
        below = math.hypot(1.0 - one.low / one.mean, two.high / two.mean - 1.0)
        above = math.hypot(one.high / one.mean - 1.0, 1.0 - two.low / two.mean)
        return Interval(mean=mean, low=mean * max(1.0 - below, 0.0), high=mean * (1.0 + above))

    def ranked_rate(self, trial: TrialRecord) -> float:
        """What a search trial's configuration is ranked by, in samples/s; 0: it was not measured."""
        place = self.places.get(trial.config_hash)
        return self.ranking.rate(trial) if place is None else math.exp(self.means[place])

    def front(self) -> list[TrialRecord]:
        """The trials that may win and that no other beats in samples/s and memory at once, fastest first."""
        return pareto_front(self.book.searched, self.ranking, self.ranked_rate)


def standings_of(
    book: JobSnapshot, ranking: Ranking, prior: Spread, baselines: Sequence[TrialConfig], before_round: int | None = None
) -> Standings | None:
    """Return how configurations stand by the job's rows; None: nothing may win.

    Args:
        book: the rows.
        ranking: what may win.
        prior: the noise that is assumed before there are repeats.
        baselines: of which the first that was measured is the baseline.
        before_round: only rounds of confirmation before this one are looked at; None: all.

    What was extrapolated stands by it until it was measured in full, and a trial that was ended early only once it was measured
    again. The baseline is a contender whatever it leaves of the memory limit: it is what the user has, and it runs.
    """
    baseline = measured_baseline(book, baselines)
    drift = drift_of(book, baseline, prior, before_round)
    able = [
        trial
        for trial in (_as_measured_again(book, drift, one, before_round) for one in book.searched)
        if ranking.may_win(trial)
    ]
    able = [trial for trial in able if _is_cleared(book, ranking, trial)]
    rates = {trial.number: _search_rate(drift, trial) for trial in able}
    if not able:
        return None
    able.sort(key=lambda trial: (-rates[trial.number], trial.number))
    again = [trial for trial in able[MOST_CONTENDERS:] if book.confirmed(trial.config)]
    chosen = {trial.config_hash: trial for trial in [*able[:MOST_CONTENDERS], *again]}
    if baseline is not None:
        chosen.setdefault(baseline.config_hash, baseline)
    contenders = tuple(sorted(chosen.values(), key=lambda trial: trial.number))
    observations = [
        Observation(candidate=place, rate=repeat.rate, within=repeat.within, block=block)
        for place, trial in enumerate(contenders)
        for repeat, block in _measurements(book, drift, trial, before_round)
    ]
    own = next(
        (place for place, trial in enumerate(contenders) if baseline and trial.config_hash == baseline.config_hash), None
    )
    posterior = posterior_of(observations, len(contenders), prior, own, drift.found)
    repeats = np.bincount([one.candidate for one in observations], minlength=len(contenders))
    confirmed = frozenset(one.candidate for one in observations if one.block != SEARCH_BLOCK)
    return Standings(book, ranking, drift, baseline, contenders, posterior, tuple(repeats.tolist()), confirmed)


def measured_baseline(book: JobSnapshot, baselines: Sequence[TrialConfig]) -> TrialRecord | None:
    """The first of the baselines that was measured."""
    trials = (book.search_trial(config) for config in baselines)
    return next((trial for trial in trials if trial is not None and trial.outcome is Outcome.OK), None)


def is_extrapolated(trial: TrialRecord) -> bool:
    """Whether the trial's rate rests on other steps than those that it is the rate of."""
    return trial.result is not None and bool(trial.result.extrapolated)


def with_whole_result(book: JobSnapshot, trial: TrialRecord) -> TrialRecord:
    """A search trial with its ranks and steps: those of a confirmation, where there is one, if it was ended early or its own
    are of fewer layers."""
    lacks = trial.fidelity == SHALLOWER or book.trial(trial.number).outcome is Outcome.PRUNED
    confirmed = book.confirmed(trial.config) if lacks else {}
    if not confirmed:
        return book.whole(trial)
    measured = book.whole(book.confirmations(trial.config)[min(confirmed)])
    return dataclasses.replace(trial, result=measured.result)


def _measurements(book: JobSnapshot, drift: Drift, trial: TrialRecord, before_round: int | None) -> list[tuple[Repeat, int]]:
    """Each measurement, with its block, that says something of the trial's configuration.

    A search trial that met another machine, or whose rate is extrapolated, is left out once there are confirmations.
    """
    rounds = book.confirmed(trial.config).items()
    found = [(repeat, number) for number, repeat in rounds if before_round is None or number < before_round]
    if not found or not (is_extrapolated(trial) or drift.touches(trial.number)):
        within = trial.result.within_relative_error if trial.result is not None else 0.0
        found.append((Repeat(rate=_search_rate(drift, trial), within=within), SEARCH_BLOCK))
    controls = book.controls(trial.config).values()
    repeats = (repeat_of(one.result) for one in controls if not drift.touches(one.number))
    return [*found, *((repeat, SEARCH_BLOCK) for repeat in repeats if repeat is not None)]


def _search_rate(drift: Drift, trial: TrialRecord) -> float:
    """What a search trial measured, or its bound where it was ended early, over the least speed that the machine may have had:
    it comes too high rather than too low, and is measured again before it may win."""
    measured = trial.result.samples_per_second if trial.result is not None else None
    if measured is None:
        return 0.0
    value = measured.high if trial.outcome is Outcome.PRUNED else measured.mean
    return value / drift.least_speed(trial.number)


def _as_measured_again(book: JobSnapshot, drift: Drift, trial: TrialRecord, before_round: int | None) -> TrialRecord:
    """The trial; one that was ended early on a machine that drifted, as what it may be: what ended it was a rate of another
    machine. Once it was measured again, with that result."""
    if trial.outcome is not Outcome.PRUNED or not drift.touches(trial.number):
        return trial
    confirmations = book.confirmations(trial.config)
    rounds = (number for number in sorted(book.confirmed(trial.config)) if before_round is None or number < before_round)
    again = next((confirmations[number] for number in rounds), None)
    result = trial.result if again is None else again.result
    if again is None and result is not None and result.samples_per_second is not None:
        bound = dataclasses.replace(result.samples_per_second, mean=result.samples_per_second.high)
        result = dataclasses.replace(result, samples_per_second=bound)
    return dataclasses.replace(trial, outcome=Outcome.OK, result=result)


def _is_cleared(book: JobSnapshot, ranking: Ranking, finalist: TrialRecord) -> bool:
    return all(
        trial.outcome in CLEARED and (trial.outcome is not Outcome.OK or ranking.may_win(trial))
        for trial in book.confirmations_of(finalist.config_hash).values()
    )
