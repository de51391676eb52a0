"""Causal attention inside of documents that share a row: none of them sees another."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from executor.parallel.attention_kernel import any_kernel, scaled_attention
from executor.parallel.windowed import FLEX_LEAST_WIDTH, FLEX_TYPES, compiled_flex


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a micro-batch of packed rows; what pads a row is one more, which no other sees.

    What attention needs of them is found once for all layers.
    """

    lengths: tuple[int, ...]
    """Of all documents, row by row; they sum to the tokens of the micro-batch. Empty where `mask` says it."""
    mask: BlockMask | None
    """For flex attention; None: each document is attended to by itself."""


def documents_in(places: Tensor, dtype: torch.dtype, head_dim: int) -> Documents:
    """The documents of rows whose tokens stand at `places` [batch, tokens], each of which begins at 0.

    On CUDA torch's flex attention passes by blocks in which no query sees a key, without asking the host how long documents
    are. Its CPU form has no backward; there, and where a kernel is asked for by name, each document is a call of its own.
    """
    begins = places == 0
    if places.is_cuda and any_kernel() and dtype in FLEX_TYPES and head_dim >= FLEX_LEAST_WIDTH:
        return Documents((), block_mask(begins.cumsum(1)))
    firsts = begins.flatten().nonzero().flatten()
    ends = functional.pad(firsts[1:], (0, 1), value=begins.numel())
    return Documents(tuple((ends - firsts).tolist()), None)


def attend_in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Documents, grouped: bool) -> Tensor:
    """Attention of each token of [batch, heads, tokens, head_dim] to the tokens of its document that are not behind it."""
    if documents.mask is not None:
        return compiled_flex()(query, key, value, block_mask=documents.mask, enable_gqa=grouped)
    rows, lengths = query.shape[0], documents.lengths
    queries, keys, values = (_in_documents(x, lengths) for x in (query, key, value))
    mixed = [
        scaled_attention(own, key, value, is_causal=True)[0].transpose(0, 1)
        for own, key, value in zip(queries, keys, values, strict=True)
    ]
    whole = torch.cat(mixed)
    return whole.view(rows, -1, *whole.shape[1:]).transpose(1, 2)


def block_mask(numbers: Tensor) -> BlockMask:
    """The blocks that are visited, by the number of each token's document [batch, tokens]."""

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (numbers[batch, query] == numbers[batch, key])

    rows, tokens = numbers.shape
    return create_block_mask(sees, rows, None, tokens, tokens, device=str(numbers.device))


def _in_documents(x: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """[batch, heads, tokens, width] as [1, heads, its tokens, width] for each document."""
    whole = x.transpose(1, 2).flatten(0, 1)
    return [part.transpose(0, 1)[None] for part in torch.split(whole, list(lengths))]
