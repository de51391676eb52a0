"""AdamW with a share of its state offloaded and updated by the host's CPUs."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.engines.native.parameter_shard import ParameterShard
from executor.errors import EngineRefusalError
from executor.parallel.copies import CopyEngine, HostPool, Staging
from executor.parallel.initialization import FirstValues
from search_spaces.communication import cut
from search_spaces.optimizers import BETAS, EPSILON
from search_spaces.training.states import CHUNK_ELEMENTS
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of the master vector that are updated together; all belong to one piece of the gradient."""

    piece: int
    start: int
    end: int
    """The element after the last."""
    offset: int
    """Start of the span in its piece."""

    def of(self, gradient: Sequence[Tensor]) -> Tensor:
        """The span's elements of a gradient in pieces."""
        return gradient[self.piece][self.offset : self.offset + self.end - self.start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters shared by all AdamW instances of a model."""

    learning_rate: float
    weight_decay: float
    fused: bool
    """Whether one fused kernel updates the device's share; off: one kernel per operation (`foreach`)."""


def hyperparameters_of(config: TrialConfig, workload: Workload) -> Hyperparameters:
    """The hyperparameters of a trial."""
    return Hyperparameters(
        learning_rate=workload.learning_rate, weight_decay=workload.weight_decay, fused=config.fused_optimizer
    )


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of the master vector. Parts are created where they will be stored, so there is never a second copy."""

    values: FirstValues
    dtype: torch.dtype
    device: torch.device

    def make(self, first: int, end: int) -> Tensor:
        """Create the elements [`first`, `end`) on the device."""
        part = torch.empty(end - first, dtype=self.dtype, device=self.device)
        self.values.fill(part, first)
        return part


class OffloadedShare(ABC):
    """The share of an AdamW that is not on the device: master and moments in chunks, each updated in order once per step."""

    def begin(self) -> None:  # noqa: B027  a share in memory needs no preparation
        """Prepare for the next step, such as by reading ahead. May be called more than once before a step."""

    @abstractmethod
    def step(self, index: int, gradient: Tensor) -> Tensor:
        """Update chunk `index` with its gradient on the host; return its new values, which the next call may overwrite."""

    @abstractmethod
    def values(self) -> Iterator[Tensor]:
        """The master's chunks in order; each is valid until the next one is requested."""

    def states(self) -> Iterator[tuple[str, int, Tensor]]:
        """See `SplitAdamW.states`."""
        raise EngineRefusalError("checkpoint-files", "states in files are not saved; use offload_optimizer=cpu or none")

    def counters(self) -> list[Tensor]:
        """See `SplitAdamW.steps`; each has one element."""
        return []

    def finish(self) -> None:  # noqa: B027
        """Called after the step's last chunk: return when everything is stored."""

    def close(self) -> None:  # noqa: B027
        """Free resources other than memory."""


MakeShare = Callable[[Initial, Hyperparameters, Sequence[Span], HostPool], OffloadedShare]
"""Creates a share from the initial values of the master vector, whose first elements are the share, and the share's chunks."""


class SplitAdamW:
    """AdamW over this rank's flat master vector, whose first `round(ratio * elements)` elements are offloaded.

    A step [Ren et al. 2021, ZeRO-Offload, 4]:

    1. Start to copy the gradient of the host share's first chunk to the host.
    2. Meanwhile the device updates its own share.
    3. For each chunk: start to copy the next chunk's gradient; the host updates this chunk; pass its parameters, cast to their
       dtype, to the `ParameterShard`, which sends them during the next chunk's update.

    The result equals that of one AdamW over the whole vector exactly, since the update is elementwise. The gradient comes in
    pieces, one per reduce bucket, so that it never has to exist as one vector.
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
        """`make_share` creates the offloaded share; None: it is in host memory. `pieces` are the numbers of elements of the
        gradient's pieces in order; empty: the gradient is one piece.

        Raises:
            ValueError: the ratio is not between 0 and 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio {ratio}: this share of the optimizer state cannot be offloaded; choose one from 0 to 1")
        elements = initial.values.elements
        self.host_elements = round(ratio * elements)
        self.chunk_elements = min(chunk_elements, self.host_elements)
        spans = [*_spans(pieces or (elements,), self.host_elements, max(self.chunk_elements, 1))]
        self._chunks = [span for span in spans if span.end <= self.host_elements]
        self._device = _DevicePart(initial.make(self.host_elements, elements), hyperparameters, spans[len(self._chunks) :])
        make = HostShare if make_share is None or not self.host_elements else make_share
        self.share: OffloadedShare = make(initial, hyperparameters, self._chunks, pool)
        self._gradients = Staging(self.chunk_elements, initial.dtype, pool, copies)

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], shard: ParameterShard, scale: Tensor | None = None) -> None:
        """Update with the `gradient` (pieces on the device, in the master's dtype) times `scale`; bring `shard` up to date."""
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

    def update_ranges(self) -> list[tuple[int, int]]:
        """The ranges in which a shard may take updated values: chunks of the host's share, and equal ones of the device's."""
        device = parts_of(self.host_elements, self.host_elements + self._device.elements)
        return [*((chunk.start, chunk.end) for chunk in self._chunks), *device]

    def begin(self) -> None:
        """Called while the gradients of a step are computed: start to read what the update needs first."""
        self.share.begin()

    @torch.no_grad()
    def publish(self, shard: ParameterShard) -> None:
        """Pass the current value of every element to `shard`; called once, after construction."""
        if self._device.elements:
            shard.accept_from_device(self.host_elements, self._device.master)
        for chunk, values in zip(self._chunks, self.share.values(), strict=True):
            shard.accept_from_host(chunk.start, values)
        shard.finish()

    def full_master(self) -> Tensor:
        """The whole master vector on the device. Only for checks, since this is the memory that offloading saves."""
        device = self._device.master
        if not self.host_elements:
            return device
        return torch.cat((*(values.to(device.device, copy=True) for values in self.share.values()), device))

    def states(self) -> Iterator[tuple[str, int, Tensor]]:
        """Each state that a checkpoint has: its name (empty: the master), the index in this rank's vector of its first
        element, and a view of consecutive elements. Moments that do not exist yet are created, as a first step would.

        Raises:
            EngineRefusalError: the share is in files.
        """
        yield from self.share.states()
        if self._device.elements:
            yield "", self.host_elements, self._device.master
            yield from self._device.states()

    def steps(self) -> list[Tensor]:
        """The counters of steps, which are equal."""
        counters = self._device.counters() if self._device.elements else []
        return [*self.share.counters(), *counters]

    def settled(self) -> bool:
        """Whether all state exists; the host's exists from the start."""
        return bool(self._device.optimizer.state) or not self._device.elements

    def close(self) -> None:
        """Free resources other than memory. May be called twice."""
        self.share.close()

    def device_tensors(self) -> Iterator[Tensor]:
        """The tensors on the device between steps."""
        yield self._device.master
        for state in self._device.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _spans(pieces: Sequence[int], host_elements: int, chunk_elements: int) -> Iterator[Span]:
    """The vector, cut at the ends of pieces and of the host's share, and within that share into chunks."""
    starts = [0, *itertools.accumulate(pieces)]
    for piece, (first, last) in enumerate(itertools.pairwise(starts)):
        middle = min(max(host_elements, first), last)
        cuts = [*range(first, middle, chunk_elements), *([middle] if middle < last else []), last]
        for start, end in itertools.pairwise(cuts):
            yield Span(piece, start, end, start - first)


