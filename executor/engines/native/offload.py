"""AdamW with a share of its state off the device, updated by the host's processors."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.layout import cut
from executor.engines.native.parameter_shard import ParameterShard
from executor.parallel.copies import CopyEngine, Staging
from executor.parallel.host_pool import HostPool
from executor.parallel.initialization import FirstValues
from search_spaces.offload_files import CHUNK_ELEMENTS


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
    """Whether the device's share is updated by one kernel; off: by one for each operation (`foreach`)."""


@dataclass(frozen=True, slots=True)
class Initial:
    """How the master vector begins. Its parts are made where they will be, so that it is nowhere twice."""

    values: FirstValues
    dtype: torch.dtype
    device: torch.device

    def made(self, first: int, end: int) -> Tensor:
        """The elements from `first` to before `end`, on the device."""
        part = torch.empty(end - first, dtype=self.dtype, device=self.device)
        self.values.fill(part, first)
        return part


class OffloadedShare(ABC):
    """The share of an AdamW that is not on the device: master and moments of chunks, updated in order, once a step."""

    def begin(self) -> None:  # noqa: B027  what a share in memory does not need it leaves as it is
        """A step is near: what can be made ready for it may be. May be called more than once before it."""

    @abstractmethod
    def step(self, index: int, gradient: Tensor) -> Tensor:
        """Update chunk `index` with its gradient on the host; its new values, which the next call may overwrite."""

    @abstractmethod
    def values(self) -> Iterator[Tensor]:
        """The master's chunks in order, each there until the next is asked for."""

    def finish(self) -> None:  # noqa: B027
        """The step's last chunk is done: return when everything is where it stays."""

    def close(self) -> None:  # noqa: B027
        """Free what is not memory."""


MakeShare = Callable[[Initial, Hyperparameters, Sequence[Span], HostPool], OffloadedShare]
"""From the first values of the master vector, with whose elements the share begins, and chunks that cover the share."""


class SplitAdamW:
    """AdamW over this rank's flat master vector, whose first `round(ratio * elements)` elements are off the device.

    A step [Ren et al. 2021, ZeRO-Offload, 4]:

    1. The gradient of the first chunk of the host's share leaves for the host.
    2. The device updates its own share meanwhile.
    3. For each chunk: the next chunk's gradient leaves; the host updates this one; its parameters, cast to their own type, are
       handed to the `ParameterShard`, which sends them beside the next chunk's update.

    Both shares are exactly what one AdamW over the whole vector would make of them: the update is element by element. The
    gradient comes in pieces, one a reduce bucket, so that it need never be there as one vector.
    """

    sums_itself = False
    """See `DeviceOptimizer`."""

    def __init__(
        self,
        initial: Initial,
        ratio: float,
        hyperparameters: Hyperparameters,
        pool: HostPool,
        copies: CopyEngine,
        pieces: Sequence[int] = (),
        chunk_elements: int = CHUNK_ELEMENTS,
        make_share: MakeShare | None = None,
    ) -> None:
        """`make_share` makes what holds the offloaded share; None: it is in host memory. `pieces` are the
        elements of the gradient's pieces in order; none: it comes whole.

        Raises:
            ValueError: the ratio is not from 0 to 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"a share of {ratio} of the optimizer state cannot be offloaded; choose one from 0 to 1")
        elements = initial.values.elements
        self.host_elements = round(ratio * elements)
        self.chunk_elements = min(chunk_elements, self.host_elements)
        spans = [*_spans(pieces or (elements,), self.host_elements, max(self.chunk_elements, 1))]
        self._chunks = [span for span in spans if span.end <= self.host_elements]
        self._device = _DevicePart(initial.made(self.host_elements, elements), hyperparameters, spans[len(self._chunks) :])
        make = HostShare if make_share is None or not self.host_elements else make_share
        self.share: OffloadedShare = make(initial, hyperparameters, self._chunks, pool)
        self._gradients = Staging(self.chunk_elements, initial.dtype, pool, copies)

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], shard: ParameterShard, scale: Tensor | None = None) -> None:
        """Update with the `gradient` in pieces on the device, in the master's type, times `scale`; bring `shard` up to date."""
        chunks = self._chunks
        self.share.begin()
        if scale is not None and chunks:
            torch._foreach_mul_([chunk.of(gradient) for chunk in chunks], scale)
        arriving = [self._gradients.fetch(chunk.of(gradient)) for chunk in chunks[:1]]
        self._device.step(gradient, scale)
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master)
        for index, chunk in enumerate(chunks):
            arriving += [self._gradients.fetch(later.of(gradient)) for later in chunks[index + 1 : index + 2]]
            arrived = arriving.pop(0)
            arrived.wait()
            updated = self.share.step(index, arrived.target)
            self._gradients.give_back()
            shard.accept_from_host(chunk.start, updated)
        self.share.finish()
        shard.finish()

    def handed_over(self) -> list[tuple[int, int]]:
        """The parts in which a shard may take updated values: chunks of the host's share, and as large ones of the device's."""
        device = parts_of(self.host_elements, self.host_elements + self._device.elements)
        return [*((chunk.start, chunk.end) for chunk in self._chunks), *device]

    def begin(self) -> None:
        """The gradients of a step are being made: what the update reads first may be on its way meanwhile."""
        self.share.begin()

    @torch.no_grad()
    def publish(self, shard: ParameterShard) -> None:
        """Hand every element to `shard` as it is: once, after building."""
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master)
        for chunk, values in zip(self._chunks, self.share.values(), strict=True):
            shard.accept_from_host(chunk.start, values)
        shard.finish()

    def full_master(self) -> Tensor:
        """The whole master vector on the device: for checks, since this is the memory that offloading saves."""
        device = self._device.master
        if not self.host_elements:
            return device
        return torch.cat((*(values.to(device.device, copy=True) for values in self.share.values()), device))

    def settled(self) -> bool:
        """Whether all state exists: the host's does from the start."""
        return bool(self._device.optimizer.state) or not self._device.elements

    def close(self) -> None:
        """Free what is not memory. May be called twice."""
        self.share.close()

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


