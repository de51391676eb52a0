"""Whether the machine is what it was: the baseline is measured again and again, and its rate should stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from autotune.outcome.job_snapshot import JobSnapshot, repeat_of
from storage.records import TrialRecord

CONFIDENCE = 0.995
"""Of the interval that a reading must leave to be called drift: a job asks several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The baseline, measured at some point of the job."""

    number: int
    """Of its trial: what has a higher one was measured later."""
    repeat: Repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Readings in a row that nothing tells apart."""

    readings: tuple[Reading, ...]
    speed: float
    """Their rate over that of the first level, whose own is 1."""

    @property
    def first(self) -> int:
        """Number of the trial of its first reading."""
        return self.readings[0].number

    @property
    def last(self) -> int:
        """Number of the trial of its last reading."""
        return self.readings[-1].number


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How fast the machine was while a job went on. Between two levels nobody knows when the one became the other."""

    levels: tuple[Level, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the baseline's rate changed by more than its interval."""
        return len(self.levels) > 1

    def touches(self, number: int) -> bool:
        """Whether the trial of that number may have met another machine than the first trials did."""
        return self.found and number > self.levels[0].last

    def least_speed(self, number: int) -> float:
        """The least speed of the machine that the trial of that number may have met, as a share of that of the first trials."""
        if not self.touches(number):
            return 1.0
        before = max(at for at, level in enumerate(self.levels) if level.first <= number)
        level = self.levels[before]
        if number <= level.last or level is self.levels[-1]:
            return level.speed
        return min(level.speed, self.levels[before + 1].speed)

    def cuts(self) -> list[int]:
        """Numbers of trials from which on the machine was another: repeats on two sides of one are not held together."""
        return sorted({number for one, other in pairwise(self.levels) for number in (one.last + 1, other.first)})

    @property
    def text(self) -> str:
        """What was found, in words, with the trials that it touches."""
        return "; ".join(step_text(one, other) for one, other in pairwise(self.levels))


NO_DRIFT = Drift()


def drift_of(book: JobSnapshot, baseline: TrialRecord | None, prior: Spread, before_round: int | None = None) -> Drift:
    """Return what the baseline's measurements say of the machine; jobs without control trials are not looked at.

    The readings, in the order of their trials, are the baseline's search trial, the controls between search trials, and the
    baseline's turns in the rounds of confirmation. Where controls ran beside other trials, the search trial, which ran alone,
    is left out. `before_round`: of the rounds of confirmation, only those before this one are looked at.
    """
    return drift_in([] if baseline is None else _readings(book, baseline, before_round), prior)


def drift_in(readings: Sequence[Reading], prior: Spread) -> Drift:
    """Return the levels of readings in the order of their trials.

    Each reading is held against the level so far: if the ratio's interval of 99.5 % excludes 1, it begins a new level, else it
    joins it. The spread is that of the level and the prior, so that a noisy machine calls for a larger step, and a reading
    never widens the interval that it is judged by. What is found rests on the readings up to it: later ones do not change it.
    """
    levels: list[list[Reading]] = []
    for reading in readings:
        if levels and not _has_left(levels[-1], reading, prior):
            levels[-1].append(reading)
        else:
            levels.append([reading])
    return Drift(levels=tuple(_level(readings, levels[0]) for readings in levels))


def _readings(book: JobSnapshot, baseline: TrialRecord, before_round: int | None) -> list[Reading]:
    controls = [trial for trial in book.controls(baseline.config).values() if repeat_of(trial.result)]
    if not controls:
        return []
    first = [] if _ran_beside(book, controls[0]) else [baseline]
    rounds = book.confirmations(baseline.config).items()
    trials = [*first, *controls, *(trial for number, trial in rounds if before_round is None or number < before_round)]
    found = [(trial.number, repeat_of(trial.result)) for trial in trials]
    return [Reading(number=number, repeat=repeat) for number, repeat in sorted(found, key=lambda item: item[0]) if repeat]


def _ran_beside(book: JobSnapshot, trial: TrialRecord) -> bool:
    """Whether another trial ran at the same time."""
    if trial.started is None or trial.finished is None:
        return False
    return any(
        other.number != trial.number and other.started < trial.finished and trial.started < other.finished
        for other in book.trials
        if other.started is not None and other.finished is not None
    )


def _has_left(level: Sequence[Reading], reading: Reading, prior: Spread) -> bool:
    repeats = [one.repeat for one in level]
    ratio = pooled_spread([repeats], prior).ratio([reading.repeat], repeats, CONFIDENCE)
    return ratio.low > 1.0 or ratio.high < 1.0


def _level(readings: Sequence[Reading], first: Sequence[Reading]) -> Level:
    center = fmean(math.log(one.repeat.rate) for one in readings) - fmean(math.log(one.repeat.rate) for one in first)
    return Level(readings=tuple(readings), speed=math.exp(center))


def step_text(one: Level, other: Level) -> str:
    """A change from one level to the next, in words."""
    change = 100.0 * (other.speed / one.speed - 1.0)
    word = "faster" if change > 0 else "slower"
    when = f"between trial {one.last} and trial {other.first}"
    return f"the machine became {abs(change):.0f} % {word} {when}: the baseline was measured again, and left its interval"
