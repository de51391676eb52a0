"""The process groups of a configuration: one for every mesh dimension along which a rank communicates."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from executor.engine import GroupKey, RankContext
from executor.parallel.collectives import Clock, ProcessGroup, group_options
from search_spaces.mesh import CONTEXT, DATA, EXPERT, EXPERT_DATA, EXPERT_TENSOR, PIPELINE, TENSOR, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The groups over which one set of parameters is reduced and sharded."""

    mesh: Mesh
    tensor: ProcessGroup
    shard: ProcessGroup
    replica: ProcessGroup
    near_group: ProcessGroup | None
    """Nearby ranks of `shard` that share a second copy of the parameters; None: there is no second copy."""


class ParallelGroups:
    """This rank's group along each dimension. Every rank builds them, in the same order, and parts with them by `close`.

    Where the ranks go on to another trial (`RankContext.reusable_groups`), groups of the same ranks are taken over from the
    trial before, with the connections that they have made, and others of it are destroyed.
    """

    def __init__(self, mesh: Mesh, context: RankContext, tied_ranks: tuple[int, int] | None = None) -> None:
        """`tied_ranks`: pipeline ranks that hold the copies of a tied weight; None: no weight has two copies."""
        self.mesh, self.rank, self.device = mesh, context.rank, context.device
        self.coordinates = mesh.coordinates(context.rank)
        self.clock = Clock()
        """Time that this rank waits, over all groups."""
        self._world_size = context.world_size
        self._reusable = context.reusable_groups
        self._own: dict[GroupKey, dist.ProcessGroup | None] = {}
        self.by_dimension: list[tuple[str, ProcessGroup]] = []
        """Every group with the dimension under which its traffic is reported."""
        self.tensor = self._group(TENSOR, mesh.groups((TENSOR,)))
        self.context = self._group(CONTEXT, mesh.groups((CONTEXT,)))
        self.pipeline = self._group(PIPELINE, mesh.groups((PIPELINE,)))
        self.shard = self._group(DATA, mesh.shard_groups())
        # Name under which traffic between copies of the sharded states is reported (HSDP).
        self.replica = self._group("replica", mesh.replica_groups())
        # Name under which gathers from the second copy of parameters are reported (`secondary_shard_size`).
        self._near_group = self._group("near", mesh.near_groups()) if mesh.secondary_shard else None
        self.tied = self._tied_group(tied_ranks)
        self.expert = self._group(EXPERT, mesh.expert_groups())
        slices = mesh.expert_slices
        self.expert_tensor = self._group(EXPERT_TENSOR, mesh.expert_tensor_groups()) if slices < mesh.tensor else self.tensor
        apart = mesh.places_experts_apart
        self._expert_data = self._group(EXPERT_DATA, mesh.expert_data_groups()) if apart else self.shard
        _destroy(self._reusable)

    @property
    def common(self) -> Sharing:
        """Groups of the parameters that every data-parallel rank holds."""
        return Sharing(mesh=self.mesh, tensor=self.tensor, shard=self.shard, replica=self.replica, near_group=self._near_group)

    @property
    def of_experts(self) -> Sharing:
        """Groups of the experts of this rank. They have no second copy, because nearby ranks hold different experts."""
        single = ProcessGroup(None, 1, 0)
        return Sharing(mesh=self.mesh, tensor=self.expert_tensor, shard=self._expert_data, replica=single, near_group=None)

    def collectives(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """(operation, mesh dimension) -> (count, bytes of the full messages) so far."""
        total: dict[tuple[str, str], tuple[int, int]] = {}
        for dimension, group in self.by_dimension:
            for operation, (count, size) in group.sent.items():
                before = total.get((operation, dimension), (0, 0))
                total[operation, dimension] = (before[0] + count, before[1] + size)
        return total

    def close(self) -> None:
        """Leave the groups to the next trial, or destroy them; the default group stays. May be called twice."""
        if self._reusable is None:
            _destroy(self._own)
        else:
            self._reusable.update(self._own)
            self._own.clear()

    def _group(self, dimension: str, groups: Sequence[Sequence[int]]) -> ProcessGroup:
        group = ProcessGroup(*self._process_group(dimension, groups), self.clock)
        self.by_dimension.append((dimension, group))
        return group

    def _process_group(self, dimension: str, groups: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup | None, int, int]:
        """This rank's group, its size and this rank's index in it."""
        mine = next((ranks for ranks in groups if self.rank in ranks), [self.rank])
        process_group = None
        if max(map(len, groups), default=1) == self._world_size:
            process_group = dist.group.WORLD if self._world_size > 1 else None
        elif max(map(len, groups), default=1) > 1:
            ranks_of_all = tuple(map(tuple, groups))
            key = dimension, ranks_of_all, sum(group_key[:2] == (dimension, ranks_of_all) for group_key in self._own)
            earlier = {} if self._reusable is None else self._reusable
            process_group = self._own[key] = earlier.pop(key) if key in earlier else _new_groups(groups, mine)
        return process_group, len(mine), list(mine).index(self.rank)

    def _tied_group(self, stages: tuple[int, int] | None) -> ProcessGroup | None:
        """The ranks that hold the two copies of a tied weight; None if this rank holds none, or both."""
        if stages is None or stages[0] == stages[1]:
            return None
        pairs = [[ranks[stages[0]], ranks[stages[1]]] for ranks in self.mesh.groups((PIPELINE,))]
        group = self._group(PIPELINE, pairs)
        return group if group.size > 1 else None


def _new_groups(groups: Sequence[Sequence[int]], mine: Sequence[int]) -> dist.ProcessGroup | None:
    """Create the groups; return this rank's. Every rank must take part, in the same order.

    NCCL's communicators that are bound to a device are splits of that of all ranks: one split makes all groups of a dimension,
    as in torch's DeviceMesh, where `new_group` would make one for each group, in which all ranks take part.
    """
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:
        return dist.split_group(split_ranks=[list(ranks) for ranks in groups], pg_options=group_options(dist.get_backend()))
    own_group = None
    for ranks in groups:
        group = dist.new_group(list(ranks), pg_options=group_options(dist.get_backend()))
        if ranks is mine:
            own_group = group
    return own_group


def _destroy(groups: MutableMapping[GroupKey, dist.ProcessGroup | None] | None) -> None:
    """Destroy all of them, in the same order on every rank."""
    while groups:
        _, group = groups.popitem()
        if group is not None and dist.is_initialized():  # else all groups were aborted, after a failure
            dist.destroy_process_group(group)
