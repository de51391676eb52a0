"""The memory of CUDA's fused RMSNorm, of which CPUs have only the parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_parts = functional.rms_norm


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`functional.rms_norm` as CUDA computes it [aten, layer_norm_kernel.cu]: besides its input it keeps one number per row.
    A weight of another dtype than the input's is multiplied by operators there too.
    """
    if weight is not None and weight.dtype != x.dtype:
        return _parts(x, list(normalized_shape), weight, eps)
    result: Tensor = _Fused.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _Fused(torch.autograd.Function):
    """Allocates what the kernel does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = torch.empty(x.shape[:-dimensions], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        x, weight = saved[:2]
        needed = ctx.needs_input_grad
        return (
            torch.empty_like(x) if needed[0] and x is not None else None,
            torch.empty_like(weight) if needed[1] and weight is not None else None,
            None,
        )
