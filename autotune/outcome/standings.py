"""The comparison of a job's measured configurations, without the measurements of a time at which the machine had drifted."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from autotune.objective.posterior import Array, Observation, Posterior, posterior_of
from autotune.objective.ranking import Ranking, pareto_front, peak_bytes
from autotune.outcome.job_snapshot import JobSnapshot, repeat_of
from autotune.request.job_fields import Objective
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import SHALLOWER, TrialRecord

CONFIDENCE = 0.995
"""Confidence level of the interval that a reading must leave to count as drift. High, because a job tests several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A measurement of the baseline at some point of the job."""

    number: int
    """Trial number; higher numbers were measured later."""
    repeat: Repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Consecutive readings that do not differ significantly."""

    readings: tuple[Reading, ...]
    speed: float
    """Their rate relative to the first level, whose speed is 1."""

    @property
    def first(self) -> int:
        """Trial number of its first reading."""
        return self.readings[0].number

    @property
    def last(self) -> int:
        """Trial number of its last reading."""
        return self.readings[-1].number


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The speed of the machine during a job. The exact moment of a change between two levels is unknown."""

    levels: tuple[Level, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the baseline's rate changed by more than its interval."""
        return len(self.levels) > 1

    def touches(self, number: int) -> bool:
        """Whether the machine may have changed between the first trials and the trial with this number."""
        return self.found and number > self.levels[0].last

    def least_speed(self, number: int) -> float:
        """Lowest speed that the machine may have had during the trial with this number, relative to the first trials."""
        if not self.touches(number):
            return 1.0
        before = max(at for at, level in enumerate(self.levels) if level.first <= number)
        level = self.levels[before]
        if number <= level.last or level is self.levels[-1]:
            return level.speed
        return min(level.speed, self.levels[before + 1].speed)

    def cuts(self) -> list[int]:
        """Trial numbers at which the machine changed; repeats on different sides of a cut are not pooled."""
        return sorted({number for level, other in pairwise(self.levels) for number in (level.last + 1, other.first)})

    @property
    def text(self) -> str:
        """The changes as text, with the trials that they affect."""
        return "; ".join(step_text(level, other) for level, other in pairwise(self.levels))


def drift_of(snapshot: JobSnapshot, baseline: TrialRecord | None, prior: Spread, before_round: int | None = None) -> Drift:
    """Return the drift that the baseline's measurements show; none is detected for jobs without control trials.

    The readings, in trial order, are the baseline's search trial, the controls between search trials, and the baseline's
    repeats in the confirmation rounds. The search trial ran with no other trial at the same time. If controls ran concurrently
    with other trials, it is not comparable and is left out. `before_round`: use only the confirmation rounds before this one.
    """
    return drift_in([] if baseline is None else _readings(snapshot, baseline, before_round), prior)


def drift_in(readings: Sequence[Reading], prior: Spread) -> Drift:
    """Return the levels of readings, which are given in trial order.

    Each reading is compared with the current level: if the 99.5 % interval of the ratio excludes 1, the reading begins a new
    level, else it joins the level. The spread comes from the level and the prior. So a noisy machine needs a larger step, and a
    reading never widens the interval that it is tested against. Later readings do not change earlier levels.
    """
    levels: list[list[Reading]] = []
    for reading in readings:
        repeats = [earlier.repeat for earlier in levels[-1]] if levels else []
        ratio = pooled_spread([repeats], prior).ratio([reading.repeat], repeats, CONFIDENCE) if repeats else None
        if ratio is None or ratio.low > 1.0 or ratio.high < 1.0:
            levels.append([reading])
        else:
            levels[-1].append(reading)
    return Drift(levels=tuple(_level(readings, levels[0]) for readings in levels))


def _readings(snapshot: JobSnapshot, baseline: TrialRecord, before_round: int | None) -> list[Reading]:
    controls = [trial for trial in snapshot.controls(baseline.config).values() if repeat_of(trial.result)]
    if not controls:
        return []
    first = [] if _ran_concurrently(snapshot, controls[0]) else [baseline]
    rounds = snapshot.confirmations(baseline.config).items()
    trials = [*first, *controls, *(trial for number, trial in rounds if before_round is None or number < before_round)]
    numbered_repeats = [(trial.number, repeat_of(trial.result)) for trial in trials]
    return [
        Reading(number=number, repeat=repeat) for number, repeat in sorted(numbered_repeats, key=lambda item: item[0]) if repeat
    ]


