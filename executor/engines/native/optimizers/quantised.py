"""Numbers in 8 bits with a scale for each block [Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization]."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from search_spaces.optimizers import QUANTISED_BLOCK

EXPONENTS = 7
"""Decades that the codes reach down: 1e-7 of a block's largest number is told from nothing."""


class QuantisedVector:
    """Zeros at first: codes of 8 bits, and the largest magnitude of each block of QUANTISED_BLOCK numbers in fp32."""

    def __init__(self, elements: int, signed: bool, device: torch.device) -> None:
        numbers = codes(signed)
        self._book = torch.tensor(numbers, dtype=torch.float32, device=device)
        self._middles = _middles(numbers).to(device)
        nothing = numbers.index(0.0)
        self._codes = torch.full((elements,), nothing, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-elements // QUANTISED_BLOCK), dtype=torch.float32, device=device)

    def read(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The numbers from `start`, where a block begins, to before `end`."""
        numbers = self._book[self._codes[start:end].int()].to(dtype)
        scaled = _blocks(numbers) * self._scales_of(start, end)[:, None].to(dtype)
        return scaled.view(-1)[: end - start]

    def write(self, start: int, values: Tensor) -> None:
        """Put numbers there, each as the nearest code times its block's scale. A last block may be a part of one."""
        end = start + values.numel()
        scales = self._scales_of(start, end)
        scales.copy_(_blocks(values).abs().amax(dim=1))
        least = torch.finfo(torch.float32).tiny
        relative = (_blocks(values) / scales[:, None].clamp(min=least)).float().view(-1)[: values.numel()]
        self._codes[start:end] = torch.bucketize(relative, self._middles, out_int32=True).to(torch.uint8)

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps."""
        yield from (self._codes, self._scales, self._book, self._middles)

    def _scales_of(self, start: int, end: int) -> Tensor:
        return self._scales[start // QUANTISED_BLOCK : -(-end // QUANTISED_BLOCK)]


def codes(signed: bool) -> list[float]:
    """The 256 numbers from -1 (or 0) to 1 that a code may stand for, in ascending order.

    Dynamic tree quantisation: the fewer decades below 1, the more of the bits divide the decade, each into equal parts of which
    the middle counts [Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning, 3; as in bitsandbytes]. Unsigned
    numbers have the sign's bit for one more division.
    """
    found = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        parts = 2 ** (exponent if signed else exponent + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (exponent + 1 - EXPONENTS) for part in range(parts)]
        found += middles + ([-middle for middle in middles] if signed else [])
    return sorted(found)


def _middles(numbers: list[float]) -> Tensor:
    """Between neighbouring codes, in fp32, rounded down: an fp32 number is nearer to the lower code where it is not above.

    Rounded to the nearest, some would lie above the true middle, and a number that is equal to one would get the farther code.
    """
    book = torch.tensor(numbers, dtype=torch.float32).double()
    middles = (book[1:] + book[:-1]) / 2
    found = middles.float()
    below = torch.nextafter(found, torch.full_like(found, -torch.inf))
    return torch.where(found.double() > middles, below, found)


def _blocks(values: Tensor) -> Tensor:
    """[blocks, QUANTISED_BLOCK], zeros behind the last number."""
    return functional.pad(values, (0, -values.numel() % QUANTISED_BLOCK)).view(-1, QUANTISED_BLOCK)
