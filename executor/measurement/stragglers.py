"""Finds the nodes that slow a trial down: ranks with the same shapes have the same work and should take the same time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.trial import NodeEvent, RankMeasurement
from search_spaces.trial_config import TrialConfig

BEHIND = 0.05
"""Relative excess of a rank's compute time over the others' above which its node is slow."""
ERRORS = 3.0
"""Standard errors by which the excess must exceed that: in 200 jobs of 20 trials on 16 equal ranks there is no false alarm."""

NORMAL = 1.4826
"""Ratio of the standard deviation of normal values to their median absolute deviation, which is robust to a few outliers."""


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

    @property
    def is_slow(self) -> bool:
        """Whether the lag exceeds the bound by more than noise explains."""
        return self.behind - ERRORS * self.error > BEHIND


def slow_nodes(config: TrialConfig, ranks: Sequence[RankMeasurement], between: float) -> list[NodeEvent]:
    """Return the slow nodes, each with its slowest rank.

    1. Ranks at the same pipeline position have the same shapes, because tensor, context and data ranks divide the work evenly.
       Ranks of different stages are not compared.
    2. Each rank's compute time, without waits for others, is compared with the median of the ranks on other nodes. If all ranks
       are on one node, there is nothing to compare.
    3. A node is slow if one of its ranks is behind by more than `BEHIND`, and by more than its own error and the median's error
       explain. These consist of the spread of each rank's steps and of `between`, the variation between repetitions on a
       machine, or the variation among the other ranks if that is larger.

    Ranks without times or without their error are left out.
    """
    lags = [lag for group in _alike(config, ranks) for lag in _lags(group, between) if lag.is_slow]
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
    scatter = max(between, NORMAL * median(abs(_seconds(other) / middle - 1.0) for other in peers))
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
