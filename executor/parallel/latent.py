"""Latent attention: keys and values of all heads are projected from one narrow vector of each token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from executor.parallel.attention import Documents, attend_in_documents
from executor.parallel.context import ContextParallel
from executor.parallel.operators import Operators, Rotary
from executor.parallel.tensor import ColumnLinear, RowLinear, TensorParallel, WholeLinear
from search_spaces.knobs.computation import ATTENTION, UP_PROJECTIONS
from search_spaces.models.model import Latent, ModelSpec
from search_spaces.training.windows import AttentionWindow


class LatentAttention(nn.Module):
    """Causal attention [DeepSeek-AI 2024, DeepSeek-V2, 2.1]: [batch, tokens, hidden] to the same shape.

    Tensor ranks divide the heads. Every rank computes the narrow vectors, of its share of the tokens with sequence parallelism:
    what ranks then exchange is as wide as these vectors, not as the hidden state.
    """

    recomputable: ClassVar[Mapping[str, str]] = {"projected": UP_PROJECTIONS, "mixed": ATTENTION}
    """Attribute -> the module as `recompute_modules` names it."""

    def __init__(
        self, spec: ModelSpec, latent: Latent, tensor: TensorParallel, context: ContextParallel, operators: Operators,
        window: AttentionWindow,
    ) -> None:  # fmt: skip
        super().__init__()
        self.latent, self.tensor, self.context, self.operators, self.window = latent, tensor, context, operators, window
        hidden, heads, self.plain = spec.hidden_size, spec.num_attention_heads, spec.head_dim - latent.rotated
        # Of the norms of the narrow vectors, whatever that of the other norms is [DeepSeek-AI 2024, their code].
        norms = replace(spec, norm_epsilon=1e-6)
        rank, down = latent.query_rank, latent.key_value_rank + latent.rotated
        self.query_down = WholeLinear(hidden, rank, bias=spec.qkv_bias) if rank else None
        self.query_latent_norm = operators.make_norm(norms, rank) if rank else None
        self.query = ColumnLinear(rank or hidden, heads * spec.head_dim, tensor, bias=False)
        self.key_value_down = WholeLinear(hidden, down, bias=spec.qkv_bias)
        self.key_value_latent_norm = operators.make_norm(norms, latent.key_value_rank)
        self.key_value = ColumnLinear(latent.key_value_rank, heads * (self.plain + latent.value_size), tensor, bias=False)
        self.output = RowLinear(heads * latent.value_size, hidden, tensor, bias=spec.attention_output_bias)
        self.head_dim = spec.head_dim
        # torch's kernels multiply scores by 1 / sqrt(head_dim).
        self.query_factor = spec.attention_scale * spec.head_dim**0.5 or 1.0

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        query, key, value = self.projected(*self._narrow(x), rotary)
        result: Tensor = self.output(self.mixed(query, key, value, documents).transpose(1, 2).flatten(2))
        return result

    def projected(self, source: Tensor, narrow: Tensor, shared: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, tokens, width], from the narrow vectors."""
        query = self._split(self.query(source), self.head_dim)
        sizes = [self.plain, self.latent.value_size]
        key, value = torch.split(self._split(self.key_value(narrow), sum(sizes)), sizes, dim=-1)
        shared = shared[:, None]  # one head
        if rotary is not None:
            plain, rotated = torch.split(query, [self.plain, self.latent.rotated], dim=-1)
            rotated, shared = self.operators.rotate(rotated, shared, *rotary)
            query = torch.cat((plain, rotated), dim=-1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return query * self.query_factor if self.query_factor != 1 else query, key, value

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        """The values of the tokens that each query attends to, [batch, heads, tokens, width]."""
        if documents is None:
            return self.context.attend(query, key, value, self.window, grouped=False)
        return attend_in_documents(query, key, value, documents, grouped=False)

    def _narrow(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries are projected from, what keys and values are, and the rotated part of all keys, of all tokens."""
        narrow, shared = torch.split(self.key_value_down(x), [self.latent.key_value_rank, self.latent.rotated], dim=-1)
        parts = [self.key_value_latent_norm(narrow), shared]
        if self.query_down is not None and self.query_latent_norm is not None:
            parts.append(self.query_latent_norm(self.query_down(x)))
        if self.tensor.size > 1:
            # In one collective.
            widths = [part.shape[-1] for part in parts]
            parts = list(torch.split(self.tensor.enter(torch.cat(parts, dim=-1)), widths, dim=-1))
        narrow, shared, *source = parts
        return source[0] if source else self.tensor.enter(x), narrow, shared

    def _split(self, x: Tensor, width: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, width).transpose(1, 2)