def _ran_concurrently(snapshot: JobSnapshot, trial: TrialRecord) -> bool:
    """Whether another trial ran at the same time."""
    if trial.started is None or trial.finished is None:
        return False
    return any(
        other.number != trial.number and other.started < trial.finished and trial.started < other.finished
        for other in snapshot.trials
        if other.started is not None and other.finished is not None
    )


def _level(readings: Sequence[Reading], first: Sequence[Reading]) -> Level:
    center = fmean(math.log(reading.repeat.rate) for reading in readings) - fmean(
        math.log(reading.repeat.rate) for reading in first
    )
    return Level(readings=tuple(readings), speed=math.exp(center))


def step_text(level: Level, other: Level) -> str:
    """Describe the change from one level to the next."""
    change = 100.0 * (other.speed / level.speed - 1.0)
    word = "faster" if change > 0 else "slower"
    when = f"between trial {level.last} and trial {other.first}"
    return f"the machine became {abs(change):.0f} % {word} {when}: the baseline was measured again, and left its interval"


MOST_CONTENDERS = 64
"""The rates of this many configurations, the fastest ones, are estimated jointly; slower ones keep their own measurement."""
NOT_MEASURED = "not-measured"
"""The failure table's row of a script that ended before its steps could be timed."""
SEARCH_BLOCK = 0
"""Block number of search measurements. Each confirmation round is its own block, numbered from 1."""


@dataclass(frozen=True)
class Standings:
    """The contenders of a job: configurations that can win, and the baseline."""

    snapshot: JobSnapshot
    ranking: Ranking
    drift: Drift
    baseline: TrialRecord | None
    """The baseline's search trial; None: no baseline was measured."""
    contenders: tuple[TrialRecord, ...]
    """Search trials, one for each configuration."""
    posterior: Posterior
    """Posterior of their rates, by index in `contenders`."""
    repeats: tuple[int, ...]
    """Number of measurements behind each rate."""
    confirmed: frozenset[int]
    """Indices of the contenders that were measured again."""

    @cached_property
    def places(self) -> dict[str, int]:
        """Hash of a configuration -> its index in `contenders`."""
        return {trial.config_hash: index for index, trial in enumerate(self.contenders)}

    @cached_property
    def ranked_by(self) -> Posterior:
        """The posterior that contenders are ranked by: their rates, scaled by the efficiency."""
        if self.ranking.efficiency is None:
            return self.posterior
        rates = np.exp(self.posterior.means()).tolist()
        shift = np.log([self.ranking.efficiency(*pair) for pair in zip(self.contenders, rates, strict=True)])
        return Posterior(self.posterior.draws + shift[:, None], self.posterior.weights)

    @cached_property
    def means(self) -> Array:
        """Mean logarithm of each contender's ranked rate."""
        return self.ranked_by.means()

    @cached_property
    def order(self) -> list[int]:
        """Indices, best first by the objective: by mean rate, or by peak memory and then rate."""
        if self.ranking.objective is Objective.MEMORY:
            return sorted(
                range(len(self.contenders)), key=lambda index: (peak_bytes(self.contenders[index]), -self.means[index])
            )
        return sorted(range(len(self.contenders)), key=lambda index: (-self.means[index], index))

    def rate(self, trial: TrialRecord) -> Interval | None:
        """Samples/s of a search trial's configuration from all of its measurements; None: it has no rate."""
        index = self.places.get(trial.config_hash)
        if index is not None:
            return self.posterior.rate(index)
        return trial.result.samples_per_second if trial.result is not None else None

    def repeats_of(self, trial: TrialRecord) -> int:
        """Number of measurements behind the rate of a measured search trial's configuration."""
        index = self.places.get(trial.config_hash)
        return 1 if index is None else self.repeats[index]

    def ratio(self, trial: TrialRecord, other: TrialRecord) -> Interval | None:
        """The ratio of the rates of two search trials' configurations; None: one of them has no rate."""
        first, second = self.places.get(trial.config_hash), self.places.get(other.config_hash)
        if first is not None and second is not None:
            return self.posterior.ratio(first, second)
        first_rate, second_rate = self.rate(trial), self.rate(other)
        if first_rate is None or second_rate is None:
            return None
        # At least one is not a contender, so its rate is its own measurement: the two errors are independent.
        mean = first_rate.mean / second_rate.mean
        below = math.hypot(1.0 - first_rate.low / first_rate.mean, second_rate.high / second_rate.mean - 1.0)
        above = math.hypot(first_rate.high / first_rate.mean - 1.0, 1.0 - second_rate.low / second_rate.mean)
        return Interval(mean=mean, low=mean * max(1.0 - below, 0.0), high=mean * (1.0 + above))

    def ranked_rate(self, trial: TrialRecord) -> float:
        """The samples/s that a search trial's configuration is ranked by; 0: it was not measured."""
        index = self.places.get(trial.config_hash)
        return self.ranking.rate(trial) if index is None else math.exp(self.means[index])

    def front(self) -> list[TrialRecord]:
        """The Pareto front of samples/s and memory among the trials that can win, fastest first."""
        return pareto_front(self.snapshot.searched, self.ranking, self.ranked_rate)


