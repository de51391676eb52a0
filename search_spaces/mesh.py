"""Where each rank stands among the parallel dimensions, and which ranks form a group."""

from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig

TENSOR, CONTEXT, DATA, PIPELINE = "tensor", "context", "data", "pipeline"
EXPERT, EXPERT_DATA = "expert", "expert_data"
"""Ranks that divide the experts, and those that hold the same ones: both out of data x context, no dimensions of their own."""
DIMENSIONS = (TENSOR, CONTEXT, DATA, PIPELINE)
"""Names of the mesh dimensions, as they are reported."""
ABBREVIATIONS = {"tp": TENSOR, "cp": CONTEXT, "dp": DATA, "pp": PIPELINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks as a grid: tensor x context x data x pipeline."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    order: str = "tp-cp-dp-pp"
    """Innermost first: ranks that differ in the first dimension alone are neighbours, so tensor ranks share a node."""
    shard: int = 0
    """Ranks that share one copy of the sharded states, out of data x context; 0: all of them."""
    near: int = 0
    """Of those, neighbours that share a second copy of the parameters; 0: there is none."""
    expert: int = 1
    """Data ranks that divide the experts among them: neighbours along data, with the same tokens' context rank."""

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def zero_ranks(self) -> int:
        """Ranks with the same parameters, whose gradients are summed and whose states are divided: data x context."""
        return self.data * self.context

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the sharded states."""
        return self.shard or self.zero_ranks

    def size(self, dimension: str) -> int:
        """Ranks along a dimension of `DIMENSIONS`."""
        size: int = getattr(self, dimension)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Dimension -> the rank's place along it."""
        place = {}
        for short in self.order.split("-"):
            dimension = ABBREVIATIONS[short]
            rank, place[dimension] = divmod(rank, self.size(dimension))
        return place

    def groups(self, dimensions: Sequence[str]) -> list[list[int]]:
        """Ranks that differ in these dimensions alone, each group in the order of their places, the first dimension innermost.

        Every rank is in one group.
        """
        places = [self.coordinates(rank) for rank in range(self.world_size)]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(range(self.world_size), key=lambda rank: [places[rank][name] for name in reversed(dimensions)]):
            fixed = tuple(places[rank][name] for name in DIMENSIONS if name not in dimensions)
            found.setdefault(fixed, []).append(rank)
        return list(found.values())

    def shard_groups(self) -> list[list[int]]:
        """Ranks that share one copy of the sharded states: neighbours among the data and context ranks."""
        size = self.shard_ranks
        return [group[first : first + size] for group in self._zero_groups() for first in range(0, len(group), size)]

    def replica_groups(self) -> list[list[int]]:
        """Ranks that hold the same part of the sharded states."""
        size = self.shard_ranks
        return [group[first::size] for group in self._zero_groups() for first in range(size)]

    def near_groups(self) -> list[list[int]]:
        """Ranks that share a second copy of the parameters: neighbours among those that share the first."""
        size = self.near
        return [group[first : first + size] for group in self.shard_groups() for first in range(0, len(group), size)]

    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold different experts and exchange tokens: neighbours along the data dimension alone."""
        size = self.expert
        return [group[first : first + size] for group in self.groups((DATA,)) for first in range(0, len(group), size)]

    def expert_data_groups(self) -> list[list[int]]:
        """Ranks that hold the same experts, whose gradients are summed and whose states are divided."""
        return [
            [rank for rank in group if self.coordinates(rank)[DATA] % self.expert == place]
            for group in self._zero_groups()
            for place in range(self.expert)
        ]

    def _zero_groups(self) -> list[list[int]]:
        return self.groups((CONTEXT, DATA))


def make_mesh(config: TrialConfig, world_size: int) -> Mesh:
    """The grid of a configuration on `world_size` ranks."""
    return Mesh(
        tensor=config.tensor_parallel_size,
        context=config.context_parallel_size,
        data=config.data_parallel_size(world_size),
        pipeline=config.pipeline_parallel_size,
        order=config.rank_order,
        shard=config.hsdp_shard_size if config.zero_stage == 3 else 0,
        near=config.secondary_shard_size if config.zero_stage == 3 else 0,
        expert=config.expert_parallel_size,
    )
