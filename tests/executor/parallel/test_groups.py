"""Process groups that a warm gang's trials leave to one another."""

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.engine import RankContext
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
