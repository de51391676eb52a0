"""AdamW with its moments in 8 bits [Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization]."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.native.layout import BucketLayout, Slot
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, RestAdamW, share_of
from executor.parallel import streams
from search_spaces.optimizers import BETAS, DEVICE_CHUNK_ELEMENTS, EPSILON, LEAST_QUANTISED, QUANTISED_BLOCK

CHUNK_ELEMENTS = 1 << 20
"""Elements whose moments are dequantised at once on the host: 8 MiB of fp32, for a CPU's cache; a multiple of a block."""


class AdamW8bit(DeviceOptimizer):
    """A step [Dettmers et al. 2022]: dequantise both moments, update as AdamW in the master's dtype, quantise them to 8 bits.

    Shares start at block boundaries (`share_block` of `make_layout`), so that the blocks, and with them every number, equal
    those of one rank with the whole parameter. Each tensor-parallel slice counts as a separate parameter. Parameters of fewer
    than LEAST_QUANTISED elements keep unquantised moments.
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
        chunk = CHUNK_ELEMENTS if streams.is_on_host(weights) else DEVICE_CHUNK_ELEMENTS
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
