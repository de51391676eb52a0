"""Context parallelism: each rank holds a part of every sequence, and its tokens attend to the whole sequence."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from executor.parallel.adapters import Prefix
from executor.parallel.attention import (
    Scores,
    attend_by_flash,
    attend_to_earlier,
    attend_to_window,
    attend_with_scores,
    has_no_bias,
    needs_flash,
    scaled_attention,
    sees,
)
from executor.parallel.block_collectives import collective, with_adjoint
from executor.parallel.collectives import ProcessGroup
from search_spaces.training.windows import AttentionWindow

CHUNKS_PER_RANK = 2


class ContextParallel:
    """The tokens of a rank, and causal attention over the whole sequence.

    A sequence is cut into 2c chunks for c ranks; rank i has chunks i and 2c - 1 - i. The cost of causal attention grows with
    the position of a chunk, so the pairs balance the cost. Keys and values are gathered whole, in one all-gather per layer, as
    in the training of Llama 3 [Grattafiori et al. 2024, 3.3.2].
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size = group, group.size

    def positions(self, length: int) -> Tensor:
        """Positions of this rank's tokens in a sequence of `length` tokens, int64, in order."""
        chunks = torch.arange(length).view(CHUNKS_PER_RANK * self.size, -1) if self.size > 1 else torch.arange(length)[None]
        if self.size == 1:
            return chunks[0]
        return torch.cat((chunks[self.group.rank], chunks[-1 - self.group.rank]))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, grouped: bool, prefix: Prefix | None = None,
        scores: Scores | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of this rank's queries [batch, heads, own tokens, head_dim] to every rank's keys and values, and to
        a whole prefix."""
        if self.size == 1:
            return attend_local(query, key, value, window, grouped, prefix, scores=scores)
        key, value = self._gathered(key, value)
        chunk, whole = query.shape[2] // CHUNKS_PER_RANK, key.shape[2]
        key, value = (key, value) if prefix is None else prefix(key, value)
        virtual = 0 if prefix is None else prefix.length
        starts = (self.group.rank * chunk, whole - (self.group.rank + 1) * chunk)
        mixed = [
            _attend_from(start, part, key, value, window, grouped, virtual, scores)
            for start, part in zip(starts, query.chunk(CHUNKS_PER_RANK, dim=2), strict=True)
        ]
        return torch.cat(mixed, dim=2)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole sequence, in one message."""
        widths = [key.shape[-1], value.shape[-1]]
        local_chunks = torch.stack((key, value)) if widths[0] == widths[1] else torch.cat((key, value), dim=-1)[None]
        gathered = with_adjoint(local_chunks, self.group, _gather_chunks, _scatter_chunks)
        if len(gathered) == 1:
            keys, values = torch.split(gathered[0], widths, dim=-1)
            return keys, values
        return gathered[0], gathered[1]


