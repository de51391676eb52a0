"""Trained parts of a frozen model: adapters [Hu et al. 2021, LoRA; Houlsby et al. 2019] and virtual tokens."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.training.adapters import ALPHA_PER_RANK

INWARD, OUTWARD = "lora_a", "lora_b"
"""PEFT's names of the two factors: [rank, inputs], initialized like other matrices, and [outputs, rank], initialized to zero,
so that the first step computes the same as the model without adapters."""


class LowRank(nn.Module):
    """The adapter's addition to the result of its matrix W: alpha / rank * B A x.

    Tensor ranks divide A and B as they divide W, without additional communication in a micro-batch:

    | W | its ranks have | A | B | a summand of its gradient on each rank |
    |---|---|---|---|---|
    | ColumnLinear | a slice of the outputs | whole | a slice of its rows | A: its gradient comes only from the rank's outputs |
    | RowLinear | a slice of the inputs | a slice of its columns | whole | B: its input is only the rank's summand of A x |

    So a RowLinear's B is applied to a summand, before the sum that W's result needs in any case. Gradients that are summands
    are summed once per step, like those of norms under sequence parallelism.
    """

    def __init__(self, matrix: nn.Linear, rank: int, split: dict[str, int]) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, matrix.in_features))
        self.lora_b = nn.Parameter(torch.empty(matrix.out_features, rank))
        self.split = split
        """Factor -> the dimension that is sliced over tensor-parallel ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.lora_a) * ALPHA_PER_RANK, self.lora_b)


def adapted_result(result: Tensor, adapter: LowRank | None, x: Tensor) -> Tensor:
    """The `result` of a matrix for `x`, plus that of its adapter, if any."""
    return result if adapter is None else result + adapter(x)


class Bottleneck(nn.Module):
    """Adapter after attention or the MLP, before the residual addition: x + up(gelu(down(x))).

    `up` is initialized to zero, so that the first step computes the same as the model without adapters. Like norms, both
    matrices are whole on every tensor-parallel rank: x is whole there too, or a share of the tokens, so a micro-batch needs no
    communication. Under sequence parallelism the gradients are summands, which are summed once per step with those of norms.
    """

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden, size), nn.Linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(functional.gelu(self.down(x)))
        return x + added


def apply_adapter(adapter: nn.Module | None, x: Tensor) -> Tensor:
    """The output x of a sub-layer, passed through its adapter if it has one."""
    if adapter is None:
        return x
    result: Tensor = adapter(x)
    return result


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
