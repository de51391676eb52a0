"""How long a step takes, and how sure that is."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 4
"""Steps that warm-up looks at to decide whether a trend is left."""
TREND = 0.1
"""Relative change between the halves of the window that counts as a trend, where it also exceeds the window's own spread."""
MIN_STEPS_FOR_INTERVAL = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Mean step time of one trial with the standard error of that mean."""

    mean: float
    """Seconds."""
    standard_error: float
    """Seconds; the steps' autocorrelation is accounted for."""
    steps: int

    @property
    def relative_error(self) -> float:
        """Standard error as a share of the mean."""
        return self.standard_error / self.mean if self.mean else math.inf

    @property
    def relative_half_width(self) -> float:
        """Half-width of the 95 % interval of the mean, as a share of it."""
        return student_t_975(self.steps - 1) * self.relative_error if self.steps > 1 else math.inf


def step_time(seconds: Sequence[float]) -> StepTime:
    """Mean and its standard error.

    Neighbouring steps are alike (a busy machine stays busy), so n steps tell less than n: with lag-1 autocorrelation r the
    variance of the mean is s²/n (1 + r)/(1 - r) [Law & Kelton, Simulation Modeling and Analysis, 4.4]; r is bounded to
    [0, 0.8], negative values being noise.
    """
    count = len(seconds)
    mean = statistics.fmean(seconds)
    if count < 2:
        return StepTime(mean=mean, standard_error=math.inf, steps=count)
    variance = statistics.variance(seconds)
    correlation = min(max(_lag_one(seconds, mean), 0.0), 0.8)
    inflated = variance / count * (1 + correlation) / (1 - correlation)
    return StepTime(mean=mean, standard_error=math.sqrt(inflated), steps=count)


def has_trend(seconds: Sequence[float]) -> bool:
    """Whether the last `WINDOW` steps still drift: their halves differ by more than `TREND` and more than their spread."""
    if len(seconds) < WINDOW:
        return True
    window = seconds[-WINDOW:]
    first, second = window[: WINDOW // 2], window[WINDOW // 2 :]
    change = abs(statistics.fmean(first) - statistics.fmean(second))
    spread = max(max(half) - min(half) for half in (first, second))
    return change > TREND * statistics.fmean(window) and change > spread


def student_t_975(degrees: int) -> float:
    """The 0.975 quantile of Student's t, within 0.1 % from 3 degrees of freedom on (exact for 1 and 2).

    [Abramowitz & Stegun 26.7.5: expansion of the quantile about the normal's]
    """
    if degrees < 1:
        return math.inf
    if degrees == 1:
        return math.tan(math.pi * 0.475)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(float(term) / float(degrees) ** (power + 1) for power, term in enumerate(terms))


def _lag_one(seconds: Sequence[float], mean: float) -> float:
    total = sum((value - mean) ** 2 for value in seconds)
    if not total:
        return 0.0
    return sum((a - mean) * (b - mean) for a, b in itertools.pairwise(seconds)) / total
