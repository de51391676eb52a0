"""8-bit numbers with a scale per block [Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization]."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from search_spaces.optimizers import QUANTISED_BLOCK

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
    found = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        parts = 2 ** (exponent if signed else exponent + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (exponent + 1 - EXPONENTS) for part in range(parts)]
        found += middles + ([-middle for middle in middles] if signed else [])
    return sorted(found)


def _boundaries(numbers: list[float]) -> Tensor:
    """Midpoints of adjacent codes, in fp32, rounded down: a number that is not above one is nearer to the lower code.

    Rounded to nearest, some would be above the true midpoint, and a number equal to one would get the farther code.
    """
    codebook = torch.tensor(numbers, dtype=torch.float32).double()
    middles = (codebook[1:] + codebook[:-1]) / 2
    found = middles.float()
    below = torch.nextafter(found, torch.full_like(found, -torch.inf))
    return torch.where(found.double() > middles, below, found)


def _blocks(values: Tensor) -> Tensor:
    """[blocks, QUANTISED_BLOCK], padded with zeros; a view if no padding is needed."""
    missing = -values.numel() % QUANTISED_BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, QUANTISED_BLOCK)
