"""The step time with its uncertainty, and the nodes whose ranks slow a trial down."""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.trial import NodeEvent, RankMeasurement
from search_spaces.trial_config import TrialConfig

WINDOW = 4
"""Last steps from which warm-up decides whether a trend remains."""
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
    """Whether the last `WINDOW` steps still drift: their halves differ by more than 10 % and more than their spread."""
    if len(seconds) < WINDOW:
        return True
    change, spread, mean = _drift(seconds)
    # Relative change between the halves of the window that counts as a trend, if it also exceeds the window's own spread.
    return change > 0.1 * mean and change > spread


def steady_steps(seconds: Sequence[float]) -> int:
    """Return how many of the last steps may count as timed when `has_trend` is false: the window's later half, or 0.

    0 if the halves differ by more than their spread and by more than 2 %: a small but visible drift.
    """
    if len(seconds) < WINDOW:
        return 0
    change, spread, mean = _drift(seconds)
    # Largest relative change between the halves of the window at which its later half counts as timed.
    return WINDOW - WINDOW // 2 if change <= max(0.02 * mean, spread) else 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much slower a rank is than the ranks with the same shapes on other nodes."""

    rank: RankMeasurement
    peer_count: int
    behind: float
    """Excess of its compute time over their median, relative to that median."""
    error: float
    """Standard error of `behind`."""
    median_seconds: float
    """Median compute time of the others' steps, without waits."""


def slow_nodes(config: TrialConfig, ranks: Sequence[RankMeasurement], between: float) -> list[NodeEvent]:
    """Return the slow nodes, each with its slowest rank.

    1. Ranks at the same pipeline position have the same shapes, because tensor, context and data ranks divide the work evenly.
       Ranks of different stages are not compared.
    2. Each rank's compute time, without waits for others, is compared with the median of the ranks on other nodes. If all ranks
       are on one node, there is nothing to compare.
    3. A node is slow if one of its ranks is behind by more than 5 %, and by three standard errors more than that: in 200 jobs
       of 20 trials on 16 equal ranks there is no false alarm. The errors are the rank's own and that of the median; they
       consist of the spread of each rank's steps and of `between`, the variation between repetitions on a machine, or the
       variation among the other ranks if that is larger.

    Ranks without times or without their error are left out.
    """
    lags = [lag for group in _alike(config, ranks) for lag in _lags(group, between) if lag.behind - 3.0 * lag.error > 0.05]
    worst: dict[str, Lag] = {}
    for lag in lags:
        node = node_of(lag.rank)
        if node not in worst or worst[node].behind < lag.behind:
            worst[node] = lag
    return [NodeEvent(node=node, kind="slow", message=_text(lag)) for node, lag in sorted(worst.items())]


def node_of(rank: RankMeasurement) -> str:
    """Return the name of the node that a rank ran on."""
    return rank.host if rank.node is None else rank.node


def _alike(config: TrialConfig, ranks: Sequence[RankMeasurement]) -> list[list[RankMeasurement]]:
    mesh = make_mesh(config, len(ranks))
    if mesh.world_size != len(ranks):
        return []
    stages: dict[int, list[RankMeasurement]] = {}
    for rank in ranks:
        if rank.compute_seconds_per_step and rank.compute_relative_error is not None:
            stages.setdefault(mesh.coordinates(rank.rank)[PIPELINE], []).append(rank)
    return list(stages.values())


def _lags(group: Sequence[RankMeasurement], between: float) -> list[Lag]:
    lags = []
    for rank in group:
        peers = [other for other in group if node_of(other) != node_of(rank)]
        if peers:
            lags.append(_lag(rank, peers, between))
    return lags


def _lag(rank: RankMeasurement, peers: Sequence[RankMeasurement], between: float) -> Lag:
    middle = median(_seconds(other) for other in peers)
    # If the others differ by more than expected, this rank may too, by chance.
    # Ratio of the standard deviation of normal values to their median absolute deviation, which is robust to a few outliers.
    scatter = max(between, 1.4826 * median(abs(_seconds(other) / middle - 1.0) for other in peers))
    typical = math.hypot(median(_error(other) for other in peers), scatter)
    # sqrt(pi / 2): the standard error of a median of many normal values, over that of their mean, which it is for one or two.
    of_median = typical * (math.sqrt(math.pi / 2) if len(peers) > 2 else 1.0) / math.sqrt(len(peers))
    ratio = _seconds(rank) / middle
    error = ratio * math.hypot(_error(rank), scatter, of_median)
    return Lag(rank=rank, peer_count=len(peers), behind=ratio - 1.0, error=error, median_seconds=middle)


def _seconds(rank: RankMeasurement) -> float:
    return rank.compute_seconds_per_step or 0.0


def _error(rank: RankMeasurement) -> float:
    return rank.compute_relative_error or 0.0


def _text(lag: Lag) -> str:
    than = f"the median of {lag.peer_count} ranks" if lag.peer_count > 1 else "a rank"
    seconds = f"{_seconds(lag.rank):.3g} s a step against {lag.median_seconds:.3g} s"
    return (
        f"rank {lag.rank.rank} computes {100 * lag.behind:.0f} % longer than {than} with the same shapes on other nodes "
        f"({seconds}); check its clocks, its temperature and what else runs there"
    )