def parts_of(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The elements from `first` to before `last`, in parts of a chunk each."""
    for start in range(first, last, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, last)


class _DevicePart:
    """The share that stays: an ordinary AdamW over views of one vector, one for each span."""

    def __init__(self, master: Tensor, hyperparameters: Hyperparameters, spans: Sequence[Span]) -> None:
        self.master, self.elements, self._spans = master, master.numel(), spans
        first = spans[0].start if spans else 0
        self._parameters = [nn.Parameter(self.master[span.start - first : span.end - first]) for span in spans]
        fused = hyperparameters.fused and master.dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            update_groups(self._parameters or [nn.Parameter(self.master)], fused),
            lr=hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
            fused=fused,
            foreach=not fused,
        )

    def step(self, gradient: Sequence[Tensor], scale: Tensor | None) -> None:
        if not self.elements:
            return
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            parameter.grad = span.of(gradient)
        step_scaled(self.optimizer, scale)
        self.optimizer.zero_grad()


def update_groups(parameters: Sequence[nn.Parameter], fused: bool) -> list[dict[str, Sequence[nn.Parameter]]]:
    """Parameter groups for an optimizer of torch: `foreach` makes temporaries as large as a group, so that none is larger than
    the largest parameter. A fused update makes none.
    """
    if fused:
        return [{"params": parameters}]
    return [{"params": group} for group in cut(parameters, Tensor.numel, max(map(Tensor.numel, parameters)))]


def step_scaled(optimizer: torch.optim.Optimizer, scale: Tensor | None) -> None:
    """Step on the gradients times `scale`: a fused update divides as it reads them, and needs no pass of its own before."""
    fused = optimizer.defaults["fused"]
    if scale is not None and not fused:
        every = (value.grad for group in optimizer.param_groups for value in group["params"])
        torch._foreach_mul_([gradient for gradient in every if gradient is not None], scale)
    if fused:
        optimizer.grad_scale = None if scale is None else scale.reciprocal()  # type: ignore[attr-defined]
    optimizer.step()
    if fused:
        optimizer.grad_scale = None  # type: ignore[attr-defined]  # which would stay in memory until the next update


class HostShare(OffloadedShare):
    """The share in host memory: one AdamW a chunk, on views of vectors that the pool has made.

    Master and moments never travel, so that they need not be pinned.
    """

    def __init__(self, initial: Initial, hyperparameters: Hyperparameters, chunks: Sequence[Span], pool: HostPool) -> None:
        elements = chunks[-1].end if chunks else 0
        self._master, self._first, self._second = (pool.zeros(elements, initial.dtype) for _ in range(3))
        initial.values.fill(self._master)
        self._steps = pool.zeros(len(chunks), torch.float32)
        self._chunks = chunks
        self._optimizers = [
            host_adamw(self._master[chunk.start : chunk.end], self._moments(chunk), self._steps[index], hyperparameters)
            for index, chunk in enumerate(chunks)
        ]

    def step(self, index: int, gradient: Tensor) -> Tensor:
        return updated(self._optimizers[index], gradient)

    def values(self) -> Iterator[Tensor]:
        return (self._master[chunk.start : chunk.end] for chunk in self._chunks)

    def _moments(self, chunk: Span) -> tuple[Tensor, Tensor]:
        return self._first[chunk.start : chunk.end], self._second[chunk.start : chunk.end]


def host_adamw(
    master: Tensor, moments: tuple[Tensor, Tensor], step: Tensor, hyperparameters: Hyperparameters
) -> torch.optim.AdamW:
    """An AdamW over one vector on the host, with state that is there already; `step`: its counter."""
    parameter = nn.Parameter(master)
    # Always one kernel: others make temporaries in host memory that no pool counts, and take several times as long.
    optimizer = torch.optim.AdamW(
        [parameter], lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay, fused=True
    )
    optimizer.state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return optimizer


def updated(optimizer: torch.optim.AdamW, gradient: Tensor) -> Tensor:
    """Step an AdamW over one vector; its new values."""
    parameter: nn.Parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = gradient
    optimizer.step()
    parameter.grad = None
    return parameter.data
