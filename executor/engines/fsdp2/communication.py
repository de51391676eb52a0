"""Counts the bytes that FSDP2's unmodified collectives send."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from executor.parallel.collectives import Group, all_gather_single, reduce_scatter_single
from executor.parallel.groups import ParallelGroups


class CountedAllGather(AllGather):
    """The default all-gather, counted."""

    def __init__(self, account: Group) -> None:
        self._account = account

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._account.count("all_gather", output_tensor)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(ReduceScatter):
    """The default reduce-scatter, counted. With copies of the shards (HSDP), FSDP2 then all-reduces its result."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._groups.shard.count("reduce_scatter", input_tensor)
        if self._groups.replica.size > 1:
            self._groups.replica.count("all_reduce", output_tensor)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def reduce_unused(module: FSDPModule) -> None:
    """Reduce zeros for parameters without a gradient: otherwise ranks that run other branches would send other collectives.

    torch 2.11 has no method for it. There every parameter group sets the zeros before its own reduction.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    for unit in module.modules():  # type: ignore[attr-defined]
        group: Any = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is not None:
            group.post_backward = partial(_reduce_with_zeros, group, group.post_backward)


def _reduce_with_zeros(group: Any, reduce: Callable[..., None], *unused: object) -> None:
    for item in group.fsdp_params:
        whole = getattr(item, "_unsharded_param", None)
        if whole is not None and whole.requires_grad and whole.grad is None and item.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
    reduce(*unused)
