"""Low-rank adapters beside frozen matrices [Hu et al. 2021, LoRA]."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.training.adapters import ALPHA_PER_RANK

INWARD, OUTWARD = "lora_a", "lora_b"
"""The two factors, as PEFT calls them: [rank, inputs], drawn as any matrix, and [outputs, rank], zero at first, so that the
first step computes what the model without adapters does."""


class LowRank(nn.Module):
    """What an adapter adds to the result of its matrix W: alpha / rank * B A x.

    Tensor ranks divide A and B as they divide W, and exchange nothing more in a micro-batch:

    | W | its ranks have | A | B | a summand of its gradient on each rank |
    |---|---|---|---|---|
    | ColumnLinear | a slice of the outputs | whole | a slice of its rows | A: what reaches it comes from the rank's outputs |
    | RowLinear | a slice of the inputs | a slice of its columns | whole | B: it meets the rank's summand of A x alone |

    So a RowLinear's B works on a summand, before the sum that W's result needs anyhow. The gradients that are summands are
    summed once a step, as those of norms under sequence parallelism are.
    """

    def __init__(self, matrix: nn.Linear, rank: int, split: dict[str, int]) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, matrix.in_features))
        self.lora_b = nn.Parameter(torch.empty(matrix.out_features, rank))
        self.split = split
        """Factor -> the dimension of which each tensor-parallel rank holds a slice."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.lora_a) * ALPHA_PER_RANK, self.lora_b)


def adapted_result(result: Tensor, adapter: LowRank | None, x: Tensor) -> Tensor:
    """What a matrix gives for `x`, with what its adapter adds."""
    return result if adapter is None else result + adapter(x)
