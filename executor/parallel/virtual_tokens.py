"""Trainable virtual tokens of a frozen model: prefixes in every attention, a prompt before the input."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class Prefix(nn.Module):
    """Keys and values that precede those of the tokens in one attention [Li and Liang 2021].

    Every token attends to all of them, whatever the window. They have no position, since they are trained directly as keys, and
    the tokens keep theirs. Tensor-parallel ranks divide them by key-value heads, like the key and value projections.
    Context-parallel ranks have them whole, and each gets the gradient of its own queries or heads.
    """

    split: ClassVar[dict[str, int]] = {"keys": 0, "values": 0}
    """Parameter -> the dimension that is sliced over tensor-parallel ranks."""

    def __init__(self, heads: int, length: int, head_dim: int) -> None:
        super().__init__()
        self.length = length
        self.keys = nn.Parameter(torch.empty(heads, length, head_dim))
        self.values = nn.Parameter(torch.empty(heads, length, head_dim))

    def forward(self, key: Tensor, value: Tensor, first_head: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, tokens, head_dim], heads from `first_head` on, to the same with `length` more before the tokens."""
        heads = slice(first_head, first_head + key.shape[1])
        return prepend(self.keys[heads], key), prepend(self.values[heads], value)


class Prompt(nn.Module):
    """Rows that precede the embeddings of the tokens [Lester et al. 2021].

    They pass through all layers like tokens, from position 0 on with rotary positions; learned positions are only for the
    tokens. They have no loss. Every tensor-parallel rank has all rows.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.rows = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same with `length` more before the tokens."""
        return prepend(self.rows, x)


def prepend(virtual: Tensor, x: Tensor) -> Tensor:
    """`virtual` [..., virtual tokens, width] before the tokens of every sample of `x` [batch, ..., tokens, width]."""
    return torch.cat((virtual.expand(x.shape[0], *virtual.shape), x), dim=-2)
