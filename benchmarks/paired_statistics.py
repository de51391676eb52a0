"""Means with their 95 % intervals, of values and of paired differences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from executor.measurement.timing import student_t_975


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    half: float
    """Half-width by Student's t; infinite where there are fewer than two values."""

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def percent(self) -> str:
        """As a share, told in percent."""
        spread = f" ± {100 * self.half:.1f}" if math.isfinite(self.half) else ""
        return f"{100 * self.mean:.1f}{spread} %"

    def signed_percent(self) -> str:
        """The same of a difference."""
        spread = f" ± {100 * self.half:.1f}" if math.isfinite(self.half) else ""
        return f"{100 * self.mean:+.1f}{spread} %"


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("there is nothing to take the mean of; give at least one value")
    if len(values) < 2:
        return Estimate(mean=values[0], half=math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), half=student_t_975(len(values) - 1) * error)


def paired_gain(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """How much larger ours are, as a share: of the differences of logarithms, pair by pair, by a paired t interval.

    Raises:
        ValueError: the two have not the same number of values, or a value is not positive.
    """
    if len(ours) != len(theirs) or min((*ours, *theirs), default=0.0) <= 0.0:
        raise ValueError("pairs of positive values are compared; give both sides for every pair")
    return estimate([math.log(one / other) for one, other in zip(ours, theirs, strict=True)])


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups of logarithms, relative therefore, and how many degrees of freedom it rests on.

    0.0 where no group has two values.
    """
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            logs = [math.log(value) for value in group]
            squares += (len(logs) - 1) * statistics.variance(logs)
            freedom += len(logs) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)
