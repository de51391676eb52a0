"""Stochastic gradient descent with momentum."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from executor.engines.native.layout import Layout
from executor.engines.native.offload import Hyperparameters, step_scaled, update_groups
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer
from search_spaces.optimizers import SGD_MOMENTUM


class Sgd(DeviceOptimizer):
    """`torch.optim.SGD` over views of the master vector, one per piece of the gradient; the update is elementwise."""

    def __init__(self, master: Tensor, layout: Layout, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, layout)
        starts = [layout.start(bucket) for bucket in range(len(layout.buckets))]
        self._parameters = [nn.Parameter(master[start : start + layout.columns(bucket)]) for bucket, start in enumerate(starts)]
        fused = hyperparameters.fused and master.dtype == torch.float32
        self._optimizer = torch.optim.SGD(
            update_groups(self._parameters, fused), lr=hyperparameters.learning_rate, momentum=SGD_MOMENTUM,
            weight_decay=hyperparameters.weight_decay, fused=fused, foreach=not fused,
        )  # fmt: skip

    def settled(self) -> bool:
        return bool(self._optimizer.state)

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._update_scaled(gradient, None)

    def _update_scaled(self, gradient: Sequence[Tensor], scale: Tensor | None) -> None:
        for parameter, piece in zip(self._parameters, gradient, strict=True):
            parameter.grad = piece
        step_scaled(self._optimizer, scale)
        self._optimizer.zero_grad()

    def _states(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
