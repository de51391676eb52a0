"""AdamW with moments in 8 bits as one kernel per parameter, written in Triton, which CUDA builds of torch install."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from search_spaces.optimizers import QUANTISED_BLOCK

BLOCKS = 4
"""Blocks of moments for each program: 1,024 elements."""


Moment = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes, the largest number of each block, the codebook [256], and the boundaries between its numbers [255], below which values
get the lower code."""
Factors = tuple[float, float, float, float, float, float]
"""1 minus the decay of the first moment, decay of the second one, divisor of its root, epsilon, and the factors of the weights
and of the update."""


@triton.jit
def _moment(codes, scales, codebook, block, index, valid, stored):  # type: ignore[no-untyped-def]
    code = tl.load(codes + index, mask=valid, other=0).to(tl.int32)
    return tl.load(codebook + code) * tl.load(scales + block, mask=stored, other=0.0)[:, None]


@triton.jit
def _store_moment(values, codes, scales, boundaries, block, index, valid, stored):  # type: ignore[no-untyped-def]
    """The code of a number is how many boundaries are below it, by bisection."""
    largest = tl.max(tl.where(valid, tl.abs(values), 0.0), axis=1)
    tl.store(scales + block, largest, mask=stored)
    relative = tl.div_rn(values, tl.maximum(largest, 1.1754943508222875e-38)[:, None] + tl.zeros_like(values))
    code = tl.zeros_like(index).to(tl.int32)
    for bit in tl.static_range(8):
        higher = code + (128 >> bit)
        code = tl.where(tl.load(boundaries + higher - 1) < relative, higher, code)
    tl.store(codes + index, code.to(tl.uint8), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradient, first_codes, first_scales, first_codebook, first_boundaries,
    second_codes, second_scales, second_codebook, second_boundaries,
    elements, first_factor, second_factor, root_divisor, epsilon, weight_factor, update_factor,
    size: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    index = block[:, None] * size + tl.arange(0, size)[None, :]
    valid, stored = index < elements, block * size < elements
    part = tl.load(gradient + index, mask=valid, other=0.0)
    first = _moment(first_codes, first_scales, first_codebook, block, index, valid, stored)
    first = first + first_factor * (part - first)
    second = _moment(second_codes, second_scales, second_codebook, block, index, valid, stored)
    second = second * second_factor + (1 - second_factor) * part * part
    _store_moment(first, first_codes, first_scales, first_boundaries, block, index, valid, stored)
    _store_moment(second, second_codes, second_scales, second_boundaries, block, index, valid, stored)
    root = tl.div_rn(tl.sqrt_rn(second), tl.zeros_like(second) + root_divisor) + epsilon
    value = tl.load(weights + index, mask=valid, other=0.0)
    tl.store(weights + index, value * weight_factor + update_factor * tl.div_rn(first, root), mask=valid)


def update(weights: Tensor, gradient: Tensor, first: Moment, second: Moment, factors: Factors) -> None:
    """Update the `weights` [elements] in fp32 and both moments in place, by one reading and one writing of each."""
    grid = (triton.cdiv(weights.numel(), BLOCKS * QUANTISED_BLOCK),)
    with torch.cuda.device_of(weights):  # type: ignore[no-untyped-call]
        _update[grid](
            weights, gradient, *first, *second, weights.numel(), *factors, size=QUANTISED_BLOCK, blocks=BLOCKS, num_warps=4
        )