def standings_of(
    snapshot: JobSnapshot, ranking: Ranking, prior: Spread, baselines: Sequence[TrialConfig], before_round: int | None = None
) -> Standings | None:
    """Compare the configurations in a job's rows; None: no configuration can win.

    Args:
        snapshot: the rows.
        ranking: decides which trials can win.
        prior: the noise assumed before there are repeats.
        baselines: candidate baselines; the first measured one is the baseline.
        before_round: use only the confirmation rounds before this one; None: all.

    An extrapolated rate counts until the configuration is measured in full. A pruned trial counts only after it was measured
    again. The baseline is a contender even above the memory limit: the user already runs it.
    """
    baseline = measured_baseline(snapshot, baselines)
    drift = drift_of(snapshot, baseline, prior, before_round)
    able = [
        trial
        for trial in (_as_measured_again(snapshot, drift, candidate, before_round) for candidate in snapshot.searched)
        if ranking.may_win(trial)
    ]
    able = [trial for trial in able if _is_cleared(snapshot, ranking, trial)]
    rates = {trial.number: _search_rate(drift, trial) for trial in able}
    if not able and baseline is None:
        return None
    able.sort(key=lambda trial: (-rates[trial.number], trial.number))
    again = [trial for trial in able[MOST_CONTENDERS:] if snapshot.confirmed(trial.config)]
    chosen = {trial.config_hash: trial for trial in [*able[:MOST_CONTENDERS], *again]}
    if baseline is not None:
        chosen.setdefault(baseline.config_hash, baseline)
    contenders = tuple(sorted(chosen.values(), key=lambda trial: trial.number))
    observations = [
        Observation(candidate=index, rate=repeat.rate, within=repeat.within, block=block)
        for index, trial in enumerate(contenders)
        for repeat, block in _measurements(snapshot, drift, trial, before_round)
    ]
    baseline_index = next(
        (index for index, trial in enumerate(contenders) if baseline and trial.config_hash == baseline.config_hash), None
    )
    posterior = posterior_of(observations, len(contenders), prior, baseline_index, drift.found)
    repeats = np.bincount([observation.candidate for observation in observations], minlength=len(contenders))
    confirmed = frozenset(observation.candidate for observation in observations if observation.block != SEARCH_BLOCK)
    return Standings(snapshot, ranking, drift, baseline, contenders, posterior, tuple(repeats.tolist()), confirmed)


def measured_baseline(snapshot: JobSnapshot, baselines: Sequence[TrialConfig]) -> TrialRecord | None:
    """The first of the baselines that was measured."""
    trials = (snapshot.search_trial(config) for config in baselines)
    return next((trial for trial in trials if trial is not None and trial.outcome is Outcome.OK), None)


