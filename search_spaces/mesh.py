"""The coordinates of each rank in the parallel dimensions, and the process groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig

TENSOR, CONTEXT, DATA, PIPELINE = "tensor", "context", "data", "pipeline"
EXPERT, EXPERT_DATA, EXPERT_TENSOR = "expert", "expert_data", "expert_tensor"
"""Ranks that divide the experts, ranks with the same experts, and ranks that divide each expert: subsets of the ranks of a
pipeline stage (tensor x context x data), not separate dimensions."""
DIMENSIONS = (TENSOR, CONTEXT, DATA, PIPELINE)
"""Names of the mesh dimensions in reports."""
ABBREVIATIONS = {"tp": TENSOR, "cp": CONTEXT, "dp": DATA, "pp": PIPELINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks as a grid: tensor x context x data x pipeline."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    order: str = "tp-cp-dp-pp"
    """Innermost first: ranks that differ only in the first dimension are neighbours, so tensor ranks share a node."""
    shard: int = 0
    """Ranks of data x context over which states are sharded; 0: all of them."""
    secondary_shard: int = 0
    """Neighbours among these that shard a second copy of the parameters; 0: no second copy."""
    expert: int = 1
    """Ranks that divide the experts: of tensor x context x data, neighbours with the same slice of each expert."""
    expert_tensor: int = 0
    """Ranks of a tensor group that divide each expert; 0: all of them."""

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def zero_ranks(self) -> int:
        """Ranks with the same parameters, which reduce gradients together and shard the states: data x context."""
        return self.data * self.context

    @property
    def shard_ranks(self) -> int:
        """Ranks over which states are sharded."""
        return self.shard or self.zero_ranks

    @property
    def expert_slices(self) -> int:
        """Ranks that divide each expert."""
        return self.expert_tensor or self.tensor

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.tensor * self.zero_ranks // (self.expert * self.expert_slices)

    @property
    def places_experts_apart(self) -> bool:
        """Whether experts are divided over other ranks than the rest of the model."""
        return self.expert > 1 or self.expert_slices < self.tensor

    def size(self, dimension: str) -> int:
        """Ranks along a dimension of `DIMENSIONS`."""
        size: int = getattr(self, dimension)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Dimension -> the rank's index along it."""
        index = {}
        for short in self.order.split("-"):
            dimension = ABBREVIATIONS[short]
            rank, index[dimension] = divmod(rank, self.size(dimension))
        return index

    def groups(self, dimensions: Sequence[str]) -> list[list[int]]:
        """Groups of ranks that differ only in these dimensions, sorted with the first dimension innermost.

        Every rank is in one group.
        """
        places = [self.coordinates(rank) for rank in range(self.world_size)]
        ranks_by_coordinates: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(range(self.world_size), key=lambda rank: [places[rank][name] for name in reversed(dimensions)]):
            fixed = tuple(places[rank][name] for name in DIMENSIONS if name not in dimensions)
            ranks_by_coordinates.setdefault(fixed, []).append(rank)
        return list(ranks_by_coordinates.values())

    def shard_groups(self) -> list[list[int]]:
        """Groups over which states are sharded: neighbours among the data and context ranks."""
        size = self.shard_ranks
        return [group[first : first + size] for group in self._zero_groups() for first in range(0, len(group), size)]

    def replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same part of the sharded states."""
        size = self.shard_ranks
        return [group[first::size] for group in self._zero_groups() for first in range(size)]

    def near_groups(self) -> list[list[int]]:
        """Groups that shard a second copy of the parameters: neighbours in a shard group."""
        size = self.secondary_shard
        return [group[first : first + size] for group in self.shard_groups() for first in range(0, len(group), size)]

    def expert_groups(self) -> list[list[int]]:
        """Groups of ranks that hold different experts and exchange tokens.

        The ranks of a stage, counted along tensor, then context, then data, are folded into another grid: the ranks that divide
        each expert innermost, then those that divide the experts, then those with the same experts [Liu et al. 2025, MoE
        Parallel Folding, arXiv 2504.14960, 3.1].
        """
        size = self.expert
        return [group[first : first + size] for group in self._same_slice() for first in range(0, len(group), size)]

    def expert_data_groups(self) -> list[list[int]]:
        """Groups of ranks with the same part of the same experts, which reduce their gradients together and shard their
        states."""
        return [group[index :: self.expert] for group in self._same_slice() for index in range(self.expert)]

    def expert_tensor_groups(self) -> list[list[int]]:
        """Groups of ranks that divide each expert: neighbours in a tensor group."""
        size = self.expert_slices
        return [group[first : first + size] for group in self.groups((TENSOR,)) for first in range(0, len(group), size)]

    def _same_slice(self) -> list[list[int]]:
        """The ranks of each stage that have the same slice of experts, whichever they are."""
        size = self.expert_slices
        return [group[index::size] for group in self.groups((TENSOR, CONTEXT, DATA)) for index in range(size)]

    def _zero_groups(self) -> list[list[int]]:
        return self.groups((CONTEXT, DATA))


def make_mesh(config: TrialConfig, world_size: int) -> Mesh:
    """The mesh of a configuration on `world_size` ranks."""
    return Mesh(
        tensor=config.tensor_parallel_size,
        context=config.context_parallel_size,
        data=config.data_parallel_size(world_size),
        pipeline=config.pipeline_parallel_size,
        order=config.rank_order,
        shard=config.hsdp_shard_size if config.zero_stage == 3 else 0,
        secondary_shard=config.secondary_shard_size if config.zero_stage == 3 else 0,
        expert=config.expert_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
    )
