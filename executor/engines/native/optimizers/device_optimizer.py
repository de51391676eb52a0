"""An optimizer over this rank's flat master vector on its device, and what it knows of the shares of others."""

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
    """Who holds what of the parameters."""

    layout: Layout
    own_row: int
    """This rank's place among those that share a parameter."""
    group: Group
    """The ranks that share; of them `layout.ranks` have a share each (1: everyone has everything)."""
    tensor: Group
    split: Mapping[str, int]
    """Parameter -> the dimension of which tensor-parallel ranks hold slices."""
    matrices: frozenset[str]
    """The matrices of the blocks, by name."""


class DeviceOptimizer(ABC):
    """Keeps the master vector and its state on the device; `gradient` comes in pieces, one a reduce bucket, and is used up."""

    host_elements = 0
    """Elements whose state is in host memory."""
    chunk_elements = 0

    @property
    def sums_itself(self) -> bool:
        """Whether the next update wants the gradient of this rank alone, and sends what it needs of others' itself."""
        return False

    def __init__(self, master: Tensor, layout: Layout) -> None:
        self.master, self.layout = master, layout

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], shard: ParameterShard, scale: Tensor | None = None) -> None:
        """Update with the `gradient` in the master's type, times `scale`, and bring `shard` up to date."""
        self._update_scaled(gradient, scale)
        self.publish(shard)

    def publish(self, shard: ParameterShard) -> None:
        """Hand every element to `shard` as it is."""
        shard.accept_from_device(0, self.master)
        shard.finish()

    def handed_over(self) -> list[tuple[int, int]]:
        """The parts in which a `ParameterShard` may take updated values."""
        return [*parts_of(0, self.master.numel())]

    def begin(self) -> None:  # noqa: B027  nothing is off the device
        """See `SplitAdamW`: everything is on the device already."""

    def close(self) -> None:  # noqa: B027
        """See `SplitAdamW`."""

    def full_master(self) -> Tensor:
        """The whole master vector."""
        return self.master

    def settled(self) -> bool:
        """Whether all state exists."""
        return True

    def device_tensors(self) -> Iterator[Tensor]:
        """What lives on the device between steps."""
        yield self.master
        yield from self._states()

    def _update_scaled(self, gradient: Sequence[Tensor], scale: Tensor | None) -> None:
        """`_update` on the gradient times `scale`."""
        if scale is not None:
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
    """AdamW of some parameters: what another optimizer leaves to it."""

    def __init__(self, weights: Mapping[Slot, Tensor], hyperparameters: Hyperparameters) -> None:
        """`weights` are views of the master vector."""
        self._parameters = {slot: nn.Parameter(value) for slot, value in weights.items()}
        self._optimizer = adamw(list(self._parameters.values()), hyperparameters) if weights else None

    def step(self, gradient: Sequence[Tensor]) -> None:
        """Update them in place."""
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
    """torch's AdamW, in one kernel where there is one for the type."""
    fused = hyperparameters.fused and parameters[0].dtype == torch.float32
    return torch.optim.AdamW(
        update_groups(parameters, fused), lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay,
        betas=BETAS, eps=EPSILON, fused=fused, foreach=not fused,
    )  # fmt: skip
