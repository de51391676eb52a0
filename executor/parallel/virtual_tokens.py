"""Virtual tokens, which are trained while the model is frozen: prefixes of every attention, a prompt before the input."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class Prefix(nn.Module):
    """Keys and values that stand before those of the tokens in one attention [Li and Liang 2021].

    Every token looks at all of them, whatever the window. They have no position, since they are trained as they are looked at,
    and the tokens keep theirs. Tensor-parallel ranks divide them by key-value heads, as they do what computes keys and values;
    context-parallel ranks have them whole, and each gets the gradient of its own queries, or heads.
    """

    split: ClassVar[dict[str, int]] = {"keys": 0, "values": 0}
    """Parameter -> the dimension of which each tensor-parallel rank holds a slice."""

    def __init__(self, heads: int, length: int, head_dim: int) -> None:
        super().__init__()
        self.length = length
        self.keys = nn.Parameter(torch.empty(heads, length, head_dim))
        self.values = nn.Parameter(torch.empty(heads, length, head_dim))

    def forward(self, key: Tensor, value: Tensor, first_head: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, tokens, head_dim], heads from `first_head` on, to the same with `length` more before the tokens."""
        heads = slice(first_head, first_head + key.shape[1])
        return in_front(self.keys[heads], key), in_front(self.values[heads], value)


class Prompt(nn.Module):
    """Rows that stand before those that tokens have in the embedding table [Lester et al. 2021].

    They pass all layers as tokens do, from position 0 on where positions are rotated; learned positions are of the tokens
    alone. No loss is computed of them. Every tensor-parallel rank has all rows.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.rows = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same with `length` more before the tokens."""
        return in_front(self.rows, x)


def in_front(virtual: Tensor, x: Tensor) -> Tensor:
    """`virtual` [..., virtual tokens, width] before the tokens of every sample of `x` [batch, ..., tokens, width]."""
    return torch.cat((virtual.expand(x.shape[0], *virtual.shape), x), dim=-2)
