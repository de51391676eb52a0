"""Optimizers over this rank's flat master vector on its device: the base class, SGD, LAMB, and AdamW with moments in 8 bits
[Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization].
"""

import hashlib
import importlib
import importlib.util
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.engines.native.offload import Hyperparameters, adamw, parts_of, step_scaled, update_groups
from executor.engines.native.parameter_shard import BucketLayout, ParameterShard, Slot
from executor.parallel import copies
from executor.parallel.collectives import ProcessGroup
from search_spaces.optimizers import (
    BETAS,
    DEVICE_CHUNK_ELEMENTS,
    EPSILON,
    LAMB_EPSILON,
    LEAST_QUANTISED,
    QUANTISED_BLOCK,
    SGD_MOMENTUM,
)
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
    tied: frozenset[str] = frozenset()
    """Names of the weight of which another pipeline stage holds a copy."""
    seed: int = 0
    """Of the workload."""


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


class AdamWBf16(DeviceOptimizer):
    """A step on bf16 parameters that are their own master, with moments in fp32, in chunks, so that temporaries are small:

    1. Weights are widened to fp32 and updated as by AdamW.
    2. They are rounded to one of their two neighbours in bf16, to the farther one with the probability that makes the mean
       exact: 16 random bits are added below the bits that stay [as torchao's `_fp32_to_bf16_sr`; Gupta et al. 2015, Deep
       Learning with Limited Numerical Precision, 3.1]. Updates below half a unit, which rounding to nearest loses, add up.

    Random bits depend on the seed, the step, the parameter's name and this rank's share alone: copies of one share on other
    ranks, and both copies of a tied weight, are rounded alike.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, shares.layout)
        self._shares, self._hyperparameters, self._steps = shares, hyperparameters, 0
        self._first, self._second = (torch.zeros_like(master, dtype=torch.float32) for _ in range(2))
        self._generator = torch.Generator(master.device)

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._steps += 1
        rate, (first_decay, second_decay) = self._hyperparameters.learning_rate, BETAS
        first_scale, second_scale = 1 - first_decay**self._steps, 1 - second_decay**self._steps
        for slot in self.layout.slots:
            name = "tied" if slot.name in self._shares.tied else slot.name
            key = f"{self._shares.seed}:{self._steps}:{self._shares.own_row}:{name}"
            self._generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
            end = slot.offset
            for part in torch.split(share_of(gradient, slot), DEVICE_CHUNK_ELEMENTS):
                start, end = end, end + part.numel()
                first = self._first[start:end].lerp_(part, 1 - first_decay)
                second = self._second[start:end].mul_(second_decay).addcmul_(part, part, value=1 - second_decay)
                root = torch.div(second, second_scale, out=part).sqrt_().add_(EPSILON)
                weights = self.master[start:end].float().mul_(1 - rate * self._hyperparameters.weight_decay)
                weights.addcdiv_(first, root, value=-rate / first_scale)
                self.master[start:end].copy_(round_stochastically(weights, self._generator))

    def _states(self) -> Iterable[Tensor]:
        return self._first, self._second


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values, overwritten with one of their two neighbours in bf16 each, such that the mean is exact."""
    bits = values.view(torch.int32)
    return bits.add_(torch.empty_like(bits).random_(0, 1 << 16, generator=generator)).bitwise_and_(-1 << 16).view(torch.float32)


HOST_CHUNK_ELEMENTS = 1 << 20
"""Elements whose moments are dequantised at once on the host: 8 MiB of fp32, for a CPU's cache; a multiple of a block."""


