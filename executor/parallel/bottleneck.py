"""Bottleneck adapters after the sub-layers of a frozen model [Houlsby et al. 2019]."""

from torch import Tensor, nn
from torch.nn import functional

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
