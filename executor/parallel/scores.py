"""Attention whose scores are changed before the softmax, which torch's fused kernels do not support."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from executor.parallel.windowed import block_mask_of, can_flex, compiled_flex, sees
from search_spaces.training.windows import Window


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a model does with its scores."""

    softcap: float = 0.0
    """They are limited to c tanh(score / c); 0: not limited."""
    sinks: Tensor | None = None
    """A score of each head [heads] that takes its share of the softmax and gives nothing [Agarwal et al. 2025, GPT-OSS]."""

    def of_heads(self, first: int, count: int) -> "Scores":
        """The same for some of the heads."""
        return self if self.sinks is None else Scores(self.softcap, self.sinks[first : first + count])


class Sinks(nn.Module):
    """The trained scores of a rank's heads."""

    split: ClassVar[dict[str, int]] = {"weight": 0}
    """Parameter -> the dimension that is sliced over tensor-parallel ranks."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


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


def by_flex(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: BlockMask, attend: Callable[..., Any] | None = None
) -> Tensor:
    """Attention under a block mask by torch's flex attention; `attend`: the function itself, None: compiled."""
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": query.shape[1] != key.shape[1]}
    attend = attend or compiled_flex()
    if scores.softcap:
        options["score_mod"] = _capped(scores.softcap)
    mixed: Tensor
    if scores.sinks is None:
        mixed = attend(query, key, value, **options)
        return mixed
    mixed, auxiliary = attend(query, key, value, return_aux=AuxRequest(lse=True), **options)
    # The share of the softmax that the sink leaves to the tokens.
    share = torch.sigmoid(auxiliary.lse - scores.sinks[:, None])
    shared: Tensor = mixed * share[..., None].to(mixed.dtype)
    return shared


def attend_by_scores(query: Tensor, key: Tensor, value: Tensor, scores: Scores, seen: Tensor) -> Tensor:
    """Attention of queries [batch, heads, n, head_dim] to keys of as many heads or fewer, by whole scores.

    `seen` [n, keys]: whether a query attends to a key.
    """
    groups = key.shape[1]
    grouped = query.view(query.shape[0], groups, -1, *query.shape[2:])  # [batch, key-value heads, queries of each, n, head_dim]
    product = grouped @ key[:, :, None].transpose(-1, -2) * query.shape[-1] ** -0.5
    if scores.softcap:
        product = soft_cap(product, scores.softcap)
    product = product.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.view(groups, -1, 1, 1).expand(*product.shape[:-1], 1)
        product = torch.cat((product, sinks), dim=-1)
    precise = torch.promote_types(product.dtype, torch.float32)
    weights = product.softmax(dim=-1, dtype=precise).to(query.dtype)[..., : key.shape[2]]
    mixed: Tensor = (weights @ value[:, :, None]).flatten(1, 2)
    return mixed


@cache
def _capped(limit: float) -> Callable[..., Any]:
    """A change of scores for flex attention: one function for each limit, because it is compiled for each."""

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return soft_cap(score, limit)

    return capped
