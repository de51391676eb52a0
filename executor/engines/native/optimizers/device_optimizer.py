"""Optimizers over this rank's flat master vector on its device: the base class, SGD with momentum, and LAMB."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.layout import BucketLayout, Slot
from executor.engines.native.offload import Hyperparameters, parts_of, step_scaled, update_groups
from executor.engines.native.parameter_shard import ParameterShard
from executor.parallel.collectives import ProcessGroup
from search_spaces.optimizers import BETAS, EPSILON, LAMB_EPSILON, SGD_MOMENTUM
from search_spaces.training.states import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the parameters are distributed over ranks."""

    layout: BucketLayout
    own_row: int
    """Index of this rank among those that shard a parameter."""
    group: ProcessGroup
    """The ranks of the ZeRO group; `layout.ranks` of them hold a share each (1: every rank holds everything)."""
    tensor: ProcessGroup
    split: Mapping[str, int]
    """Parameter -> the dimension that is sliced over tensor-parallel ranks."""
    matrices: frozenset[str]
    """Names of the matrices of the blocks."""


class DeviceOptimizer(ABC):
    """Keeps the master vector and its state on the device. `gradient` comes in pieces, one per reduce bucket, and may be
    overwritten."""

    host_elements = 0
    """Elements whose state is in host memory."""
    chunk_elements = 0

    @property
    def sums_itself(self) -> bool:
        """Whether the next update takes this rank's unreduced gradient and does its own communication."""
        return False

    def __init__(self, master: Tensor, layout: BucketLayout) -> None:
        self.master, self.layout = master, layout

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], shard: ParameterShard, scale: Tensor | None = None) -> None:
        """Update with the `gradient` in the master's dtype, times `scale`, and bring `shard` up to date."""
        self._update_scaled(gradient, scale)
        self.publish(shard)

    def publish(self, shard: ParameterShard) -> None:
        """Pass the current value of every element to `shard`."""
        shard.accept_from_device(0, self.master)
        shard.finish()

    def update_ranges(self) -> list[tuple[int, int]]:
        """The ranges in which a `ParameterShard` may take updated values."""
        return [*parts_of(0, self.master.numel())]

    def begin(self) -> None:  # noqa: B027  nothing is offloaded
        """See `SplitAdamW`; nothing to do, since everything is on the device."""

    def close(self) -> None:  # noqa: B027
        """See `SplitAdamW`."""

    def full_master(self) -> Tensor:
        """The whole master vector."""
        return self.master

    def settled(self) -> bool:
        """Whether all state exists."""
        return True

    def device_tensors(self) -> Iterator[Tensor]:
        """The tensors on the device between steps."""
        yield self.master
        yield from self._states()

    def _update_scaled(self, gradient: Sequence[Tensor], scale: Tensor | None) -> None:
        """`_update` on the gradient times `scale`."""
        if scale is not None and gradient:
            torch._foreach_mul_([*gradient], scale)
        self._update(gradient)

    @abstractmethod
    def _update(self, gradient: Sequence[Tensor]) -> None:
        """Change the master vector; `gradient` may be overwritten."""

    @abstractmethod
    def _states(self) -> Iterable[Tensor]:
        """The tensors of the state."""

    def _weights(self, slot: Slot) -> Tensor:
        """This rank's share of a parameter."""
        return self.master[slot.offset : slot.offset + slot.shard_elements]


def share_of(gradient: Sequence[Tensor], slot: Slot) -> Tensor:
    """This rank's part of a parameter's gradient."""
    return gradient[slot.bucket][slot.column : slot.column + slot.shard_elements]


class RestAdamW:
    """AdamW for the parameters that another optimizer does not update."""

    def __init__(self, weights: Mapping[Slot, Tensor], hyperparameters: Hyperparameters) -> None:
        """`weights` are views of the master vector."""
        self._parameters = {slot: nn.Parameter(value) for slot, value in weights.items()}
        self._optimizer = adamw(list(self._parameters.values()), hyperparameters) if weights else None

    def step(self, gradient: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        if self._optimizer is None:
            return
        for slot, parameter in self._parameters.items():
            parameter.grad = share_of(gradient, slot)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settled(self) -> bool:
        """Whether all state exists."""
        return self._optimizer is None or bool(self._optimizer.state)

    def states(self) -> Iterator[Tensor]:
        """The moments."""
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def adamw(parameters: list[nn.Parameter], hyperparameters: Hyperparameters) -> torch.optim.AdamW:
    """torch's AdamW, fused if there is a kernel for the dtype."""
    fused = hyperparameters.fused and parameters[0].dtype == torch.float32
    return torch.optim.AdamW(
        update_groups(parameters, fused), lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay,
        betas=BETAS, eps=EPSILON, fused=fused, foreach=not fused,
    )  # fmt: skip


class Sgd(DeviceOptimizer):
    """`torch.optim.SGD` over views of the master vector, one per piece of the gradient; the update is elementwise."""

    def __init__(self, master: Tensor, layout: BucketLayout, hyperparameters: Hyperparameters) -> None:
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
