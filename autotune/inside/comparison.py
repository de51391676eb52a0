"""What a search inside a run knows of two settings, and the visit that it plans."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.inside.space import Move
from autotune.objective.intervals import Repeat


@dataclass(slots=True)
class Comparison:
    """What is known of a rival and an incumbent."""

    move: Move
    prior: tuple[float, float]
    """Mean and standard deviation before the first visit."""
    visits: list[tuple[Repeat, Repeat]]
    """Of the incumbent and the rival."""
    mean: float = field(init=False)
    """Logarithm of the ratio of the rival's time to the incumbent's."""
    deviation: float = field(init=False)

    def __post_init__(self) -> None:
        self.mean, self.deviation = self.prior

    def text(self) -> str:
        """The ratio of rates with its 95 % interval."""
        low, middle, high = (100 * math.expm1(-self.mean + sign * 2 * self.deviation) for sign in (-1, 0, 1))
        return (
            f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}] samples/s after {len(self.visits)} visit{'s' * (len(self.visits) > 1)}"
        )


@dataclass(frozen=True, slots=True)
class PlannedVisit:
    """A planned visit of a rival."""

    move: Move
    blocks: int
    gain: float
    """Seconds that it is expected to save in the rest of the run."""
    cost: float
    """Seconds that it is expected to lose."""
    risk: float
    """Seconds that it may lose, or show to be lost already."""
    urgency: float
    """Order of visits: expected gain for cost."""


def expected_excess(mean: float, deviation: float) -> float:
    """E[max(X, 0)] of a normal variable."""
    if deviation <= 0:
        return max(mean, 0.0)
    normal = statistics.NormalDist()
    return deviation * normal.pdf(mean / deviation) + mean * normal.cdf(mean / deviation)


def ordinary(seconds: Sequence[float]) -> list[float]:
    """The steps without those that are slow for another reason."""
    limit = 2.5 * statistics.median(seconds)
    return [each for each in seconds if each <= limit]


def typical(seconds: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ordinary(seconds))))
