"""Grouped products of many experts at once, for rows sorted by expert."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.parallel.tensor import ColumnLinear, RowLinear

Multiply = Callable[[str, Tensor], Tensor]
"""(name of a matrix, rows) -> the rows times the matrices of this name of their experts."""
ALIGNED = 8
"""bf16 elements in 16 bytes; torch's kernel needs row sizes that are multiples of it."""


def can_group(experts: Sequence[nn.Module], rows: Tensor) -> bool:
    """Whether the products of `rows` can be grouped: plain ones in bf16, which torch's kernel supports on every device.

    Not if experts or their matrices have hooks, as with profiles and DeepSpeed's stage 3, since grouping does not call these.
    """
    if rows.dtype != torch.bfloat16 or len(experts) == 1:
        return False
    return all(_is_plain(module) for expert in experts for module in expert.modules())


def apply_grouped(experts: Sequence[nn.Module], rows: Tensor, counts: Tensor) -> Tensor:
    """Apply experts to rows [n, hidden] sorted by expert; `counts` [experts], the rows of each, stay on the device."""
    ends = counts.cumsum(0, dtype=torch.int32)

    def multiply(name: str, x: Tensor) -> Tensor:
        matrices = [expert.get_submodule(name) for expert in experts]
        product = grouped_linear(x, [_weight(matrix) for matrix in matrices], ends)
        biases = [matrix.bias for matrix in matrices if isinstance(matrix.bias, Tensor)]
        if not biases:
            return product
        parts = matrices[0].tensor.size if isinstance(matrices[0], RowLinear) else 1
        expert_of_row = torch.bucketize(torch.arange(len(x), device=x.device, dtype=ends.dtype), ends, right=True)
        return product + torch.stack(biases).index_select(0, expert_of_row) / parts

    result: Tensor = experts[0](rows, multiply)
    return result


def grouped_linear(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Rows `x` [n, inputs] times the transpose of their weight out of `weights`, each [outputs, inputs]: [n, outputs].

    `ends` [weights], int32: the end of the rows of each weight. `x` and the weights are saved for backward. The weights are
    stacked anew for each product, unless they already lie at equal distances in one storage.
    """
    result: Tensor = _Grouped.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
    return result


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, stack_weights(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x, _, *of_weights = ctx.needs_input_grad
        to_x = torch._grouped_mm(gradient, stack_weights(weights), offs=ends) if of_x else None
        if not any(of_weights):
            return to_x, None, *(None for _ in weights)
        return to_x, None, *torch._grouped_mm(gradient.T, x, offs=ends).unbind()


def stack_weights(weights: Sequence[Tensor]) -> Tensor:
    """Matrices of equal shape as [matrices, outputs, inputs]: a view if they lie at equal distances in one storage, else a
    copy."""
    first = weights[0]
    if torch.compiler.is_compiling() or not all(weight.is_contiguous() for weight in weights):
        return torch.stack(tuple(weights))
    storages = {weight.untyped_storage()._cdata for weight in weights}
    offsets = [weight.storage_offset() for weight in weights]
    distance = offsets[1] - offsets[0]
    equal = all(after - before == distance for before, after in itertools.pairwise(offsets))
    if len(storages) > 1 or not equal or distance < first.numel() or distance % ALIGNED:
        return torch.stack(tuple(weights))
    return first.detach().as_strided((len(weights), *first.shape), (distance, *first.stride()))


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if not isinstance(module, ColumnLinear | RowLinear):
        return True
    plain = module.adapter is None and module.quantised is None and not module.float8
    return plain and not (module.in_features % ALIGNED or module.out_features % ALIGNED)


def _weight(matrix: nn.Module) -> Tensor:
    assert isinstance(matrix, ColumnLinear | RowLinear)
    return matrix.weight
