"""Balance of experts' loads without a loss: each router's bias of the choice of experts follows the loads of a step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from executor.parallel.experts import Experts
from executor.parallel.groups import ParallelGroups


class RouterBalance:
    """Moves the biases of this rank's routers after each step [Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, 2.2;
    DeepSeek-AI 2024, DeepSeek-V3, 2.1.2]: bias += rate x sign(mean load - load).

    1. Loads are the numbers of choices of a step in the whole batch. Each layer counts those of its tokens in backward, so that
       a recomputed micro-batch counts once (`Experts.count_loads`).
    2. After the step they are summed over the ranks with other tokens: those of data and context and, if fewer ranks than the
       tensor ranks divide each expert, the tensor ranks too. These may count a token several times, each token equally often,
       which changes no sign. All layers of a rank take one message for each group.
    """

    def __init__(self, modules: Iterable[nn.Module], rate: float, groups: ParallelGroups) -> None:
        inner = (layer for module in modules for layer in module.modules())
        self._layers = [layer for layer in inner if isinstance(layer, Experts) and layer.correction is not None]
        self._rate = rate
        apart = groups.expert_tensor.size < groups.tensor.size
        self._groups = [groups.shard, groups.replica, *([groups.tensor] if apart else [])]
        for layer in self._layers:
            layer.count_loads()

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the loads counted since the last call. Every rank must call it."""
        if not self._layers:
            return
        loads = torch.stack([_loads(layer) for layer in self._layers])
        for group in self._groups:
            group.all_reduce(loads).wait()
        # The mean times the number of experts, so that the sign is that of whole numbers.
        signs = (loads.sum(-1, keepdim=True) - loads * loads.shape[-1]).sign()
        for layer, sign in zip(self._layers, signs, strict=True):
            assert layer.correction is not None
            layer.correction.add_(sign, alpha=self._rate)
        self.drop()

    def drop(self) -> None:
        """Forget the loads counted so far."""
        for layer in self._layers:
            _loads(layer).zero_()


def _loads(layer: Experts) -> Tensor:
    assert layer.loads is not None  # `count_loads` has made it
    return layer.loads
