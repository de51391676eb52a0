"""Products of linear layers in 8 bits, in plain torch: the recipe `tensorwise` of torchao.float8 (0.18), number by number.

torchao itself is not used: its conversion puts layers of its own in the place of ours, which know nothing of slices and of
where ranks exchange what, and the engine must run where nothing but torch can be installed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12
"""Of a tensor's largest magnitude: zeros have a scale too."""
ROWS = 16
"""Of what a sum over rows must have a multiple, on devices with float8 products."""


class Scaled(NamedTuple):
    """A matrix in 8 bits."""

    values: Tensor
    unit: Tensor
    """What a value is multiplied by to be what it stands for: one fp32 number."""


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., inputs] times the transpose of `weight` [outputs, inputs], both rounded to 8 bits, in the type of `x`.

    1. Each operand, as this rank has it, is multiplied by what makes its largest magnitude the largest number of its 8 bits,
       and rounded: inputs and weights to e4m3, gradients of outputs to e5m2, which has a wider range and fewer digits.
    2. All three products (the result, the gradients of inputs and of weights) are of such operands, summed in fp32, and the
       units of both are multiplied in. Fast accumulation is for the result alone.
    3. Kept for backward is what `functional.linear` keeps, inputs and weights as they are: they are rounded again there.
       So a frozen matrix keeps no inputs.
    """
    if not x.numel():  # an expert that no token has chosen: there is no largest magnitude
        return functional.linear(x, weight)
    result: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def scaled(matrix: Tensor, dtype: torch.dtype) -> Scaled:
    """A matrix in `dtype`, one of E4M3 and E5M2. What is not finite makes all of it NaN."""
    least, most = torch.aminmax(matrix)
    # In fp64 compiled blocks and others come to the same scale [torchao.float8.float8_utils.amax_to_scale].
    largest = torch.maximum(most, -least).double().clamp(min=LEAST)
    scale = (torch.finfo(dtype).max / largest).float()
    # Of one dimension, so that the products are fp32: rounded once, to 8 bits.
    return Scaled((matrix * scale.view(1)).to(dtype), scale.reciprocal())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_input, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_input else None)
        inputs, matrix = scaled(_rows(x), E4M3), scaled(weight, E4M3)
        return _multiply(inputs, matrix, x.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient, dtype = scaled(_rows(gradients[0]), E5M2), gradients[0].dtype
        of_input, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_input = _multiply(gradient, _turned(scaled(weight, E4M3)), dtype).view(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            outputs, inputs = (_turned(_filled(operand)) for operand in (gradient, scaled(_rows(x), E4M3)))
            of_weight = _multiply(outputs, inputs, dtype)
        return of_input, of_weight


def _multiply(one: Scaled, other: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """[n, k] times the transpose of [m, k]: the one order in which float8 products take their operands."""
    result: Tensor = torch._scaled_mm(
        one.values, other.values.T, scale_a=one.unit, scale_b=other.unit, out_dtype=dtype, use_fast_accum=fast
    )
    return result


def _turned(matrix: Scaled) -> Scaled:
    return Scaled(matrix.values.T.contiguous(), matrix.unit)


def _filled(matrix: Scaled) -> Scaled:
    """With rows of zeros up to a multiple of `ROWS`."""
    missing = -len(matrix.values) % ROWS
    if not missing:
        return matrix
    filled = functional.pad(matrix.values.view(torch.uint8), (0, 0, 0, missing))
    return Scaled(filled.view(matrix.values.dtype), matrix.unit)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
