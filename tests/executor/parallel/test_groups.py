"""Process groups that a warm gang's trials leave to one another."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.engine import RankContext
from executor.parallel import groups as groups_module
from executor.parallel.groups import ParallelGroups
from search_spaces.mesh import make_mesh
from search_spaces.trial_config import TrialConfig


def test_a_trial_takes_over_the_groups_of_the_same_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        warm = RankContext(rank=3, world_size=8, device=torch.device("cpu"), reusable_groups={})

        def groups_of(context: RankContext, **knobs: int) -> ParallelGroups:
            return ParallelGroups(make_mesh(TrialConfig().replace(dict(knobs)), 8), context)

        first = groups_of(warm, tensor_parallel_size=2)
        first.close()
        first.close()
        made = len(_world.pg_map)
        second = groups_of(warm, tensor_parallel_size=2)
        assert second.tensor.group is first.tensor.group
        assert second.shard.group is first.shard.group
        assert second.tensor.sent == {}
        assert len(_world.pg_map) == made
        second.close()
        # Of another shape: those that it lacks are made, and those that it has no use for are gone.
        third = groups_of(warm, tensor_parallel_size=4)
        assert third.tensor.group is not first.tensor.group
        assert first.tensor.group not in _world.pg_map
        third.close()
        # Ranks that do not go on leave nothing.
        left = len(_world.pg_map)
        groups_of(RankContext(rank=3, world_size=8, device=torch.device("cpu")), tensor_parallel_size=2).close()
        assert len(_world.pg_map) == left
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bound", [True, False])
def test_groups_of_a_device_are_one_split_a_dimension(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 64 ranks, where `new_group` would be called by all of them for each group."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    splits: list[list[list[int]]] = []
    made: list[list[int]] = []
    new_group = dist.new_group

    def split(split_ranks: list[list[int]], pg_options: object) -> dist.ProcessGroup | None:
        splits.append(split_ranks)
        return new_group(next(ranks for ranks in split_ranks if 5 in ranks))

    def make(ranks: list[int], pg_options: object) -> object:
        made.append(ranks)
        return new_group(ranks)

    try:
        monkeypatch.setattr(groups_module.dist, "split_group", split)
        monkeypatch.setattr(groups_module.dist, "new_group", make)
        assert dist.group.WORLD is not None
        if bound:
            monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda:0"), raising=False)
        config = TrialConfig().replace({"tensor_parallel_size": 4, "context_parallel_size": 2, "pipeline_parallel_size": 2})
        groups = ParallelGroups(make_mesh(config, 64), RankContext(rank=5, world_size=64, device=torch.device("cpu")))
        assert (groups.tensor.size, groups.context.size, groups.pipeline.size, groups.shard.size) == (4, 2, 2, 8)
        counts = [len(ranks) for ranks in splits]
        assert (counts, len(made)) == (([16, 32, 32, 8], 0) if bound else ([], 88))
        assert all(sorted(itertools.chain(*ranks)) == list(range(64)) for ranks in splits)
        groups.close()
    finally:
        dist.destroy_process_group()