class AdamW8bit(DeviceOptimizer):
    """A step [Dettmers et al. 2022]: dequantise both moments, update as AdamW in the master's dtype, quantise them to 8 bits.

    Shares start at block boundaries (`share_block` of `make_layout`), so that the blocks, and with them every number, equal
    those of one rank with the whole parameter. Each tensor-parallel slice counts as a separate parameter. Parameters of fewer
    than LEAST_QUANTISED elements keep unquantised moments.

    On a CUDA device with Triton, fp32 is updated by one kernel per parameter (`fused_update`), elsewhere by operators of torch.
    """

    def __init__(self, master: Tensor, layout: BucketLayout, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, layout)
        self._hyperparameters, self._steps = hyperparameters, 0
        self._large = [slot for slot in layout.slots if slot.elements >= LEAST_QUANTISED]
        small = [slot for slot in layout.slots if slot.elements < LEAST_QUANTISED]
        # The next parameter starts after the padded last block.
        lengths = [-(-slot.shard_elements // QUANTISED_BLOCK) * QUANTISED_BLOCK for slot in self._large]
        *self._starts, total = itertools.accumulate(lengths, initial=0)
        self._first = QuantisedVector(total, signed=True, device=master.device)
        self._second = QuantisedVector(total, signed=False, device=master.device)
        self._rest = RestAdamW({slot: self._weights(slot) for slot in small}, hyperparameters)
        fuses = master.is_cuda and master.dtype == torch.float32 and importlib.util.find_spec("triton") is not None
        self._kernel: Any = importlib.import_module("executor.engines.native.optimizers.fused_update") if fuses else None

    def settled(self) -> bool:
        return self._rest.settled()

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._steps += 1
        self._rest.step(gradient)
        for slot, start in zip(self._large, self._starts, strict=True):
            self._update_slot(start, self._weights(slot), share_of(gradient, slot), slot)

    def _update_slot(self, offset: int, weights: Tensor, gradient: Tensor, slot: Slot) -> None:
        """`offset`: start of the slot's moments."""
        rate, decay = self._hyperparameters.learning_rate, self._hyperparameters.weight_decay
        first_decay, second_decay = BETAS
        first_scale, second_scale = 1 - first_decay**self._steps, 1 - second_decay**self._steps
        if self._kernel is not None:
            self._kernel.update(
                weights, gradient, self._first.parts(offset, slot.shard_elements),
                self._second.parts(offset, slot.shard_elements),
                (1 - first_decay, second_decay, math.sqrt(second_scale), EPSILON, 1 - rate * decay, -rate / first_scale),
            )  # fmt: skip
            return
        chunk = HOST_CHUNK_ELEMENTS if copies.is_on_host(weights) else DEVICE_CHUNK_ELEMENTS
        for start, end in itertools.pairwise([*range(0, slot.shard_elements, chunk), slot.shard_elements]):
            part = gradient[start:end]
            first = self._first.read(offset + start, offset + end, part.dtype).lerp_(part, 1 - first_decay)
            second = self._second.read(offset + start, offset + end, part.dtype).mul_(second_decay)
            second.addcmul_(part, part, value=1 - second_decay)
            self._first.write(offset + start, first)
            self._second.write(offset + start, second)
            root = second.sqrt_().div_(math.sqrt(second_scale)).add_(EPSILON)
            weights[start:end].mul_(1 - rate * decay).addcdiv_(first, root, value=-rate / first_scale)

    def _states(self) -> Iterator[Tensor]:
        yield from self._first.tensors()
        yield from self._second.tensors()
        yield from self._rest.states()


def share_block(elements: int) -> int:
    """The number that a rank's share of a parameter is a multiple of [elements]."""
    return QUANTISED_BLOCK if elements >= LEAST_QUANTISED else 1


EXPONENTS = 7
"""Decades that the codes cover: 1e-7 of a block's largest number is still distinguished from zero."""


class QuantisedVector:
    """8-bit codes, and the largest magnitude of each block of QUANTISED_BLOCK numbers in fp32. Initialized to zeros."""

    def __init__(self, elements: int, signed: bool, device: torch.device) -> None:
        numbers = codes(signed)
        self._codebook = torch.tensor(numbers, dtype=torch.float32, device=device)
        self._boundaries = _boundaries(numbers).to(device)
        zero = numbers.index(0.0)
        self._codes = torch.full((elements,), zero, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-elements // QUANTISED_BLOCK), dtype=torch.float32, device=device)

    def read(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The numbers in [`start`, `end`); `start` is a block boundary."""
        numbers = self._codebook[self._codes[start:end].int()].to(dtype)
        scaled = _blocks(numbers) * self._scales_of(start, end)[:, None].to(dtype)
        return scaled.view(-1)[: end - start]

    def write(self, start: int, values: Tensor) -> None:
        """Write numbers from `start` on, each as the nearest code times its block's scale. The last block may be partial."""
        end = start + values.numel()
        scales = self._scales_of(start, end)
        scales.copy_(_blocks(values).abs().amax(dim=1))
        least = torch.finfo(torch.float32).tiny
        relative = (_blocks(values) / scales[:, None].clamp(min=least)).float().view(-1)[: values.numel()]
        self._codes[start:end] = torch.bucketize(relative, self._boundaries, out_int32=True).to(torch.uint8)

    def parts(self, start: int, elements: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes and scales from `start`, a block boundary, on, the codebook, and the boundaries between its numbers."""
        end = start + elements
        return self._codes[start:end], self._scales_of(start, end), self._codebook, self._boundaries

    def tensors(self) -> Iterator[Tensor]:
        """The kept tensors."""
        yield from (self._codes, self._scales, self._codebook, self._boundaries)

    def _scales_of(self, start: int, end: int) -> Tensor:
        return self._scales[start // QUANTISED_BLOCK : -(-end // QUANTISED_BLOCK)]


def codes(signed: bool) -> list[float]:
    """The 256 numbers from -1 (or 0) to 1 that codes represent, in ascending order.

    Dynamic tree quantisation: the closer a decade is to 1, the more bits divide it into equal parts, each represented by its
    midpoint [Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning, 3; as in bitsandbytes]. Unsigned numbers
    use the sign bit for one more division.
    """
    numbers = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        parts = 2 ** (exponent if signed else exponent + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (exponent + 1 - EXPONENTS) for part in range(parts)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return sorted(numbers)


def _boundaries(numbers: list[float]) -> Tensor:
    """Midpoints of adjacent codes, in fp32, rounded down: a number that is not above one is nearer to the lower code.

    Rounded to nearest, some would be above the true midpoint, and a number equal to one would get the farther code.
    """
    codebook = torch.tensor(numbers, dtype=torch.float32).double()
    middles = (codebook[1:] + codebook[:-1]) / 2
    rounded = middles.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.double() > middles, below, rounded)


def _blocks(values: Tensor) -> Tensor:
    """[blocks, QUANTISED_BLOCK], padded with zeros; a view if no padding is needed."""
    missing = -values.numel() % QUANTISED_BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, QUANTISED_BLOCK)
