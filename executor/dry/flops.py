"""FLOPs of an operator from the shapes of this rank."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

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


def _grouped(one: Any, other: Any, *_: Any, **__: Any) -> int:
    """Rows of [n, k] each times one of the matrices [groups, k, m]; or columns of [m, n] times rows of [n, k], by group."""
    return int(2 * one.shape[0] * one.shape[1] * other.shape[-1])


def _attention() -> dict[Any, Formula]:
    """Formulas of this torch's fused attention operators: torch's own table lacks the CPU's and grouped queries."""
    aten = torch.ops.aten
    found: dict[Any, Formula] = {}
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        forward, backward = (f"_scaled_dot_product_{kind}{suffix}" for suffix in ("", "_backward"))
        if hasattr(aten, forward) and hasattr(aten, backward):
            found |= {getattr(aten, forward): _forward, getattr(aten, backward): _backward}
    return found


FORMULAS: Mapping[Any, Formula] = {**flop_registry, **_attention(), torch.ops.aten._grouped_mm: _grouped}
"""Operator packet -> formula: torch's for matrix products and convolutions."""
