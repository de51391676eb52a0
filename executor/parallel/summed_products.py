"""Products that add the gradient of their weight to its sum over micro-batches, without a tensor for the gradient itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.parallel.block_collectives import in_compiled_blocks

AddProduct = Callable[[Tensor, Tensor], None]
"""Adds the product of the transpose of gradients [rows, outputs] and inputs [rows, inputs] to a sum [outputs, inputs]."""
_SUMS: dict[tuple[int, int], AddProduct] = {}
"""Storage of a weight and its offset there, which compiled blocks know too -> what adds to the weight's sum."""


def open_sum(weight: Tensor, add: AddProduct) -> None:
    """From now on products with `weight` (`multiply`) call `add` for its gradient."""
    _SUMS[_key(weight)] = add


def close_sum(weight: Tensor) -> None:
    """End what `open_sum` began."""
    _SUMS.pop(_key(weight), None)


def is_stand_in(gradient: Tensor | None) -> bool:
    """Whether it stands for a gradient that was added to its sum: zeros without memory of their own."""
    return gradient is not None and gradient.dim() == 2 and gradient.stride() == (0, 0)


def can_add(device: torch.device, of_products: torch.dtype, of_sums: torch.dtype) -> bool:
    """Whether the device adds products of matrices of one dtype to a sum of another: CUDA adds those of 16 bits to fp32."""
    narrow = of_products in (torch.bfloat16, torch.float16) and of_sums == torch.float32
    return of_products == of_sums or (device.type == "cuda" and narrow)


def add_product(total: Tensor, gradient: Tensor, x: Tensor, first: bool) -> None:
    """Add the product of the transpose of `gradient` and `x` to `total`, which `first` overwrites."""
    if x.dtype == total.dtype:
        torch.addmm(total, gradient.T, x, beta=int(not first), out=total)
    else:
        torch.addmm(total, gradient.T, x, total.dtype, beta=int(not first), out=total)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` with a weight that has an open sum. Autograd's gradient of the weight is a stand-in."""
    due = _Inputs.apply(x, weight)  # type: ignore[no-untyped-call]
    result: Tensor = _LinearProduct.apply(due, x.detach(), weight.detach(), bias)  # type: ignore[no-untyped-call]
    return result


class _Inputs(torch.autograd.Function):
    """Saves the tensors for backward before the product, as torch's own operator does: a block that is recomputed in backward
    stops there. Its result has no data; it represents the product in the graph.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        of_input = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return of_input, _add_to_sum(rows, x, weight)


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _due: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_bias = gradients[0].flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[3] else None
        return gradients[0], None, None, of_bias


def _stand_in(_rows: Tensor, _x: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(()).expand(weight.shape)


@in_compiled_blocks("Tensor rows, Tensor x, Tensor weight", shape=_stand_in)
def _add_to_sum(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    _SUMS[_key(weight)](rows, x.flatten(0, -2))
    return weight.new_zeros(()).expand(weight.shape)


def _key(weight: Tensor) -> tuple[int, int]:
    return weight.untyped_storage()._cdata, int(weight.storage_offset())
