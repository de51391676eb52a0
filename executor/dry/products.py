"""The matrix products of an operator and its FLOPs, from the shapes of its arguments on this rank."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Shape = tuple[int, int, int]
"""(rows, inner, outer): 2 x rows x inner x outer FLOPs."""
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Operator -> index of the first of its two factors."""
ATTENTION = "scaled_dot_product"
"""Part of the name of fused attention operators."""


def products_of(packet: Any, args: tuple[Any, ...], flops: int) -> list[Shape]:
    """The products of one call of a counted operator; one cube of equal FLOPs if its shapes are not known here.

    A convolution multiplies rows of (samples x positions of the output) by its kernels; its backward computes as many FLOPs for
    each gradient that is wanted.
    """
    if packet in _MATRICES:
        matrix, other = args[_MATRICES[packet] : _MATRICES[packet] + 2]
        *batch, rows, inner = matrix.shape
        return [(math.prod(batch) * rows, inner, other.shape[-1])]
    if packet in (aten.convolution, aten._convolution):
        return [_convolution(args[1], args[6], args[8], flops)]
    if packet is aten.convolution_backward:
        gradient_count = max(sum(map(bool, args[10][:2])), 1)
        return [_convolution(args[2], args[7], args[9], flops // gradient_count)] * gradient_count
    side = max(round((flops / 2) ** (1 / 3)), 1)
    return [(side, side, side)]


def _convolution(weight: Any, transposed: bool, groups: int, flops: int) -> Shape:
    """From the weight [outputs, inputs / groups, …], or [inputs, outputs / groups, …] if transposed; rows from the FLOPs."""
    first, second, *kernel = weight.shape
    taps = math.prod(kernel)
    inner, outer = (first // groups * taps, second * groups) if transposed else (second * taps, first)
    return max(round(flops / (2 * inner * outer)), 1), inner, outer


def workspace_bytes(packet: Any, args: tuple[Any, ...]) -> int:
    """Temporary memory of a CPU's kernel beside its results: reordered operands of convolutions [counted, torch 2.13]."""
    if packet in (aten.convolution, aten._convolution):
        copied = args[:2]
    elif packet is aten.convolution_backward:
        copied = args[:3]
    else:
        return 0
    # oneDNN reorders operands in memory of their own from 16 channels on.
    return sum(value.numel() * value.element_size() for value in copied if value.shape[1] >= 16)


Formula = Callable[..., int]
"""(arguments of the operator, `out_val`: its result) -> FLOPs."""


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products: the scores, and the weighted values. With grouped queries each query head counts."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1]))


def _backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """The recomputed scores, and the gradients of scores, queries, keys and values."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return int(2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _grouped(rows: Any, other: Any, *_: Any, **__: Any) -> int:
    """Rows of [n, k] each times one of the matrices [groups, k, m]; or columns of [m, n] times rows of [n, k], by group."""
    return int(2 * rows.shape[0] * rows.shape[1] * other.shape[-1])


def _attention() -> dict[Any, Formula]:
    """Formulas of this torch's fused attention operators: torch's own table lacks the CPU's and grouped queries."""
    aten = torch.ops.aten
    formulas: dict[Any, Formula] = {}
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        forward, backward = (f"_scaled_dot_product_{kind}{suffix}" for suffix in ("", "_backward"))
        if hasattr(aten, forward) and hasattr(aten, backward):
            formulas |= {getattr(aten, forward): _forward, getattr(aten, backward): _backward}
    return formulas


FORMULAS: Mapping[Any, Formula] = {**flop_registry, **_attention(), torch.ops.aten._grouped_mm: _grouped}
"""Operator packet -> formula: torch's for matrix products and convolutions."""
