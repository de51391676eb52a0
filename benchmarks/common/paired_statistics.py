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
    """Half-width by Student's t; infinite for fewer than two values."""

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def percent(self) -> str:
        """The share in percent."""
        spread = f" ± {100 * self.half:.1f}" if math.isfinite(self.half) else ""
        return f"{100 * self.mean:.1f}{spread} %"

    def signed_percent(self) -> str:
        """The difference in percent, with its sign."""
        spread = f" ± {100 * self.half:.1f}" if math.isfinite(self.half) else ""
        return f"{100 * self.mean:+.1f}{spread} %"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of independent values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values: a mean needs at least one; give at least one value")
    if len(values) < 2:
        return Estimate(mean=values[0], half=math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), half=student_t_975(len(values) - 1) * error)


def paired_gain(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean log ratio of ours over theirs, pair by pair, with a paired t interval.

    Raises:
        ValueError: the numbers of values differ, or a value is not positive.
    """
    if len(ours) != len(theirs) or min((*ours, *theirs), default=0.0) <= 0.0:
        raise ValueError("ours, theirs: pairs need two positive values; give both sides of every pair")
    return estimate([math.log(one / other) for one, other in zip(ours, theirs, strict=True)])


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Pooled standard deviation of logarithms within groups (so relative), and its degrees of freedom.

    0.0 if no group has two values.
    """
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            logs = [math.log(value) for value in group]
            squares += (len(logs) - 1) * statistics.variance(logs)
            freedom += len(logs) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)