class Ulysses(ContextParallel):
    """Context parallelism that exchanges tokens for heads [Jacobs et al. 2023, DeepSpeed-Ulysses, 3.1].

    Rank i has the ith part of a sequence. For attention each rank gets some heads of all tokens: one all-to-all of queries,
    keys and values together, and one of the results back. The message size decreases with the number of ranks, while gathered
    keys and values have the length of the whole sequence; but the number of ranks must divide the key-value heads.
    """

    def positions(self, length: int) -> Tensor:
        return torch.arange(length).chunk(self.size)[self.group.rank]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, grouped: bool, prefix: Prefix | None = None,
        scores: Scores | None = None,
    ) -> Tensor:  # fmt: skip
        if self.size == 1:
            return attend_local(query, key, value, window, grouped, prefix, scores=scores)
        heads, widths = ([x.shape[dim] for x in (query, key, value)] for dim in (1, 3))
        heads = [count // self.size for count in heads]
        # Each rank's heads of all three in one message: concatenated, or beside each other if values are narrower.
        dim = 2 if widths[0] == widths[2] else 4
        by_rank = torch.cat([_by_rank(x, self.size) for x in (query, key, value)], dim=dim)
        whole = with_adjoint(by_rank, self.group, _tokens_for_heads, _heads_for_tokens)
        query, key, value = torch.split(whole, heads if dim == 2 else widths, dim=dim - 1)
        own_scores = None if scores is None else scores.of_heads(self.group.rank * heads[0], heads[0])
        mixed = attend_local(query, key, value, window, grouped, prefix, self.group.rank * heads[1], own_scores)
        return with_adjoint(mixed, self.group, _all_heads_for_tokens, _tokens_for_heads)


METHODS = {"gather": ContextParallel, "ulysses": Ulysses}
"""Value of `context_parallel_method` -> its implementation."""


def attend_local(
    query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, grouped: bool, prefix: Prefix | None = None,
    first_head: int = 0, scores: Scores | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within whole sequences on this rank, and to a whole prefix, for the heads from `first_head` on."""
    if prefix is not None:
        key, value = prefix(key, value, first_head)
        return _attend_from(0, query, key, value, window, grouped, prefix.length, scores)
    if scores is not None:
        return attend_with_scores(query, key, value, scores, window)
    if window.hides(key.shape[2]):
        return attend_to_window(query, key, value, window, 0, grouped)
    return scaled_attention(query, key, value, is_causal=True)


def _attend_from(
    start: int, query: Tensor, key: Tensor, value: Tensor, window: AttentionWindow, grouped: bool, virtual: int = 0,
    scores: Scores | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of consecutive tokens from `start` on to the keys and values of whole sequences, which are preceded by
    `virtual` ones that every token attends to."""
    if scores is not None:
        return attend_with_scores(query, key, value, scores, window, start, virtual)
    hides = window.hides(key.shape[2] - virtual)
    if hides and not virtual:
        return attend_to_window(query, key, value, window, start, grouped)
    end = virtual + start + query.shape[2]
    key, value = key[:, :, :end], value[:, :, :end]
    if not hides:
        if end == query.shape[2]:
            return scaled_attention(query, key, value, is_causal=True)
        if has_no_bias(query):
            return attend_to_earlier(query, key, value)
        if needs_flash(query):
            return attend_by_flash(query, key, value)
    mask = _window_mask(virtual, start, query, window) if hides else _causal_mask(query, end)
    return scaled_attention(query, key, value, mask)


def _window_mask(virtual: int, start: int, query: Tensor, window: AttentionWindow) -> Tensor:
    """Mask [queries, virtual and real tokens up to the last query]; True: attend, to all virtual tokens and to those in the
    window."""
    positions = torch.arange(start + query.shape[2], device=query.device)
    return functional.pad(sees(window)(positions[start:, None], positions[None]), (virtual, 0), value=True)


def _causal_mask(query: Tensor, end: int) -> Tensor:
    """The causal mask of the last tokens before `end`; on CUDA in the form that the fused kernels support, which compiled
    blocks cannot create."""
    tokens = query.shape[2]
    if query.is_cuda and not torch.compiler.is_compiling():
        # Imported here, because it loads torch.compile, which takes a second: too long for short-lived ranks on CPUs.
        from torch.nn.attention.bias import causal_lower_right

        with _disable_current_modes():  # torch cannot create a bias under a dispatch mode, such as a counter of FLOPs
            return causal_lower_right(tokens, end)
    return torch.ones(tokens, end, dtype=torch.bool, device=query.device).tril(end - tokens)


@collective()
def _gather_chunks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's head and tail chunks, gathered and put in the order of the sequence."""
    rows = torch.empty(group.size, x.numel(), dtype=x.dtype, device=x.device)
    group.all_gather(rows, x.contiguous().view(-1)).wait()
    heads, tails = rows.view(group.size, *x.shape).chunk(CHUNKS_PER_RANK, dim=4)
    ordered = torch.cat((heads, tails.flip(0)))
    return ordered.movedim(0, 3).flatten(3, 4)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[batch, all heads, tokens, width] to [batch, ranks, heads, tokens, width]."""
    return x.reshape(x.shape[0], ranks, -1, *x.shape[-2:])


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all of [ranks, …]: send each rank its part, return the parts for this rank."""
    result = torch.empty_like(parts, memory_format=torch.contiguous_format)
    split_sizes = [1] * group.size
    group.all_to_all(result, parts.contiguous(), split_sizes, split_sizes).wait()
    return result


def _exchange_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = x.reshape(*x.shape[:2], group.size, -1, x.shape[3]).movedim(2, 0)
    return _all_to_all(parts, group).movedim(0, 1)


@collective()
def _tokens_for_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """[batch, ranks, heads, own tokens, width], or all heads together, to this rank's [batch, heads, tokens, width]."""
    return _all_to_all(_by_rank(x, group.size).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


@collective()
def _heads_for_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """[batch, heads, tokens, width] of this rank's heads to [batch, ranks, heads, own tokens, width]."""
    return _exchange_heads(x, group)


@collective()
def _all_heads_for_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """[batch, heads, tokens, width] of this rank's heads to [batch, all heads, own tokens, width]."""
    return _exchange_heads(x, group).flatten(1, 2)


@collective()
def _scatter_chunks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The adjoint of `_gather_chunks`: the sum over the ranks of this rank's chunks."""
    chunks = x.reshape(*x.shape[:3], CHUNKS_PER_RANK * group.size, -1, x.shape[4]).movedim(3, 0)
    rows = torch.cat((chunks[: group.size], chunks[group.size :].flip(0)), dim=4).contiguous()
    total = torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)
    group.reduce_scatter(total.view(-1), rows.view(group.size, -1)).wait()
    return total
