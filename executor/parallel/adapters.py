"""Adapters beside and behind frozen modules: low-rank [Hu et al. 2021, LoRA] and bottlenecks [Houlsby et al. 2019]."""

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


WIDENING = "_adapter.up.weight"
"""Suffix of the name of the matrix that is initialized to zero."""


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