def unresolved_trials(snapshot: JobSnapshot) -> list[TrialRecord]:
    """Search trials whose configurations' speed is unknown, although nothing proves that they cannot run.

    A user's script ended before its steps could be timed, while those of other trials were; or the configuration was measured,
    and ended with an error when it was measured again.
    """
    return [
        trial
        for trial in snapshot.searched
        if (trial.outcome is Outcome.FAILED and trial.result is not None and trial.result.cause == NOT_MEASURED)
        or any(again.outcome is Outcome.FAILED for again in snapshot.confirmations_of(trial.config_hash).values())
    ]


def is_extrapolated(trial: TrialRecord) -> bool:
    """Whether the trial's rate is extrapolated from reduced steps."""
    return trial.result is not None and bool(trial.result.extrapolated)


def with_whole_result(snapshot: JobSnapshot, trial: TrialRecord) -> TrialRecord:
    """Return a search trial with its ranks and steps. If it was pruned or ran fewer layers, they come from a confirmation,
    if there is one."""
    incomplete = trial.fidelity == SHALLOWER or snapshot.trial(trial.number).outcome is Outcome.PRUNED
    confirmed = snapshot.confirmed(trial.config) if incomplete else {}
    if not confirmed:
        return snapshot.whole(trial)
    measured = snapshot.whole(snapshot.confirmations(trial.config)[min(confirmed)])
    return dataclasses.replace(trial, result=measured.result)


def _measurements(
    snapshot: JobSnapshot, drift: Drift, trial: TrialRecord, before_round: int | None
) -> list[tuple[Repeat, int]]:
    """Return the valid measurements of the trial's configuration, each with its block.

    A search trial after a drift, or with an extrapolated rate, is left out once there are confirmations.
    """
    rounds = snapshot.confirmed(trial.config).items()
    measurements = [(repeat, number) for number, repeat in rounds if before_round is None or number < before_round]
    if not measurements or not (is_extrapolated(trial) or drift.touches(trial.number)):
        within = trial.result.within_relative_error if trial.result is not None else 0.0
        measurements.append((Repeat(rate=_search_rate(drift, trial), within=within), SEARCH_BLOCK))
    controls = snapshot.controls(trial.config).values()
    repeats = (repeat_of(control.result) for control in controls if not drift.touches(control.number))
    return [*measurements, *((repeat, SEARCH_BLOCK) for repeat in repeats if repeat is not None)]


def _search_rate(drift: Drift, trial: TrialRecord) -> float:
    """The rate that a search trial measured (its upper bound if pruned), divided by the lowest speed that the machine may have
    had. This errs on the high side: the configuration is measured again before it can win."""
    measured = trial.result.samples_per_second if trial.result is not None else None
    if measured is None:
        return 0.0
    value = measured.high if trial.outcome is Outcome.PRUNED else measured.mean
    return value / drift.least_speed(trial.number)


def _as_measured_again(snapshot: JobSnapshot, drift: Drift, trial: TrialRecord, before_round: int | None) -> TrialRecord:
    """Return the trial, adjusted if it was pruned after a drift: the rate that pruned it came from a machine of another speed.
    Its result is then its upper bound, or the result of its first confirmation."""
    if trial.outcome is not Outcome.PRUNED or not drift.touches(trial.number):
        return trial
    confirmations = snapshot.confirmations(trial.config)
    rounds = (number for number in sorted(snapshot.confirmed(trial.config)) if before_round is None or number < before_round)
    again = next((confirmations[number] for number in rounds), None)
    result = trial.result if again is None else again.result
    if again is None and result is not None and result.samples_per_second is not None:
        bound = dataclasses.replace(result.samples_per_second, mean=result.samples_per_second.high)
        result = dataclasses.replace(result, samples_per_second=bound)
    return dataclasses.replace(trial, outcome=Outcome.OK, result=result)


def _is_cleared(snapshot: JobSnapshot, ranking: Ranking, finalist: TrialRecord) -> bool:
    # Other outcomes of a confirmation disqualify its configuration.
    cleared = (None, Outcome.OK, Outcome.TIMEOUT, Outcome.LOST, Outcome.PREEMPTED, Outcome.CANCELLED)
    return all(
        trial.outcome in cleared and (trial.outcome is not Outcome.OK or ranking.may_win(trial))
        for trial in snapshot.confirmations_of(finalist.config_hash).values()
    )
