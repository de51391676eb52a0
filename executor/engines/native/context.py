"""Context parallelism: each rank has a part of every sequence, and attention gathers the keys and values of all."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from executor.engines.native.collectives import Group
from executor.engines.native.selective import keep_collective
from executor.engines.native.virtual_tokens import Prefix

CHUNKS_PER_RANK = 2


class ContextParallel:
    """Which tokens a rank has, and causal attention over all of them.

    A sequence is cut into twice as many chunks as ranks; rank i has chunk i and chunk 2c - 1 - i. Causal attention costs a
    chunk what stands before it, so that head and tail together cost every rank the same. Keys and values are gathered whole,
    in one all-gather a layer, as Llama 3 is trained [Grattafiori et al. 2024, 3.3.2].
    """

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.size

    def positions(self, length: int) -> Tensor:
        """The places in a sequence of `length` tokens of the tokens that this rank has, int64, in order."""
        chunks = torch.arange(length).view(CHUNKS_PER_RANK * self.size, -1) if self.size > 1 else torch.arange(length)[None]
        if self.size == 1:
            return chunks[0]
        return torch.cat((chunks[self.group.rank], chunks[-1 - self.group.rank]))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool, prefix: Prefix | None = None
    ) -> Tensor:
        """Causal attention of this rank's queries [batch, heads, own tokens, head_dim] on every rank's keys and values.

        `mask` [own tokens, prefix and tokens] is True where a token may look; None: at the prefix, and as causality allows.
        """
        if self.size == 1:
            if prefix is not None:
                key, value = prefix(key, value)
                mask = _up_to_the_end(query, key.shape[2]) if mask is None else mask
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        gathered: Tensor = _GatherChunks.apply(torch.stack((key, value)), self.group)  # type: ignore[no-untyped-call]
        key, value = gathered if prefix is None else prefix(*gathered)
        if mask is not None:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        chunk = query.shape[2] // CHUNKS_PER_RANK
        virtual = 0 if prefix is None else prefix.length
        seen = (virtual + (self.group.rank + 1) * chunk, key.shape[2] - self.group.rank * chunk)
        mixed = [
            functional.scaled_dot_product_attention(
                part, key[:, :, :end], value[:, :, :end], attn_mask=_up_to_the_end(part, end), enable_gqa=grouped
            )
            for part, end in zip(query.chunk(CHUNKS_PER_RANK, dim=2), seen, strict=True)
        ]
        return torch.cat(mixed, dim=2)


def _up_to_the_end(query: Tensor, end: int) -> Tensor:
    """The causal mask of the last tokens before `end`; on CUDA in the form that its fused kernels take."""
    tokens = query.shape[2]
    if query.is_cuda:
        bias: Tensor = causal_lower_right(tokens, end)
        return bias
    return torch.ones(tokens, end, dtype=torch.bool, device=query.device).tril(end - tokens)


def _gather_chunks(x: Tensor, group: Group) -> Tensor:
    """Every rank's head and tail, put in the order of the sequence."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    heads, tails = rows.view(group.size, *x.shape).chunk(CHUNKS_PER_RANK, dim=4)
    ordered = torch.cat((heads, tails.flip(0)))
    return ordered.movedim(0, 3).flatten(3, 4)


class _GatherChunks(torch.autograd.Function):
    """[2, batch, heads, own tokens, head_dim] of every rank to [2, batch, heads, tokens, head_dim] in the sequence's order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return keep_collective(lambda: _gather_chunks(x, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        gradient = gradients[0]
        shape = (*gradient.shape[:3], CHUNKS_PER_RANK * group.size, -1, gradient.shape[4])
        chunks = gradient.reshape(shape).movedim(3, 0)
        rows = torch.cat((chunks[: group.size], chunks[group.size :].flip(0)), dim=4).contiguous()
        own = torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)
        group.reduce_scatter(own.view(-1), rows.view(group.size, -1)).wait()
        return own, None
