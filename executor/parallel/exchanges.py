"""Sums and gathers between tensor-parallel ranks, below autograd."""

import torch
from torch import Tensor

from executor.parallel.collectives import Group


def sum_in_place(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in the memory of `x` if it is contiguous, since no backward needs the summands."""
    total = x.detach().contiguous()
    group.all_reduce(total).wait()
    return total


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Every rank's [batch, tokens, …], concatenated along the tokens."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    return rows.view(group.size, *x.shape).movedim(0, 1).flatten(1, 2)


def gather_features(x: Tensor, group: Group) -> Tensor:
    """Every rank's [..., features], concatenated along the features."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    return rows.view(group.size, *x.shape).movedim(0, -2).flatten(-2)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Sum [batch, tokens, …] over the ranks; each rank gets its share of the tokens."""
    parts = shares_of_tokens(x, group.size)
    own = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    group.reduce_scatter(own.view(-1), parts.view(group.size, -1)).wait()
    return own


def shares_of_tokens(x: Tensor, ranks: int) -> Tensor:
    """[batch, tokens, …] to [ranks, batch, tokens / ranks, …]: each rank's share of the tokens is contiguous."""
    return x.reshape(x.shape[0], ranks, -1, *x.shape[2:]).movedim(1, 0).contiguous()
