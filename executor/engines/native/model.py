"""A decoder-only transformer of any shape that a ModelSpec can state, called with tokens and labels, returning the loss."""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from search_spaces.model import ModelSpec, Norm, Position

INITIAL_DEVIATION = 0.02


def make_norm(spec: ModelSpec) -> nn.Module:
    kind = nn.RMSNorm if spec.norm is Norm.RMSNORM else nn.LayerNorm
    return kind(spec.hidden_size, eps=spec.norm_epsilon)


def activate(x: Tensor, kind: str) -> Tensor:
    match kind:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case _:
            return functional.relu(x)


def rotary_table(spec: ModelSpec, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [length, rotated dimensions], fp32. [Su et al. 2021, RoFormer, eq. 34]"""
    rotated = int(spec.head_dim * spec.rotary_fraction) // 2 * 2
    frequencies = spec.rope_theta ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first dimensions of x [batch, heads, tokens, head_dim], halves paired as in Llama and GPT-NeoX."""
    rotated = cosines.shape[-1]
    turned, kept = x[..., :rotated], x[..., rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


class Attention(nn.Module):
    """Causal attention with grouped queries: [batch, tokens, hidden] to the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.query = nn.Linear(spec.hidden_size, queries, bias=spec.qkv_bias)
        self.key = nn.Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.value = nn.Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.output = nn.Linear(queries, spec.hidden_size, bias=spec.attention_output_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        heads = (self._split(project(x)) for project in (self.query, self.key, self.value))
        query, key, value = heads
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        grouped = self.spec.num_key_value_heads != self.spec.num_attention_heads
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The MLP, gated or not: [..., hidden] to the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kind = spec.activation
        self.gate = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.mlp_bias) if spec.gated_mlp else None
        self.up = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.ffn_hidden_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = activate(hidden, self.kind) if self.gate is None else activate(self.gate(x), self.kind) * hidden
        result: Tensor = self.down(hidden)
        return result


class Experts(nn.Module):
    """Each token goes to its best experts, weighted by the softmax over those [Jiang et al. 2024, Mixtral, 2.1].

    Every rank holds every expert; which experts a rank's tokens meet differs by rank and micro-batch.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.chosen = spec.experts_per_token
        self.router = nn.Linear(spec.hidden_size, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(spec) for _ in range(spec.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(self.chosen, dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if rows.numel():
                mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return mixed.view_as(x)


class Block(nn.Module):
    """One layer: [batch, tokens, hidden] to the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.pre_norm, self.parallel_residual = spec.pre_norm, spec.parallel_residual
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = make_norm(spec)
        self.mlp: nn.Module = Experts(spec) if spec.num_experts else FeedForward(spec)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        if not self.pre_norm:
            x = self.attention_norm(x + self.attention(x, rotary, mask))
            post: Tensor = self.mlp_norm(x + self.mlp(x))
            return post
        attended = x + self.attention(self.attention_norm(x), rotary, mask)
        result: Tensor = attended + self.mlp(self.mlp_norm(x if self.parallel_residual else attended))
        return result


class Embedding(nn.Module):
    """Token ids [batch, tokens] to [batch, tokens, hidden], with learned positions where the model has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.offset = spec.position_offset
        self.tokens = nn.Embedding(spec.vocab_size, spec.embedding_size or spec.hidden_size)
        self.project = nn.Linear(spec.embedding_size, spec.hidden_size, bias=False) if spec.embedding_size else None
        learned = spec.position is Position.LEARNED
        rows = spec.sequence_length + spec.position_offset
        self.positions = nn.Embedding(rows, spec.hidden_size) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device) + self.offset)
        return x


class Head(nn.Module):
    """Final norm, output projection and mean cross-entropy in at least fp32.

    With `chunk` > 0 the logits exist for that many tokens at a time, in forward and (recomputed) in backward.
    """

    def __init__(self, spec: ModelSpec, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.norm = make_norm(spec) if spec.pre_norm else None
        width = spec.embedding_size or spec.hidden_size
        self.project = nn.Linear(spec.hidden_size, width, bias=False) if spec.embedding_size else None
        self.output = nn.Linear(width, spec.vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.project is not None:
            x = self.project(x)
        rows, targets = x.flatten(0, 1), labels.flatten()
        if not self.chunk or self.chunk >= rows.shape[0]:
            return self._summed_loss(rows, targets) / targets.numel()
        parts = zip(torch.split(rows, self.chunk), torch.split(targets, self.chunk), strict=True)
        sums = [checkpoint(self._summed_loss, part, target, use_reentrant=False) for part, target in parts]
        return torch.stack(sums).sum() / targets.numel()

    def _summed_loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(rows)
        precise = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(logits.to(precise), targets, reduction="sum")


class Transformer(nn.Module):
    """The whole model: `tokens` and `labels` [batch, tokens] to the mean loss."""

    rotary_cosines: Tensor
    rotary_sines: Tensor
    mask: Tensor | None

    def __init__(self, spec: ModelSpec, sequence_length: int, loss_chunk_size: int = 0) -> None:
        super().__init__()
        self.embedding = Embedding(spec)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.head = Head(spec, loss_chunk_size)
        if spec.tied_embeddings:
            self.head.output.weight = self.embedding.tokens.weight
        self.rotary = spec.position is Position.ROTARY
        if self.rotary:
            cosines, sines = rotary_table(spec, sequence_length)
            self.register_buffer("rotary_cosines", cosines, persistent=False)
            self.register_buffer("rotary_sines", sines, persistent=False)
        self.register_buffer("mask", _window_mask(spec.sliding_window, sequence_length), persistent=False)

    def sharding_units(self) -> list[nn.Module]:
        """The parts that every rank calls in the same order: what stage 3 gathers together."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = (self.rotary_cosines.to(x.dtype), self.rotary_sines.to(x.dtype)) if self.rotary else None
        for block in self.blocks:
            x = block(x, rotary, self.mask)
        loss: Tensor = self.head(x, labels)
        return loss


def _window_mask(window: int, length: int) -> Tensor | None:
    """True where attention may look: the `window` last tokens. None where causality alone decides."""
    if not window or window >= length:
        return None
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (distance >= 0) & (distance < window)


def build_transformer(
    spec: ModelSpec, sequence_length: int, seed: int, dtype: torch.dtype, loss_chunk_size: int = 0
) -> Transformer:
    """Build the model on the CPU with weights that depend on the seed and each parameter's name alone.

    So every layout of the same model starts from the same weights, and a rank can make any one parameter by itself.
    """
    with torch.device("meta"):
        shape = Transformer(spec, sequence_length, loss_chunk_size)
    model = shape.to(dtype).to_empty(device="cpu")
    # Tables were computed on the meta device: make them again, in fp32 whatever the parameters' type.
    if model.rotary:
        model.rotary_cosines, model.rotary_sines = rotary_table(spec, sequence_length)
    model.mask = _window_mask(spec.sliding_window, sequence_length)
    if spec.tied_embeddings:
        model.head.output.weight = model.embedding.tokens.weight
    for name, parameter in model.named_parameters():
        initialize(name, parameter, seed)
    return model


@torch.no_grad()
def initialize(name: str, parameter: Tensor, seed: int) -> None:
    """Norm weights 1, biases 0, matrices normal with deviation 0.02, drawn in fp32 from the seed and the name."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, INITIAL_DEVIATION, generator=generator)
        parameter.copy_(drawn)
