"""Bottleneck adapters behind the sub-layers of a frozen model [Houlsby et al. 2019]."""

from torch import Tensor, nn
from torch.nn import functional

WIDENING = "_adapter.up.weight"
"""How the name of the matrix ends that is zero at first."""


class Bottleneck(nn.Module):
    """What follows attention, or the MLP, before its result is added to what went in: x + up(gelu(down(x))).

    `up` is zero at first, so that the first step computes what the model without adapters does. Both matrices are whole on
    every tensor-parallel rank, as norms are: x is whole there too, or a share of the tokens, so that nothing is exchanged in a
    micro-batch. Under sequence parallelism the gradients are summands, which are summed once a step with those of norms.
    """

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(hidden, size), nn.Linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(functional.gelu(self.down(x)))
        return x + added


def behind(adapter: nn.Module | None, x: Tensor) -> Tensor:
    """What a sub-layer gives out, with its adapter where it has one."""
    if adapter is None:
        return x
    result: Tensor = adapter(x)
    return result
