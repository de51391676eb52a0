"""Estimates the step time and its uncertainty."""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 4
"""Last steps from which warm-up decides whether a trend remains."""
TREND = 0.1
"""Relative change between the halves of the window that counts as a trend, if it also exceeds the window's own spread."""
STEADY = 0.02
"""Largest relative change between the halves of the window at which its later half counts as timed."""
MIN_STEPS_FOR_INTERVAL = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Mean step time of one trial with the standard error of that mean."""

    mean: float
    """Seconds."""
    standard_error: float
    """Seconds; corrected for the steps' autocorrelation."""
    steps: int

    @property
    def relative_error(self) -> float:
        """Standard error relative to the mean."""
        return self.standard_error / self.mean if self.mean else math.inf

    @property
    def relative_half_width(self) -> float:
        """Half-width of the 95 % interval of the mean, relative to the mean."""
        return student_t_975(self.steps - 1) * self.relative_error if self.steps > 1 else math.inf


def step_time(seconds: Sequence[float], least_correlation: float = 0.0) -> StepTime:
    """Return the mean and its standard error.

    Neighbouring steps are correlated (a busy machine stays busy), so n steps contain less information than n independent ones.
    With lag-1 autocorrelation r the variance of the mean is s²/n (1 + r)/(1 - r) [Law & Kelton, Simulation Modeling and
    Analysis, 4.4]. r is clipped to [`least_correlation`, 0.8], because negative values are noise.
    """
    count = len(seconds)
    mean = statistics.fmean(seconds)
    if count < 2:
        return StepTime(mean=mean, standard_error=math.inf, steps=count)
    variance = statistics.variance(seconds)
    correlation = min(max(_lag_one(seconds, mean), least_correlation), 0.8)
    inflated = variance / count * (1 + correlation) / (1 - correlation)
    return StepTime(mean=mean, standard_error=math.sqrt(inflated), steps=count)


def has_trend(seconds: Sequence[float]) -> bool:
    """Whether the last `WINDOW` steps still drift: their halves differ by more than `TREND` and more than their spread."""
    if len(seconds) < WINDOW:
        return True
    change, spread, mean = _drift(seconds)
    return change > TREND * mean and change > spread


def steady_steps(seconds: Sequence[float]) -> int:
    """Return how many of the last steps may count as timed when `has_trend` is false: the window's later half, or 0.

    0 if the halves differ by more than their spread and by more than `STEADY`: a small but visible drift.
    """
    if len(seconds) < WINDOW:
        return 0
    change, spread, mean = _drift(seconds)
    return WINDOW - WINDOW // 2 if change <= max(STEADY * mean, spread) else 0


def _drift(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return, for the last `WINDOW` steps, the difference between the halves, the larger spread of a half, and the mean."""
    window = seconds[-WINDOW:]
    first, second = window[: WINDOW // 2], window[WINDOW // 2 :]
    change = abs(statistics.fmean(first) - statistics.fmean(second))
    return change, max(max(half) - min(half) for half in (first, second)), statistics.fmean(window)


def student_t_975(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t; infinite without a degree of freedom."""
    return t_quantile(0.975, degrees) if degrees >= 1 else math.inf


@functools.cache
def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's t for a probability above one half, by bisection of the exact distribution.

    Above 1,000 degrees of freedom the normal quantile is within 0.2 % and is used instead.

    Raises:
        ValueError: the probability is not in (0.5, 1), or there is no degree of freedom.
    """
    if not 0.5 < probability < 1.0 or degrees_of_freedom < 1:
        raise ValueError("a t quantile needs a probability in (0.5, 1) and at least one degree of freedom")
    if degrees_of_freedom > 1_000:
        return statistics.NormalDist().inv_cdf(probability)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        inside = _central_probability(middle, degrees_of_freedom)
        low, high = (middle, high) if (1.0 + inside) / 2 < probability else (low, middle)
    return math.sqrt(degrees_of_freedom) * math.tan(low)


def _central_probability(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) * tan(angle)) [Abramowitz and Stegun, 26.7.3 and 26.7.4: exact finite sums]."""
    cosine_squared = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine_squared * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2.0 / math.pi * (angle + math.sin(angle) * total)


def _lag_one(seconds: Sequence[float], mean: float) -> float:
    total = sum((value - mean) ** 2 for value in seconds)
    if not total:
        return 0.0
    return sum((a - mean) * (b - mean) for a, b in itertools.pairwise(seconds)) / total
