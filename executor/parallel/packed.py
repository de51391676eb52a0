"""Causal attention within documents that are packed into a row, without attention between documents."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from executor.parallel.attention_kernel import any_kernel, scaled_attention
from executor.parallel.scores import Scores, attend_with_scores, by_flex
from executor.parallel.windowed import FLEX_LEAST_WIDTH, FLEX_TYPES, compiled_flex
from search_spaces.training.windows import Window


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
        attend = functools.partial(attend_with_scores, scores=scores, window=Window(0))
    mixed = [attend(own, key, value)[0].transpose(0, 1) for own, key, value in zip(queries, keys, values, strict=True)]
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
