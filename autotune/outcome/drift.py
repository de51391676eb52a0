"""Detect drift of the machine: the baseline is measured repeatedly, and its rate should not change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from autotune.outcome.job_snapshot import JobSnapshot, repeat_of
from storage.records import TrialRecord

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
        if levels and not _has_left(levels[-1], reading, prior):
            levels[-1].append(reading)
        else:
            levels.append([reading])
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


def _has_left(level: Sequence[Reading], reading: Reading, prior: Spread) -> bool:
    repeats = [earlier.repeat for earlier in level]
    ratio = pooled_spread([repeats], prior).ratio([reading.repeat], repeats, CONFIDENCE)
    return ratio.low > 1.0 or ratio.high < 1.0


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
