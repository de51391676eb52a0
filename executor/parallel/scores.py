"""Attention whose scores are changed before the softmax, which torch's fused kernels do not support."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from executor.parallel.attention_kernel import any_kernel
from executor.parallel.windowed import FLEX_LEAST_WIDTH, FLEX_TYPES, block_mask_of, compiled_flex, sees
from search_spaces.training.windows import Window


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model does with its scores."""

    softcap: float
    """They are limited to c tanh(score / c)."""


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """x limited to between -limit and limit, smoothly."""
    return torch.tanh(x / limit) * limit


def attend_with_scores(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, window: Window, start: int = 0, virtual: int = 0
) -> Tensor:
    """Causal attention of queries [batch, heads, n, head_dim] at positions from `start` on to keys from the first token on,
    which are preceded by `virtual` ones that every token attends to.

    On CUDA this is torch's flex attention. Elsewhere all scores are computed and kept for backward.
    """
    if not virtual and can_flex(query):
        mask = block_mask_of(window, start, query.shape[2], key.shape[2], str(query.device))
        return by_flex(query, key, value, scores, mask)
    places = torch.arange(start, start + query.shape[2], device=query.device)
    keys = torch.arange(key.shape[2] - virtual, device=query.device)
    seen = torch.nn.functional.pad(sees(window)(places[:, None], keys[None]), (virtual, 0), value=True)
    return attend_by_scores(query, key, value, scores, seen)


def can_flex(query: Tensor) -> bool:
    """Whether torch's flex attention computes this."""
    return query.is_cuda and any_kernel() and query.dtype in FLEX_TYPES and query.shape[-1] >= FLEX_LEAST_WIDTH


def by_flex(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: BlockMask, attend: Callable[..., Tensor] | None = None
) -> Tensor:
    """Attention under a block mask by torch's flex attention; `attend`: the function itself, None: compiled."""
    grouped = query.shape[1] != key.shape[1]
    attend = attend or compiled_flex()
    return attend(query, key, value, score_mod=_capped(scores.softcap), block_mask=mask, enable_gqa=grouped)


def attend_by_scores(query: Tensor, key: Tensor, value: Tensor, scores: Scores, seen: Tensor) -> Tensor:
    """Attention of queries [batch, heads, n, head_dim] to keys of as many heads or fewer, by whole scores.

    `seen` [n, keys]: whether a query attends to a key.
    """
    groups = key.shape[1]
    grouped = query.view(query.shape[0], groups, -1, *query.shape[2:])  # [batch, key-value heads, queries of each, n, head_dim]
    product = grouped @ key[:, :, None].transpose(-1, -2) * query.shape[-1] ** -0.5
    product = soft_cap(product, scores.softcap).masked_fill(~seen, float("-inf"))
    precise = torch.promote_types(product.dtype, torch.float32)
    weights = product.softmax(dim=-1, dtype=precise).to(query.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


@cache
def _capped(limit: float) -> Callable[..., Any]:
    """A change of scores for flex attention: one function for each limit, because it is compiled for each."""

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return soft_cap(score, limit)

    return capped
