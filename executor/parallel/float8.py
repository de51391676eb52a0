"""float8 products of linear layers in plain torch, numerically equal to the `tensorwise` recipe of torchao.float8 (0.18).

torchao itself is not used: its conversion replaces our layers by its own, which do not support slices and the collectives
between ranks, and the engine must run where only torch can be installed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12
"""Lower bound of a tensor's largest magnitude, so that zeros have a scale."""
ROWS = 16
"""A sum over rows must have a multiple of this number of rows on devices with float8 products."""


class Scaled(NamedTuple):
    """A matrix in float8."""

    values: Tensor
    unit: Tensor
    """Factor from values to the numbers that they represent: one fp32 number."""


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., inputs] times the transpose of `weight` [outputs, inputs], both rounded to float8, in the dtype of `x`.

    1. Each operand on this rank is scaled so that its largest magnitude becomes the largest number of its float8 dtype, and
       rounded: inputs and weights to e4m3, gradients of outputs to e5m2, which has a wider range and less precision.
    2. All three products (the result, the gradients of inputs and of weights) use such operands, accumulate in fp32, and are
       multiplied by the units of both. Only the result uses fast accumulation.
    3. Like `functional.linear`, it saves the unrounded inputs and weights for backward, which rounds them again. So a frozen
       matrix saves no inputs.
    """
    if not x.numel():  # an expert without tokens: there is no largest magnitude
        return functional.linear(x, weight)
    result: Tensor = _Float8Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def scaled(matrix: Tensor, dtype: torch.dtype) -> Scaled:
    """The matrix in `dtype`, E4M3 or E5M2. An element that is not finite makes all of it NaN."""
    least, most = torch.aminmax(matrix)
    # fp64, so that compiled and eager blocks compute the same scale [torchao.float8.float8_utils.amax_to_scale].
    largest = torch.maximum(most, -least).double().clamp(min=LEAST)
    scale = (torch.finfo(dtype).max / largest).float()
    # View with one dimension, so that the products are fp32 and are rounded only once, to 8 bits.
    return Scaled((matrix * scale.view(1)).to(dtype), scale.reciprocal())


class _Float8Product(torch.autograd.Function):
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
            of_input = _multiply(gradient, _transpose(scaled(weight, E4M3)), dtype).view(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            outputs, inputs = (_transpose(_pad_rows(operand)) for operand in (gradient, scaled(_rows(x), E4M3)))
            of_weight = _multiply(outputs, inputs, dtype)
        return of_input, of_weight


def _multiply(left_operand: Scaled, right_operand: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """[n, k] times the transpose of [m, k], the only operand order that float8 products support."""
    result: Tensor = torch._scaled_mm(
        left_operand.values,
        right_operand.values.T,
        scale_a=left_operand.unit,
        scale_b=right_operand.unit,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result


def _transpose(matrix: Scaled) -> Scaled:
    return Scaled(matrix.values.T.contiguous(), matrix.unit)


def _pad_rows(matrix: Scaled) -> Scaled:
    """The matrix, padded with rows of zeros to a multiple of `ROWS`."""
    missing = -len(matrix.values) % ROWS
    if not missing:
        return matrix
    filled = functional.pad(matrix.values.view(torch.uint8), (0, 0, 0, missing))
    return Scaled(filled.view(matrix.values.dtype), matrix.unit)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
