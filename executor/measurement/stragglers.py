"""Which nodes hold a trial back: ranks with the same shapes have the same work, and so compute as long."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.trial import NodeEvent, RankMeasurement
from search_spaces.trial_config import TrialConfig

BEHIND = 0.05
"""Share by which a rank must compute longer than the others before its node is slow."""
ERRORS = 3.0
"""Standard errors by which it must be beyond that: of 200 jobs of 20 trials on 16 equal ranks, chance blames a node in none."""
MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median of many normal values, over that of their mean."""

NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation, which one or two outliers leave as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far a rank is behind those with its shapes on other nodes."""

    rank: RankMeasurement
    others: int
    behind: float
    """By how much longer it computes than their median, as a share of that."""
    error: float
    """Standard error of `behind`."""
    median_seconds: float
    """Of a step of the others, waits left out."""

    @property
    def is_slow(self) -> bool:
        """Whether the lag is beyond the bound by more than noise makes it."""
        return self.behind - ERRORS * self.error > BEHIND


def slow_nodes(config: TrialConfig, ranks: Sequence[RankMeasurement], between: float) -> list[NodeEvent]:
    """Return the nodes that are slow, each with the rank that is furthest behind.

    1. Ranks that stand at the same place of the pipeline have the same shapes: tensor, context and data ranks share out
       evenly what there is. Ranks of different stages are not compared.
    2. Each rank's seconds of computing, waits for others left out, are held against the median of those on other nodes. With
       all of them on one node there is nobody to blame.
    3. A node is slow where a rank of it is behind by more than `BEHIND`, and by more than its own error and the median's
       explain: what each rank's steps spread by, and `between`, what repeats on a machine differ by, or what the other ranks
       differ by where that is more.

    Ranks that tell no times, or not how sure they are, are left out.
    """
    lags = [lag for group in _alike(config, ranks) for lag in _lags(group, between) if lag.is_slow]
    worst: dict[str, Lag] = {}
    for lag in lags:
        node = node_of(lag.rank)
        if node not in worst or worst[node].behind < lag.behind:
            worst[node] = lag
    return [NodeEvent(node=node, kind="slow", message=_text(lag)) for node, lag in sorted(worst.items())]


def node_of(rank: RankMeasurement) -> str:
    """The name of the node that a rank ran on."""
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
    found = []
    for rank in group:
        others = [other for other in group if node_of(other) != node_of(rank)]
        if others:
            found.append(_lag(rank, others, between))
    return found


def _lag(rank: RankMeasurement, others: Sequence[RankMeasurement], between: float) -> Lag:
    middle = median(_seconds(other) for other in others)
    # Where the others differ by more than was expected, so may this one by chance.
    scatter = max(between, NORMAL * median(abs(_seconds(other) / middle - 1.0) for other in others))
    typical = math.hypot(median(_error(other) for other in others), scatter)
    # The median of one or two values is their mean.
    of_median = typical * (MEDIAN_ERROR if len(others) > 2 else 1.0) / math.sqrt(len(others))
    ratio = _seconds(rank) / middle
    error = ratio * math.hypot(_error(rank), scatter, of_median)
    return Lag(rank=rank, others=len(others), behind=ratio - 1.0, error=error, median_seconds=middle)


def _seconds(rank: RankMeasurement) -> float:
    return rank.compute_seconds_per_step or 0.0


def _error(rank: RankMeasurement) -> float:
    return rank.compute_relative_error or 0.0


def _text(lag: Lag) -> str:
    than = f"the median of {lag.others} ranks" if lag.others > 1 else "a rank"
    seconds = f"{_seconds(lag.rank):.3g} s a step against {lag.median_seconds:.3g} s"
    return (
        f"rank {lag.rank.rank} computes {100 * lag.behind:.0f} % longer than {than} with the same shapes on other nodes "
        f"({seconds}); look at its clocks, its temperature and at what else runs there"
    )
