"""Causal attention on one rank: the choice of a kernel, changed scores, packed documents, windows and chunks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from search_spaces.kernels import ATTENTION_KERNELS, BEST, verdict
from search_spaces.training.windows import AttentionWindow, Visit

FLEX_TYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_LEAST_WIDTH = 16
"""Minimum head width for the tensor-core tiles of flex attention."""


def attend_to_window(query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, start: int, grouped: bool) -> Tensor:
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
    query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, start: int, grouped: bool, compiled: bool = True
) -> Tensor:
    """Attention by torch's flex attention; without `compiled` it computes every score, and has no backward on CPUs."""
    mask = block_mask_of(window, start, query.shape[2], key.shape[2], str(query.device))
    attend = compiled_flex() if compiled else _plain_flex
    return attend(query, key, value, block_mask=mask, enable_gqa=grouped)


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, start: int) -> Tensor:
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
    for visit, rows, block_keys, block_values in zip(visits, queries, keys, values, strict=True):
        kind = (visit.queries, visit.first_query - visit.first_key, visit.global_keys, visit.first_key == 0)
        if kind not in masks:
            masks[kind] = _mask(visit, window, query)
        mixed.append(scaled_attention(rows, block_keys, block_values, masks[kind]))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def sees(window: AttentionWindow) -> Callable[[Any, Any], Any]:
    """A predicate: whether a query attends to a key, by their positions in the sequence."""
    if not window.tokens:
        return lambda query, key: key <= query
    if window.chunked:
        return lambda query, key: (key <= query) & (query // window.tokens == key // window.tokens)
    return lambda query, key: (key <= query) & ((query - key < window.tokens) | (key < window.global_tokens))


def _mask(visit: Visit, window: AttentionWindow, like: Tensor) -> Tensor:
    """Additive mask [queries, keys]; every kernel accepts this form without conversion, so that blocks can share it."""
    queries = torch.arange(visit.first_query, visit.end, device=like.device)
    keys = torch.cat([
        torch.arange(visit.global_keys, device=like.device),
        torch.arange(visit.first_key, visit.end, device=like.device),
    ])  # fmt: skip
    visible = sees(window)(queries[:, None], keys[None])
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def _visited(x: Tensor, visits: Sequence[Visit]) -> list[Tensor]:
    """The part of keys or values [batch, heads, tokens, head_dim] that each block reads."""
    most = max(visit.global_keys for visit in visits)
    ranges = [(0, most), *((visit.first_key, visit.end) for visit in visits)]
    first, *parts = _Ranges.apply(x, ranges)  # type: ignore[no-untyped-call]
    return [torch.cat((first, part), dim=2) if visit.global_keys else part for visit, part in zip(visits, parts, strict=True)]


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


@lru_cache(64)
def block_mask_of(window: AttentionWindow, start: int, queries: int, keys: int, device: str) -> BlockMask:
    """The mask of visited blocks, created once for all layers and steps."""
    is_visible = sees(window)
    return create_block_mask(
        lambda _b, _h, query, key: is_visible(query + start, key), None, None, queries, keys, device=device
    )


SWITCHES: Mapping[str, Callable[[bool], None]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
"""Value of `attention_backend` -> torch's switch of that kernel. The switches are process-wide and also apply on CPUs."""


PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_chosen = BEST


def choose_attention_kernel(name: str) -> None:
    """Allow torch only this kernel, or all of them. Every session calls this, since ranks outlive their trials."""
    # Stored in addition to torch's switches, because reading those causes a graph break in torch.compile.
    global _chosen
    _chosen = name
    for kernel, switch in SWITCHES.items():
        switch(name in (BEST, kernel))


def any_kernel() -> bool:
    """Whether torch chooses the kernel."""
    return _chosen == BEST


def scaled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's scaled dot-product attention of [batch, heads, tokens, width] to keys of as many heads or fewer, with the chosen
    kernel.

    If the kernel does not support grouped heads (`verdict`), keys and values are repeated for each query head: otherwise torch
    would use its `math` kernel, which stores every score, or raise an error. Values that are narrower than keys are padded for
    the same reason.
    """
    width = value.shape[-1]
    if width < query.shape[-1]:
        padded = functional.pad(value, (0, query.shape[-1] - width))
        return scaled_attention(query, key, padded, mask, is_causal)[..., :width]
    grouped = query.shape[1] != key.shape[1]
    # torch's causal bias is not a mask: the kernels that support causal attention support it too.
    if grouped and repeats_heads(query, key, masked=type(mask) is Tensor):
        key, value = (_one_for_each(x, query.shape[1]) for x in (key, value))
        grouped = False
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def has_no_bias(query: Tensor) -> bool:
    """Whether the chosen kernel would get the causal bias of the last tokens as a mask: cuDNN has only that of the first."""
    return query.is_cuda and _chosen == "cudnn"


def needs_flash(query: Tensor) -> bool:
    """Whether the flash kernel is to be called by name: in compiled blocks, which cannot create torch's causal bias, if it is
    allowed and has the query's type and width, on devices since Ampere."""
    if not (query.is_cuda and torch.compiler.is_compiling() and _chosen in (BEST, "flash")):
        return False
    fits = PRECISIONS.get(query.dtype) in ATTENTION_KERNELS["cuda"]["flash"].precisions and query.shape[-1] <= 256
    return fits and torch.cuda.get_device_properties(query.device).major >= 8


def attend_by_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last tokens to keys and values of all, by the operator that torch's causal bias dispatches
    to: for it, causal means that the last query sees the last key [torch/nn/attention/bias.py]."""
    width = query.shape[-1]
    # The kernel takes one width, a multiple of 8.
    operands = (functional.pad(x, (0, -(-width // 8) * 8 - x.shape[-1])) for x in (query, key, value))
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    mixed: Tensor = operator(*operands, 0.0, is_causal=True, scale=width**-0.5)[0]
    return mixed[..., : value.shape[-1]]


def attend_to_earlier(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last tokens [batch, heads, n, width] to keys and values of all, by cuDNN without a mask."""
    padded = functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
    mixed: Tensor = _EarlierAndOwn.apply(query, key, padded)  # type: ignore[no-untyped-call]
    return mixed[..., : value.shape[-1]]


class _EarlierAndOwn(torch.autograd.Function):
    """1. Queries attend to the earlier keys, which they all see, and causally to those of their own tokens: two calls.
    2. The results are merged by the logarithms of their sums of exponentials, [batch, heads, n, 1] in fp32.
    3. Backward of both calls takes the merged result and logarithm, so that their gradients add up [Liu et al. 2023, ring
       attention; torch.distributed.tensor.experimental does so].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls = [
            torch.ops.aten._scaled_dot_product_cudnn_attention(query, keys, values, None, True, is_causal=is_causal)
            for keys, values, is_causal in _earlier_and_own(query, key, value)
        ]
        (earlier, before, *_), (own, logarithm, *_) = calls
        share = torch.sigmoid(logarithm - before)
        mixed = torch.lerp(earlier.to(share.dtype), own.to(share.dtype), share).to(query.dtype)
        seeds = [seed for call in calls for seed in call[6:8]]
        ctx.save_for_backward(query, key, value, mixed, torch.logaddexp(before, logarithm), *seeds)
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, mixed, logarithm, *seeds = ctx.saved_tensors
        calls = [
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                gradients[0], query, keys, values, mixed, logarithm, *seeds[2 * index : 2 * index + 2], None, None, None,
                query.shape[2], keys.shape[2], 0.0, is_causal,
            )
            for index, (keys, values, is_causal) in enumerate(_earlier_and_own(query, key, value))
        ]  # fmt: skip
        of_queries, of_keys, of_values = zip(*calls, strict=True)
        return of_queries[0] + of_queries[1], torch.cat(of_keys, dim=2), torch.cat(of_values, dim=2)


def _earlier_and_own(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys and values before those of the queries' tokens, and theirs; whether attention to them is causal."""
    sizes = [key.shape[2] - query.shape[2], query.shape[2]]
    return list(zip(torch.split(key, sizes, dim=2), torch.split(value, sizes, dim=2), (False, True), strict=True))


def repeats_heads(query: Tensor, key: Tensor, masked: bool) -> bool:
    """Whether the chosen kernel does not support grouped heads on the query's device."""
    kind, precision = query.device.type, PRECISIONS.get(query.dtype)
    if kind not in ATTENTION_KERNELS or precision is None:
        return False
    return verdict(_chosen, precision, query.shape[1], key.shape[1], kind, masked).repeats_heads


def _one_for_each(x: Tensor, heads: int) -> Tensor:
    """[batch, key-value heads, tokens, width] to [batch, heads, tokens, width]: repeat heads for queries that share them."""
    batch, groups, tokens, width = x.shape
    return x[:, :, None].expand(batch, groups, heads // groups, tokens, width).reshape(batch, heads, tokens, width)


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
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, window: AttentionWindow, start: int = 0, virtual: int = 0
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
    visible = torch.nn.functional.pad(sees(window)(places[:, None], keys[None]), (virtual, 0), value=True)
    return attend_by_scores(query, key, value, scores, visible)


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


def attend_by_scores(query: Tensor, key: Tensor, value: Tensor, scores: Scores, visible: Tensor) -> Tensor:
    """Attention of queries [batch, heads, n, head_dim] to keys of as many heads or fewer, by whole scores.

    `visible` [n, keys]: whether a query attends to a key.
    """
    groups = key.shape[1]
    grouped = query.view(query.shape[0], groups, -1, *query.shape[2:])  # [batch, key-value heads, queries of each, n, head_dim]
    product = grouped @ key[:, :, None].transpose(-1, -2) * query.shape[-1] ** -0.5
    if scores.softcap:
        product = soft_cap(product, scores.softcap)
    product = product.masked_fill(~visible, float("-inf"))
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


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a micro-batch of packed rows; the padding of a row counts as a further document.

    It is computed once for all layers.
    """

    lengths: tuple[int, ...]
    """Lengths of all documents, row by row; they sum to the tokens of the micro-batch. Empty if there is a `mask`."""
    mask: BlockMask | None
    """Mask for flex attention; None: attention is computed separately for each document."""


def documents_in(places: Tensor, dtype: torch.dtype, head_dim: int, chunk: int = 0) -> Documents:
    """The documents of rows, from the positions `places` [batch, tokens] of tokens in their documents, which start at 0.

    `chunk`: tokens of the chunks that attention stays in, each of which counts as a document of its own; 0: no chunks.

    On CUDA torch's flex attention skips blocks in which no query attends to a key, without reading the lengths of documents on
    the host. Its CPU version has no backward; there, and if a kernel is chosen by name, each document is a separate call.
    """
    begins = (places % chunk if chunk else places) == 0
    if places.is_cuda and any_kernel() and dtype in FLEX_TYPES and head_dim >= FLEX_LEAST_WIDTH:
        return Documents((), block_mask(begins.cumsum(1)))
    firsts = begins.flatten().nonzero().flatten()
    ends = functional.pad(firsts[1:], (0, 1), value=begins.numel())
    return Documents(tuple((ends - firsts).tolist()), None)


def attend_in_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, grouped: bool, scores: Scores | None = None
) -> Tensor:
    """Causal attention of each token of [batch, heads, tokens, head_dim] to the tokens of its document."""
    if documents.mask is not None and scores is not None:
        return by_flex(query, key, value, scores, documents.mask)
    if documents.mask is not None:
        return compiled_flex()(query, key, value, block_mask=documents.mask, enable_gqa=grouped)
    rows, lengths = query.shape[0], documents.lengths
    queries, keys, values = (_in_documents(x, lengths) for x in (query, key, value))
    attend = functools.partial(scaled_attention, is_causal=True)
    if scores is not None:
        attend = functools.partial(attend_with_scores, scores=scores, window=AttentionWindow(0))
    mixed = [
        attend(document_queries, key, value)[0].transpose(0, 1)
        for document_queries, key, value in zip(queries, keys, values, strict=True)
    ]
    whole = torch.cat(mixed)
    return whole.view(rows, -1, *whole.shape[1:]).transpose(1, 2)


def block_mask(numbers: Tensor) -> BlockMask:
    """The mask of visited blocks, from the number of each token's document [batch, tokens]."""

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (numbers[batch, query] == numbers[batch, key])

    rows, tokens = numbers.shape
    return create_block_mask(sees, rows, None, tokens, tokens, device=str(numbers.device))


def _in_documents(x: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """[batch, heads, tokens, width] as [1, heads, its tokens, width] for each document."""
    whole = x.transpose(1, 2).flatten(0, 1)
    return [part.transpose(0, 1)[None] for part in torch.split(whole, list(lengths))]
