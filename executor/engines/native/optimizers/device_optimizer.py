"""Base class of optimizers over this rank's flat master vector on its device."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.layout import Layout, Slot
from executor.engines.native.offload import Hyperparameters, parts_of, update_groups
from executor.engines.native.parameter_shard import ParameterShard
from executor.parallel.collectives import Group
from search_spaces.optimizers import BETAS, EPSILON


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the parameters are distributed over ranks."""

    layout: Layout
    own_row: int
    """Index of this rank among those that shard a parameter."""
    group: Group
    """The ranks of the ZeRO group; `layout.ranks` of them hold a share each (1: every rank holds everything)."""
    tensor: Group
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

    def __init__(self, master: Tensor, layout: Layout) -> None:
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
