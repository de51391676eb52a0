"""AdamW with a share of its state in host memory, updated by the host's processors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.copies import CopyEngine, Staging
from executor.engines.native.host_pool import HostPool
from executor.engines.native.parameter_shard import ParameterShard

CHUNK_ELEMENTS = 1 << 22
"""Elements that travel and are updated together: 16 MiB of fp32 gradient, which fills a host link, and some ms of update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What every AdamW of a model has in common."""

    learning_rate: float
    weight_decay: float
    fused: bool
    """Whether the device's share is updated by one kernel."""


class SplitAdamW:
    """AdamW over this rank's flat master vector, whose first `round(ratio * elements)` elements are in host memory.

    A step [Ren et al. 2021, ZeRO-Offload, 4]:

    1. The gradient of the first chunk of the host's share leaves for the host.
    2. The device updates its own share meanwhile.
    3. For each chunk: the next chunk's gradient leaves; the host updates this one; its parameters, cast to their own type, are
       handed to the `ParameterShard`, which sends them beside the next chunk's update.

    Both shares are exactly what one AdamW over the whole vector would make of them: the update is element by element.
    """

    def __init__(
        self,
        initial: Tensor,
        ratio: float,
        hyperparameters: Hyperparameters,
        pool: HostPool,
        copies: CopyEngine,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """`initial` [elements] on the device holds the first values, in the master's type; it is not kept.

        Raises:
            ValueError: the ratio is not from 0 to 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"a share of {ratio} of the optimizer state cannot be offloaded; choose one from 0 to 1")
        self.host_elements = round(ratio * initial.numel())
        self.chunk_elements = min(chunk_elements, self.host_elements)
        self._device = _DevicePart(initial[self.host_elements :], hyperparameters)
        self._host = _HostPart(initial[: self.host_elements], hyperparameters, self._chunks(), pool)
        self._gradients = Staging(self.chunk_elements, initial.dtype, pool, copies)

    @torch.no_grad()
    def step(self, gradient: Tensor, shard: ParameterShard) -> None:
        """Update with `gradient` [elements] on the device, in the master's type, and bring `shard` up to date."""
        chunks = self._chunks()
        arriving = [self._gradients.fetch(gradient[start:end]) for start, end in chunks[:1]]
        self._device.step(gradient[self.host_elements :])
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master.data)
        for index, (start, _) in enumerate(chunks):
            arriving += [self._gradients.fetch(gradient[first:last]) for first, last in chunks[index + 1 : index + 2]]
            arrived = arriving.pop(0)
            arrived.wait()
            updated = self._host.step(index, arrived.target)
            self._gradients.give_back()
            shard.accept_from_host(start, updated)
        shard.finish()

    @torch.no_grad()
    def publish(self, shard: ParameterShard) -> None:
        """Hand every element to `shard` as it is: once, after building."""
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master.data)
        for start, end in self._chunks():
            shard.accept_from_host(start, self._host.master[start:end])
        shard.finish()

    def full_master(self) -> Tensor:
        """The whole master vector on the device: for checks, since this is the memory that offloading saves."""
        device = self._device.master.data
        if not self.host_elements:
            return device
        return torch.cat((self._host.master.to(device.device), device))

    def settled(self) -> bool:
        """Whether all state exists: the host's does from the start."""
        return bool(self._device.optimizer.state) or not self._device.elements

    def device_tensors(self) -> Iterator[Tensor]:
        """What lives on the device between steps."""
        yield self._device.master.data
        for state in self._device.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _chunks(self) -> list[tuple[int, int]]:
        """First element and the one after the last of each chunk."""
        starts = range(0, self.host_elements, max(self.chunk_elements, 1))
        return [(start, min(start + self.chunk_elements, self.host_elements)) for start in starts]


class _DevicePart:
    """The share that stays: an ordinary AdamW."""

    def __init__(self, initial: Tensor, hyperparameters: Hyperparameters) -> None:
        # Where it is a part, a storage of its own, so that the vector it was cut from can go.
        whole = initial.untyped_storage().size() == initial.nbytes
        self.master = nn.Parameter(initial if whole else initial.clone())
        self.elements = initial.numel()
        fused = hyperparameters.fused and initial.dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            [self.master],
            lr=hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
            fused=fused,
            foreach=None if fused else False,
        )

    def step(self, gradient: Tensor) -> None:
        if not self.elements:
            return
        self.master.grad = gradient
        self.optimizer.step()
        self.master.grad = None


class _HostPart:
    """The share in host memory: one AdamW a chunk, on views of vectors that the pool has made.

    Master and moments never travel, so that they need not be pinned.
    """

    def __init__(
        self, initial: Tensor, hyperparameters: Hyperparameters, chunks: list[tuple[int, int]], pool: HostPool
    ) -> None:
        elements, dtype = initial.numel(), initial.dtype
        self.master, self._first, self._second = (pool.zeros(elements, dtype) for _ in range(3))
        self.master.copy_(initial)
        self._steps = pool.zeros(len(chunks), torch.float32)
        self._optimizers = [self._optimizer(hyperparameters, index, *chunk) for index, chunk in enumerate(chunks)]

    def step(self, index: int, gradient: Tensor) -> Tensor:
        """Update chunk `index`; its new values."""
        optimizer = self._optimizers[index]
        parameter: nn.Parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None
        return parameter.data

    def _optimizer(self, hyperparameters: Hyperparameters, index: int, start: int, end: int) -> torch.optim.AdamW:
        parameter = nn.Parameter(self.master[start:end])
        # Always one kernel: others make temporaries in host memory that no pool counts, and take several times as long.
        optimizer = torch.optim.AdamW(
            [parameter], lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay, fused=True
        )
        moments = {"exp_avg": self._first[start:end], "exp_avg_sq": self._second[start:end]}
        optimizer.state[parameter] = {"step": self._steps[index], **moments}
        return optimizer
