"""Causal attention to a window and the first tokens, or within chunks; fully masked blocks are neither computed nor saved."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from executor.parallel.attention_kernel import any_kernel, scaled_attention
from search_spaces.training.windows import Visit, Window

FLEX_TYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_LEAST_WIDTH = 16
"""Minimum head width for the tensor-core tiles of flex attention."""
MASKS_KEPT = 64


def attend_to_window(query: Tensor, key: Tensor, value: Tensor, window: Window, start: int, grouped: bool) -> Tensor:
    """Attention of queries [batch, heads, n, head_dim] at positions from `start` on, to keys from the first token on.

    On CUDA this is torch's flex attention, whose kernel skips fully masked blocks. Its CPU version has no backward; there, and
    if a kernel is chosen by name, each block of queries attends to the range of keys that any of them sees. Whole chunks need
    no mask at all.
    """
    if window.has_whole_chunks(start, query.shape[2]):
        return attend_in_chunks(query, key, value, window.tokens, start)
    if can_flex(query):
        return attend_by_flex(query, key, value, window, start, grouped)
    return attend_by_blocks(query, key, value, window, start)


def attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, tokens: int, start: int) -> Tensor:
    """Causal attention within chunks of `tokens` tokens: a batch of chunks, of which queries and keys are views.

    `start` and the number of queries are multiples of `tokens`.
    """
    samples, end = query.shape[0], start + query.shape[2]

    def chunks(x: Tensor) -> Tensor:
        return x.view(samples, x.shape[1], -1, tokens, x.shape[3]).transpose(1, 2).flatten(0, 1)

    key, value = (x if x.shape[2] == end - start else x[:, :, start:end] for x in (key, value))
    mixed = scaled_attention(chunks(query), chunks(key), chunks(value), is_causal=True)
    return mixed.view(samples, -1, *mixed.shape[1:]).transpose(1, 2).flatten(2, 3)


def can_flex(query: Tensor) -> bool:
    """Whether torch's flex attention computes attention of these queries."""
    return query.is_cuda and any_kernel() and query.dtype in FLEX_TYPES and query.shape[-1] >= FLEX_LEAST_WIDTH


def attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, window: Window, start: int, grouped: bool, compiled: bool = True
) -> Tensor:
    """Attention by torch's flex attention; without `compiled` it computes every score, and has no backward on CPUs."""
    mask = block_mask_of(window, start, query.shape[2], key.shape[2], str(query.device))
    attend = compiled_flex() if compiled else _plain_flex
    return attend(query, key, value, block_mask=mask, enable_gqa=grouped)


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, window: Window, start: int) -> Tensor:
    """Attention by scaled dot-product attention of each block of queries.

    1. `Window.visits` returns the blocks and their ranges of keys: a window, and the global tokens if they are outside it.
    2. Ranges are views; their gradients are accumulated into one tensor (`_Ranges`), because the backward of each separate
       slice would allocate a tensor of the whole sequence.
    3. Blocks with a whole window before them share one mask.
    """
    visits = list(window.visits(start, query.shape[2]))
    keys, values = (_visited(x, visits) for x in (key, value))
    masks: dict[tuple[int, ...], Tensor] = {}
    mixed = []
    queries = torch.split(query, [visit.queries for visit in visits], dim=2)
    for visit, rows, near, far in zip(visits, queries, keys, values, strict=True):
        kind = (visit.queries, visit.first_query - visit.first_key, visit.global_keys, visit.first_key == 0)
        if kind not in masks:
            masks[kind] = _mask(visit, window, query)
        mixed.append(scaled_attention(rows, near, far, masks[kind]))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def sees(window: Window) -> Callable[[Any, Any], Any]:
    """A predicate: whether a query attends to a key, by their positions in the sequence."""
    if not window.tokens:
        return lambda query, key: key <= query
    if window.chunked:
        return lambda query, key: (key <= query) & (query // window.tokens == key // window.tokens)
    return lambda query, key: (key <= query) & ((query - key < window.tokens) | (key < window.global_tokens))


def _mask(visit: Visit, window: Window, like: Tensor) -> Tensor:
    """Additive mask [queries, keys]; every kernel accepts this form without conversion, so that blocks can share it."""
    queries = torch.arange(visit.first_query, visit.end, device=like.device)
    keys = torch.cat([
        torch.arange(visit.global_keys, device=like.device),
        torch.arange(visit.first_key, visit.end, device=like.device),
    ])  # fmt: skip
    seen = sees(window)(queries[:, None], keys[None])
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def _visited(x: Tensor, visits: Sequence[Visit]) -> list[Tensor]:
    """The part of keys or values [batch, heads, tokens, head_dim] that each block reads."""
    most = max(visit.global_keys for visit in visits)
    ranges = [(0, most), *((visit.first_key, visit.end) for visit in visits)]
    first, *near = _Ranges.apply(x, ranges)  # type: ignore[no-untyped-call]
    return [torch.cat((first, part), dim=2) if visit.global_keys else part for visit, part in zip(visits, near, strict=True)]


class _Ranges(torch.autograd.Function):
    """Ranges of dimension 2, which may overlap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.ranges = x.shape, ranges
        return tuple(x[:, :, first:end] for first, end in ranges)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[-1].new_zeros(ctx.shape)
        for (first, end), gradient in zip(ctx.ranges, gradients, strict=True):
            total[:, :, first:end] += gradient
        return total, None


def _plain_flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mixed: Tensor = flex_attention(query, key, value, **options)
    return mixed


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """torch's flex attention, compiled for each shape."""
    return torch.compile(_plain_flex, dynamic=False)


@lru_cache(MASKS_KEPT)
def block_mask_of(window: Window, start: int, queries: int, keys: int, device: str) -> BlockMask:
    """The mask of visited blocks, created once for all layers and steps."""
    seen = sees(window)
    return create_block_mask(lambda _b, _h, query, key: seen(query + start, key), None, None, queries, keys, device=device)
