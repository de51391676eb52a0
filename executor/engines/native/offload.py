"""AdamW with a share of its state in host memory, updated by the host's processors."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.copies import CopyEngine, Staging
from executor.engines.native.host_pool import HostPool
from executor.engines.native.parameter_shard import ParameterShard

CHUNK_ELEMENTS = 1 << 22
"""Elements that travel and are updated together: 16 MiB of fp32 gradient, which fills a host link, and some ms of update."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of the master vector that are updated together; they lie in one piece of the gradient."""

    piece: int
    start: int
    end: int
    """The element after the last."""
    offset: int
    """Where in its piece the span begins."""

    def of(self, gradient: Sequence[Tensor]) -> Tensor:
        """The span's elements of a gradient in pieces."""
        return gradient[self.piece][self.offset : self.offset + self.end - self.start]


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

    Both shares are exactly what one AdamW over the whole vector would make of them: the update is element by element. The
    gradient comes in pieces, one a reduce bucket, so that it need never be there as one vector.
    """

    def __init__(
        self,
        initial: Tensor,
        ratio: float,
        hyperparameters: Hyperparameters,
        pool: HostPool,
        copies: CopyEngine,
        pieces: Sequence[int] = (),
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """`initial` [elements] on the device holds the first values, in the master's type; it is not kept.

        `pieces` are the elements of the gradient's pieces in order; none: it comes whole.

        Raises:
            ValueError: the ratio is not from 0 to 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"a share of {ratio} of the optimizer state cannot be offloaded; choose one from 0 to 1")
        self.host_elements = round(ratio * initial.numel())
        self.chunk_elements = min(chunk_elements, self.host_elements)
        spans = [*_spans(pieces or (initial.numel(),), self.host_elements, max(self.chunk_elements, 1))]
        self._chunks = [span for span in spans if span.end <= self.host_elements]
        self._device = _DevicePart(initial[self.host_elements :], hyperparameters, spans[len(self._chunks) :])
        self._host = _HostPart(initial[: self.host_elements], hyperparameters, self._chunks, pool)
        self._gradients = Staging(self.chunk_elements, initial.dtype, pool, copies)

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], shard: ParameterShard) -> None:
        """Update with the `gradient` in pieces on the device, in the master's type, and bring `shard` up to date."""
        chunks = self._chunks
        arriving = [self._gradients.fetch(chunk.of(gradient)) for chunk in chunks[:1]]
        self._device.step(gradient)
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master)
        for index, chunk in enumerate(chunks):
            arriving += [self._gradients.fetch(later.of(gradient)) for later in chunks[index + 1 : index + 2]]
            arrived = arriving.pop(0)
            arrived.wait()
            updated = self._host.step(index, arrived.target)
            self._gradients.give_back()
            shard.accept_from_host(chunk.start, updated)
        shard.finish()

    @torch.no_grad()
    def publish(self, shard: ParameterShard) -> None:
        """Hand every element to `shard` as it is: once, after building."""
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master)
        for chunk in self._chunks:
            shard.accept_from_host(chunk.start, self._host.master[chunk.start : chunk.end])
        shard.finish()

    def full_master(self) -> Tensor:
        """The whole master vector on the device: for checks, since this is the memory that offloading saves."""
        device = self._device.master
        if not self.host_elements:
            return device
        return torch.cat((self._host.master.to(device.device), device))

    def settled(self) -> bool:
        """Whether all state exists: the host's does from the start."""
        return bool(self._device.optimizer.state) or not self._device.elements

    def device_tensors(self) -> Iterator[Tensor]:
        """What lives on the device between steps."""
        yield self._device.master
        for state in self._device.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _spans(pieces: Sequence[int], host_elements: int, chunk_elements: int) -> Iterator[Span]:
    """The vector cut at the pieces' ends, at the end of the host's share, and within that into chunks."""
    starts = [0, *itertools.accumulate(pieces)]
    for piece, (first, last) in enumerate(itertools.pairwise(starts)):
        middle = min(max(host_elements, first), last)
        cuts = [*range(first, middle, chunk_elements), *([middle] if middle < last else []), last]
        for start, end in itertools.pairwise(cuts):
            yield Span(piece, start, end, start - first)


class _DevicePart:
    """The share that stays: an ordinary AdamW over views of one vector, one for each span."""

    def __init__(self, initial: Tensor, hyperparameters: Hyperparameters, spans: Sequence[Span]) -> None:
        # Where it is a part, a storage of its own, so that the vector it was cut from can go.
        whole = initial.untyped_storage().size() == initial.nbytes
        self.master = initial if whole else initial.clone()
        self.elements, self._spans = initial.numel(), spans
        first = spans[0].start if spans else 0
        self._parameters = [nn.Parameter(self.master[span.start - first : span.end - first]) for span in spans]
        fused = hyperparameters.fused and initial.dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            self._parameters or [nn.Parameter(self.master)],
            lr=hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
            fused=fused,
            foreach=None if fused else False,
        )

    def step(self, gradient: Sequence[Tensor]) -> None:
        if not self.elements:
            return
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            parameter.grad = span.of(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _HostPart:
    """The share in host memory: one AdamW a chunk, on views of vectors that the pool has made.

    Master and moments never travel, so that they need not be pinned.
    """

    def __init__(self, initial: Tensor, hyperparameters: Hyperparameters, chunks: Sequence[Span], pool: HostPool) -> None:
        elements, dtype = initial.numel(), initial.dtype
        self.master, self._first, self._second = (pool.zeros(elements, dtype) for _ in range(3))
        self.master.copy_(initial)
        self._steps = pool.zeros(len(chunks), torch.float32)
        self._optimizers = [self._optimizer(hyperparameters, index, chunk) for index, chunk in enumerate(chunks)]

    def step(self, index: int, gradient: Tensor) -> Tensor:
        """Update chunk `index`; its new values."""
        optimizer = self._optimizers[index]
        parameter: nn.Parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None
        return parameter.data

    def _optimizer(self, hyperparameters: Hyperparameters, index: int, chunk: Span) -> torch.optim.AdamW:
        start, end = chunk.start, chunk.end
        parameter = nn.Parameter(self.master[start:end])
        # Always one kernel: others make temporaries in host memory that no pool counts, and take several times as long.
        optimizer = torch.optim.AdamW(
            [parameter], lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay, fused=True
        )
        moments = {"exp_avg": self._first[start:end], "exp_avg_sq": self._second[start:end]}
        optimizer.state[parameter] = {"step": self._steps[index], **moments}
        return optimizer
