"""The collectives of one mesh dimension, and how a tensor is marked for the memory account."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

# Older torch has these two under other names, with the same behaviour; in 2.13 the old names warn.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Finished:
    """Stands for a collective over one rank, or one that has ended."""

    def wait(self) -> bool:
        return True


Pending = dist.Work | Finished


class Group:
    """A process group of one mesh dimension. Over one rank, results are copied and nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        self.group, self.size, self.rank = group, size, rank

    def all_reduce(self, value: Tensor) -> Pending:
        """Sum in place, asynchronously."""
        if self.size == 1:
            return Finished()
        return dist.all_reduce(value, group=self.group, async_op=True) or Finished()

    def reduce_scatter(self, output: Tensor, rows: Tensor) -> Pending:
        """Sum `rows` [ranks, n] over the ranks and leave this rank's row in `output` [n], asynchronously."""
        if self.size == 1:
            output.copy_(rows[0])
            return Finished()
        return _reduce_scatter(output, rows.view(-1), group=self.group, async_op=True) or Finished()

    def all_gather(self, rows: Tensor, shard: Tensor) -> Pending:
        """Gather every rank's `shard` [n] into `rows` [ranks, n], asynchronously."""
        if self.size == 1:
            rows[0].copy_(shard)
            return Finished()
        return _all_gather(rows.view(-1), shard, group=self.group, async_op=True) or Finished()


def mark(tag: str, value: Tensor) -> None:
    """Tell a running memory account that `value`'s storage belongs to `tag`. Costs nothing where none runs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        with record_function(f"autotune.tag:{tag}:{value.untyped_storage().data_ptr()}"):
            pass
