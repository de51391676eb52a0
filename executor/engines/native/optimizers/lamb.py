"""LAMB: AdamW with each parameter's step scaled to the norm of the parameter."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from executor.engines.native.layout import Slot
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, Shares, share_of
from search_spaces.optimizers import BETAS, LAMB_EPSILON
from search_spaces.training.offload_files import CHUNK_ELEMENTS


class Lamb(DeviceOptimizer):
    """A step [You et al. 2020, Large Batch Optimization for Deep Learning, algorithm 2]:

    1. m, v as in Adam, bias-corrected; u = m / (sqrt(v) + epsilon) + decay * w, stored in the gradient's memory.
    2. |w|^2 and |u|^2 of every parameter: of this rank's shares, then summed over the ranks of the group, and for sliced
       matrices over the tensor ranks: 2 numbers per parameter, in one message each.
    3. w -= rate * |w| / |u| * u; the ratio is 1 if one of them is 0.

    So the norms are of whole parameters, wherever their parts are. The ratio is not bounded, as in the paper's experiments.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, shares.layout)
        self._shares, self._hyperparameters = shares, hyperparameters
        self._first, self._second = torch.zeros_like(master), torch.zeros_like(master)
        self._sliced = [index for index, slot in enumerate(self.layout.slots) if slot.name in shares.split]
        self._steps = 0

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._steps += 1
        squares = torch.empty(2, len(self.layout.slots), dtype=self.master.dtype, device=self.master.device)
        for index, slot in enumerate(self.layout.slots):
            direction, weights = share_of(gradient, slot), self._weights(slot)
            self._compute_direction(slot, direction, weights)
            squares[0, index] = torch.linalg.vector_norm(weights).square()
            squares[1, index] = torch.linalg.vector_norm(direction).square()
        self._sum(squares)
        ratios = torch.where((squares > 0).all(0), (squares[0] / squares[1]).sqrt(), 1.0)
        for index, slot in enumerate(self.layout.slots):
            direction = share_of(gradient, slot).mul_(ratios[index])
            self._weights(slot).sub_(direction, alpha=self._hyperparameters.learning_rate)

    def _compute_direction(self, slot: Slot, gradient: Tensor, weights: Tensor) -> None:
        """Replace the gradient by the direction of the step, in chunks, so that temporaries are small."""
        first_decay, second_decay = BETAS
        first_scale, second_scale = 1 - first_decay**self._steps, 1 - second_decay**self._steps
        for start, end in itertools.pairwise([*range(0, slot.shard_elements, CHUNK_ELEMENTS), slot.shard_elements]):
            part = gradient[start:end]
            first = self._first[slot.offset + start : slot.offset + end].lerp_(part, 1 - first_decay)
            second = self._second[slot.offset + start : slot.offset + end].mul_(second_decay)
            second.addcmul_(part, part, value=1 - second_decay)
            root = (second / second_scale).sqrt_().add_(LAMB_EPSILON)
            torch.div(first, root, out=part).div_(first_scale)
            part.add_(weights[start:end], alpha=self._hyperparameters.weight_decay)

    def _sum(self, squares: Tensor) -> None:
        shares = self._shares
        if shares.layout.ranks > 1:
            shares.group.all_reduce(squares).wait()
        if self._sliced and shares.tensor.size > 1:
            sliced = squares[:, self._sliced].contiguous()
            shares.tensor.all_reduce(sliced).wait()
            squares[:, self._sliced] = sliced

    def _states(self) -> Iterable[Tensor]:
        return self._first, self._second