def parts_of(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The range [`first`, `last`) in parts of one chunk each."""
    for start in range(first, last, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, last)


class _DevicePart:
    """The share on the device: an ordinary AdamW over views of one vector, one per span."""

    def __init__(self, master: Tensor, hyperparameters: Hyperparameters, spans: Sequence[Span]) -> None:
        self.master, self.elements, self._spans = master, master.numel(), spans
        first = spans[0].start if spans else 0
        self._parameters = [nn.Parameter(self.master[span.start - first : span.end - first]) for span in spans]
        self.optimizer = adamw(self._parameters or [nn.Parameter(self.master)], hyperparameters)

    def states(self) -> Iterator[tuple[str, int, Tensor]]:
        """The moments of each span."""
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            state = self._state(parameter)
            for name in ("exp_avg", "exp_avg_sq"):
                yield name, span.start, state[name]

    def counters(self) -> list[Tensor]:
        """The counter of each span, as one element."""
        return [self._state(parameter)["step"].view(1) for parameter in self._parameters]

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of a span; if it does not exist yet, as torch creates it in the first step."""
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state:
            step_device = parameter.device if self.optimizer.defaults["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def step(self, gradient: Sequence[Tensor], scale: Tensor | None) -> None:
        if not self.elements:
            return
        for parameter, span in zip(self._parameters, self._spans, strict=True):
            parameter.grad = span.of(gradient)
        step_scaled(self.optimizer, scale)
        self.optimizer.zero_grad()


def update_groups(parameters: Sequence[nn.Parameter], fused: bool) -> list[dict[str, Sequence[nn.Parameter]]]:
    """Parameter groups for a torch optimizer. `foreach` creates temporaries as large as a group, so groups are limited to the
    size of the largest parameter. A fused update creates none, so it uses one group.
    """
    if fused:
        return [{"params": parameters}]
    return [{"params": group} for group in cut(parameters, Tensor.numel, max(map(Tensor.numel, parameters)))]


def adamw(parameters: Sequence[nn.Parameter], hyperparameters: Hyperparameters) -> torch.optim.AdamW:
    """torch's AdamW, fused if there is a kernel for the dtype."""
    fused = hyperparameters.fused and parameters[0].dtype == torch.float32
    return torch.optim.AdamW(
        update_groups(parameters, fused), lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay,
        betas=BETAS, eps=EPSILON, fused=fused, foreach=not fused,
    )  # fmt: skip


def step_scaled(optimizer: torch.optim.Optimizer, scale: Tensor | None) -> None:
    """Step on the gradients times `scale`. A fused update scales while it reads them and needs no separate pass."""
    fused = optimizer.defaults["fused"]
    if scale is not None and not fused:
        every = (value.grad for group in optimizer.param_groups for value in group["params"])
        torch._foreach_mul_([gradient for gradient in every if gradient is not None], scale)
    if fused:
        optimizer.grad_scale = None if scale is None else scale.reciprocal()  # type: ignore[attr-defined]
    optimizer.step()
    if fused:
        optimizer.grad_scale = None  # type: ignore[attr-defined]  # else it stays in memory until the next update


class HostShare(OffloadedShare):
    """The share in host memory: one AdamW per chunk, on views of vectors from the pool.

    Master and moments are never copied to the device, so they need not be pinned.
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

    def states(self) -> Iterator[tuple[str, int, Tensor]]:
        for name, vector in (("", self._master), ("exp_avg", self._first), ("exp_avg_sq", self._second)):
            if vector.numel():
                yield name, 0, vector

    def counters(self) -> list[Tensor]:
        return [self._steps[index : index + 1] for index in range(len(self._steps))]

    def _moments(self, chunk: Span) -> tuple[Tensor, Tensor]:
        return self._first[chunk.start : chunk.end], self._second[chunk.start : chunk.end]


def host_adamw(
    master: Tensor, moments: tuple[Tensor, Tensor], step: Tensor, hyperparameters: Hyperparameters
) -> torch.optim.AdamW:
    """An AdamW over one vector on the host, with existing state; `step`: its step counter."""
    parameter = nn.Parameter(master)
    # Always fused: the others create temporaries in host memory outside the pool's count, and take several times as long.
    optimizer = torch.optim.AdamW(
        [parameter], lr=hyperparameters.learning_rate, weight_decay=hyperparameters.weight_decay, fused=True
    )
    optimizer.state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return optimizer


def updated(optimizer: torch.optim.AdamW, gradient: Tensor) -> Tensor:
    """Step an AdamW over one vector; return its new values."""
    parameter: nn.Parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = gradient
    optimizer.step()
    parameter.grad = None
    return parameter.data
