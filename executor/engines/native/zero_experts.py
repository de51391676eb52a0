"""ZeRO 0-3 with expert parallelism: two shardings of one module."""

from collections.abc import Iterator

import torch
from torch import Tensor

from executor.engines.native.checkpoint import Piece
from executor.engines.native.zero import ShardedModel
from executor.parallel.groups import ParallelGroups
from executor.parallel.replica import ModelPart, Replica
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


class ShardedExperts(Replica):
    """Common parameters are sharded over all data-parallel ranks; experts over the ranks that hold the same ones.

    An expert processes the tokens of all ranks of its expert-parallel group, so its gradient already is the sum over them; it
    is reduced only over the ranks with the same experts [Rajbhandari et al. 2022, DeepSpeed-MoE, 5.2]. These include ranks of a
    tensor group that do not divide each expert, since each has its own part of the group's tokens. Bucket and prefetch sizes
    apply to each of the two shardings separately.
    """

    reports_waits = True

    def __init__(
        self, part: ModelPart, config: TrialConfig, workload: Workload, groups: ParallelGroups, device: torch.device
    ) -> None:
        def is_expert(name: str) -> bool:
            return name in part.experts

        self.module, self._groups = part.module, groups
        common = ShardedModel(part, config, workload, groups.common, device, lambda name: not is_expert(name))
        experts = ShardedModel(part, config, workload, groups.of_experts, device, is_expert)
        self._common, self._experts, self._both = common, experts, (common, experts)
        self.sharded = common.sharded

    def begin_step(self) -> None:
        for shards in self._both:
            shards.begin_step()

    def begin_micro_batch(self, last: bool) -> None:
        for shards in self._both:
            shards.begin_micro_batch(last)

    def gradients_written(self) -> None:
        for shards in self._both:
            shards.gradients_written()

    def end_micro_batch(self) -> None:
        for shards in self._both:
            shards.end_micro_batch()

    def end_step(self) -> None:
        for shards in self._both:
            shards.end_step()

    def finish_gradients(self) -> None:
        for shards in self._both:
            shards.finish_gradients()

    def tied_gradient(self) -> Tensor | None:
        return self._common.tied_gradient()

    @torch.no_grad()
    def squared_norm(self, counts_tied: bool) -> Tensor:
        """Without sharding, every rank holds all common parameters but only its own experts, whose norm must be summed.

        The caller sums the result over tensor ranks, as if each had its own slice of experts.
        """
        groups, experts = self._groups, self._experts.squared_norm(counts_tied)
        if not self.sharded:
            groups.expert.all_reduce(experts).wait()
            if groups.expert_tensor.size < groups.tensor.size:
                groups.expert_tensor.all_reduce(experts).wait()
                experts = experts / groups.tensor.size
        return self._common.squared_norm(counts_tied) + experts

    def update(self, scale: Tensor | None) -> None:
        for shards in self._both:
            shards.update(scale)

    def skip_update(self) -> None:
        for shards in self._both:
            shards.skip_update()

    def settled(self) -> bool:
        return all(shards.settled() for shards in self._both)

    def tagged_storages(self) -> Iterator[tuple[str, Tensor]]:
        for shards in self._both:
            yield from shards.tagged_storages()

    def full_parameters(self) -> dict[str, Tensor]:
        """This rank's experts and the common parameters, by name."""
        return {name: value for shards in self._both for name, value in shards.full_parameters().items()}

    def saved_pieces(self) -> Iterator[Piece]:
        for shards in self._both:
            yield from shards.saved_pieces()

    def state_loaded(self) -> None:
        for shards in self._both:
            shards.state_loaded()

    def close(self) -> None:
        for shards in self._both:
            shards.close()
