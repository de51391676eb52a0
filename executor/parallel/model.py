"""A decoder-only transformer of any shape that a ModelSpec can state, or the part of it that one rank holds."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.parallel.bottleneck import WIDENING, Bottleneck, behind
from executor.parallel.chunked_loss import chunked_loss
from executor.parallel.collectives import Group
from executor.parallel.context import ContextParallel
from executor.parallel.data_schedule import through_kept
from executor.parallel.experts import Experts
from executor.parallel.grouped import Multiply
from executor.parallel.initialization import Drawn, FirstValues, Kind, draw, materialise
from executor.parallel.low_rank import OUTWARD, LowRank
from executor.parallel.operators import Operators
from executor.parallel.packed import Documents, attend_in_documents, documents_in
from executor.parallel.quantised import QuantisedMatrix, QuantisedValues
from executor.parallel.tensor import (
    ColumnLinear,
    RowLinear,
    TensorParallel,
    VocabularyEmbedding,
    enter_through,
    vocabulary_cross_entropy,
)
from executor.parallel.virtual_tokens import Prefix, Prompt
from search_spaces.models.model import ModelSpec, Position
from search_spaces.training.windows import window_of

Rotary = tuple[Tensor, Tensor] | None
"""Cosines and sines of tokens; None: positions are learned."""
WHOLE_BITS = 16
"""Of a frozen weight that is kept in the type that is computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds of the model: which layers, which slice of the matrices and which tokens of a sequence."""

    layers: Sequence[int]
    first: bool
    """Whether the embedding comes before these layers."""
    last: bool
    """Whether the head comes after them."""
    tensor: TensorParallel
    context: ContextParallel
    expert: Group = field(default_factory=lambda: Group(None, 1, 0))
    """The ranks that divide the experts."""
    operators: Operators = field(default_factory=Operators)
    """What computes norms, rotations, gates and the loss."""
    losses_wait: bool = False
    """Whether other micro-batches' losses may come between a loss and its backward."""


def whole(spec: ModelSpec) -> Part:
    """All of the model on one rank."""
    alone = Group(None, 1, 0)
    tensor, context = TensorParallel(alone, sequence_parallel=False), ContextParallel(alone)
    return Part(layers=range(spec.num_layers), first=True, last=True, tensor=tensor, context=context)


def rotary_table(spec: ModelSpec, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [length, rotated dimensions], fp32. [Su et al. 2021, RoFormer, eq. 34]"""
    rotated = int(spec.head_dim * spec.rotary_fraction) // 2 * 2
    frequencies = spec.rope_theta ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()


class Attention(nn.Module):
    """Causal attention with grouped queries: [batch, tokens, hidden] to the same. Tensor ranks divide the heads."""

    def __init__(self, spec: ModelSpec, part: Part) -> None:
        super().__init__()
        self.spec, self.tensor, self.context, self.window = spec, part.tensor, part.context, window_of(spec)
        self.operators = part.operators
        queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.query = ColumnLinear(spec.hidden_size, queries, part.tensor, bias=spec.qkv_bias)
        self.key = ColumnLinear(spec.hidden_size, keys, part.tensor, bias=spec.qkv_bias)
        self.value = ColumnLinear(spec.hidden_size, keys, part.tensor, bias=spec.qkv_bias)
        heads = spec.num_key_value_heads // part.tensor.size
        self.prefix = Prefix(heads, spec.prefix_length, spec.head_dim) if spec.prefix_length else None
        self.output = RowLinear(queries, spec.hidden_size, part.tensor, bias=spec.attention_output_bias)

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        heads = enter_through(x, self.tensor, (self.query, self.key, self.value))
        query, key, value = (self._split(projected) for projected in heads)
        if rotary is not None:
            query, key = self.operators.rotate(query, key, *rotary)
        grouped = self.spec.num_key_value_heads != self.spec.num_attention_heads
        if documents is None:
            mixed = self.context.attend(query, key, value, self.window, grouped, self.prefix)
        else:
            mixed = attend_in_documents(query, key, value, documents, grouped)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The MLP, gated or not: [..., hidden] to the same. Tensor ranks divide its width.

    An expert leaves the exchange between tensor ranks to the layer of experts around it.
    """

    def __init__(self, spec: ModelSpec, part: Part, expert: bool = False) -> None:
        super().__init__()
        self.kind, self.tensor, self.expert, self.operators = spec.activation, part.tensor, expert, part.operators
        hidden, width, bias = spec.hidden_size, spec.ffn_hidden_size, spec.mlp_bias
        self.gate = ColumnLinear(hidden, width, part.tensor, bias=bias) if spec.gated_mlp else None
        self.up = ColumnLinear(hidden, width, part.tensor, bias=bias)
        self.down = RowLinear(width, hidden, part.tensor, bias=bias, leaves=not expert)

    def forward(self, x: Tensor, multiply: Multiply | None = None) -> Tensor:
        """`multiply`: multiplies by the matrices of many experts of this name in the place of this one's."""
        matrices = {"up": self.up} if self.gate is None else {"up": self.up, "gate": self.gate}
        if multiply is not None:
            hidden, *gate = [multiply(name, x) for name in matrices]
        elif self.expert:
            hidden, *gate = [matrix(x) for matrix in matrices.values()]
        else:
            hidden, *gate = enter_through(x, self.tensor, tuple(matrices.values()))
        hidden = self.operators.gate(gate[0], hidden, self.kind) if gate else self.operators.activate(hidden, self.kind)
        result: Tensor = self.down(hidden) if multiply is None else multiply("down", hidden)
        return result


def _experts(spec: ModelSpec, part: Part) -> Experts:
    return Experts(spec, part.tensor, part.expert, lambda: FeedForward(spec, part, expert=True))


def _bottleneck(spec: ModelSpec) -> Bottleneck | None:
    return Bottleneck(spec.hidden_size, spec.adapter_size) if spec.adapter_size else None


class Block(nn.Module):
    """One layer: [batch, tokens, hidden] to the same."""

    def __init__(self, spec: ModelSpec, part: Part) -> None:
        super().__init__()
        self.pre_norm, self.parallel_residual = spec.pre_norm, spec.parallel_residual
        self.attention_norm = part.operators.make_norm(spec)
        self.attention = Attention(spec, part)
        self.attention_adapter = _bottleneck(spec)
        self.mlp_norm = part.operators.make_norm(spec)
        self.mlp: nn.Module = _experts(spec, part) if spec.num_experts else FeedForward(spec, part)
        self.mlp_adapter = _bottleneck(spec)

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        if not self.pre_norm:
            x = self.attention_norm(x + behind(self.attention_adapter, self.attention(x, rotary, documents)))
            post: Tensor = self.mlp_norm(x + behind(self.mlp_adapter, self.mlp(x)))
            return post
        attended = x + behind(self.attention_adapter, self.attention(self.attention_norm(x), rotary, documents))
        result: Tensor = attended + behind(self.mlp_adapter, self.mlp(self.mlp_norm(x if self.parallel_residual else attended)))
        return result


class Embedding(nn.Module):
    """Token ids [batch, tokens] to [batch, tokens, hidden], with learned positions where the model has them.

    Tensor ranks divide the table's rows, and with sequence parallelism each leaves with its share of the tokens.
    """

    def __init__(self, spec: ModelSpec, part: Part) -> None:
        super().__init__()
        self.offset, self.tensor = spec.position_offset, part.tensor
        self.prompt = Prompt(spec.prompt_length, spec.table_width) if spec.prompt_length else None
        self.tokens = VocabularyEmbedding(spec.vocab_size, spec.table_width, part.tensor)
        self.project = nn.Linear(spec.embedding_size, spec.hidden_size, bias=False) if spec.embedding_size else None
        learned = spec.position is Position.LEARNED
        rows = spec.sequence_length + spec.position_offset
        self.positions = nn.Embedding(rows, spec.hidden_size) if learned else None

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """`places` [tokens] or [batch, tokens]: where in the sequence, or in their documents, the tokens stand."""
        x: Tensor = self.tokens(tokens, self.prompt)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + self._positions(self.positions, places + self.offset)
        return x

    def _positions(self, table: nn.Embedding, rows: Tensor) -> Tensor:
        """What the rank's tokens get of the learned positions; virtual ones get nothing."""
        if self.prompt is None:
            learned: Tensor = table(self.tensor.own_tokens(rows.movedim(-1, 0)).movedim(0, -1))
            return learned
        return self.tensor.own_tokens(functional.pad(table(rows), (0, 0, self.prompt.length, 0)))


class OutputProjection(ColumnLinear):
    """A slice of the vocabulary: weight [vocabulary / ranks, width]."""

    def forward(self, x: Tensor, use: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The logits of `x`, or what `use` makes of the weight: as part of this module's call, so that hooks on it hold."""
        return super().forward(x) if use is None else use(self.weight)


class Head(nn.Module):
    """Final norm, output projection and mean cross-entropy in at least fp32. Tensor ranks divide the vocabulary.

    With `chunk` > 0 the logits exist for that many tokens at a time, and forward makes gradients of them (`chunked_loss`). They
    are made again in backward instead where many micro-batches' losses wait for theirs, each of which would hold a gradient of
    the weight, and in fp16, which cannot hold gradients before they are scaled. Where samples hold padding (`targets`), a loss
    is no mean over the targets that are here, but weighs them as those of the whole step.
    """

    def __init__(self, spec: ModelSpec, part: Part, chunk: int) -> None:
        super().__init__()
        self.chunk, self.tensor, self.virtual = chunk, part.tensor, spec.prompt_length
        self.losses_wait = part.losses_wait
        self.targets = 0.0
        """Of a micro-batch, on the mean of the step's; 0: as many as labels, none of which is of padding."""
        self.linear_loss = part.operators.linear_loss
        self.norm = part.operators.make_norm(spec) if spec.pre_norm else None
        width = spec.embedding_size or spec.hidden_size
        self.project = nn.Linear(spec.hidden_size, width, bias=False) if spec.embedding_size else None
        self.output = OutputProjection(width, spec.vocab_size, part.tensor, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.project is not None:
            x = self.project(x)
        x = self.tensor.enter(x)[:, self.virtual :]
        rows, targets = x.flatten(0, 1), labels.flatten()
        if self.linear_loss is not None:
            return self.linear_loss(rows, self.output.weight, targets) / (self.targets or targets.numel())
        # In one chunk, too: the gradient takes the logits' place, so that fewer tokens never take more memory.
        if self.chunk and torch.is_grad_enabled() and not self.losses_wait and rows.dtype != torch.float16:
            scale, padded = 1 / (self.targets or targets.numel()), self.targets > 0
            use = functools.partial(
                chunked_loss, rows, targets=targets, chunk=self.chunk, tensor=self.tensor, scale=scale, padded=padded
            )
            loss: Tensor = self.output(rows, use)
            return loss
        if not self.chunk or self.chunk >= rows.shape[0]:
            return self._summed_loss(rows, targets) / (self.targets or targets.numel())
        parts = zip(torch.split(rows, self.chunk), torch.split(targets, self.chunk), strict=True)
        again = functools.partial(checkpoint, self._summed_loss, use_reentrant=False, preserve_rng_state=False)
        sums = [again(part, target) for part, target in parts]
        return torch.stack(sums).sum() / (self.targets or targets.numel())

    def _summed_loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(rows)
        precise = torch.promote_types(logits.dtype, torch.float32)
        return vocabulary_cross_entropy(logits.to(precise), targets, self.tensor, padded=self.targets > 0)


class Transformer(nn.Module):
    """The model, or one rank's part of it.

    The first part takes `tokens` [batch, tokens], a later one in their place the hidden states [batch, tokens, hidden] of the
    part before, in which virtual tokens of a prompt come first; the last returns the mean loss against `labels` [batch,
    tokens], an earlier one its hidden states. Of packed rows every part takes `places` [batch, tokens] too: where in their
    documents tokens stand, each of which begins at 0. With context parallelism the tokens are those of the rank's positions,
    with sequence parallelism hidden states a share of them.
    """

    rotary_cosines: Tensor
    rotary_sines: Tensor
    places: Tensor

    def __init__(self, spec: ModelSpec, sequence_length: int, loss_chunk_size: int = 0, part: Part | None = None) -> None:
        super().__init__()
        self.spec, self.sequence_length = spec, sequence_length
        self.part = part = part or whole(spec)
        self.embedding = Embedding(spec, part) if part.first else None
        # Named by the layer's number in the whole model: weights are drawn by their names.
        self.blocks = nn.ModuleDict({str(layer): Block(spec, part) for layer in part.layers})
        self.head = Head(spec, part, loss_chunk_size) if part.last else None
        self.adapt()
        self.tie()
        self.rotary = spec.position is Position.ROTARY
        self.kept: dict[str, Tensor] = {}
        """Layer -> the tokens that it sees in this step (random-LTD); layers that see all are not in it."""
        self.make_tables()

    def tie(self) -> None:
        """Make the output projection the embedding table, where the model has it so and both are here."""
        if self.spec.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def adapt(self) -> None:
        """Where adapters or virtual tokens are trained: freeze all else, and put low-rank adapters beside their matrices."""
        if not self.spec.adapts:
            return
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Bottleneck | Prefix | Prompt):
                module.requires_grad_(True)
        for name, matrix in self.matrices() if self.spec.lora_rank else ():
            if name.rpartition(".")[2] in self.spec.lora_targets:
                matrix.adapt(self.spec.lora_rank)

    def quantise(self) -> None:
        """Where the model has frozen weights of fewer bits: make the matrices of its layers so. Tables and norms stay."""
        if self.spec.adapts and self.spec.frozen_bits < WHOLE_BITS:
            for _, matrix in self.matrices():
                matrix.quantise(self.spec.frozen_bits)

    def multiply_in_float8(self) -> None:
        """Have the matrices of its layers multiplied in 8 bits from now on. Tables, routers and the output projection stay."""
        for _, matrix in self.matrices():
            matrix.float8 = True

    def matrices(self) -> list[tuple[str, ColumnLinear | RowLinear]]:
        """Every matrix of the layers but routers, by name."""
        named = self.blocks.named_modules()
        return [(name, module) for name, module in named if isinstance(module, ColumnLinear | RowLinear)]

    def make_tables(self) -> None:
        """Rotations of the rank's tokens, virtual ones included, in fp32 whatever the parameters' type."""
        self.register_buffer("places", self.part.context.positions(self.sequence_length), persistent=False)
        length = self.sequence_length + self.spec.prompt_length
        places = self.part.context.positions(length)
        if self.rotary:
            cosines, sines = rotary_table(self.spec, length)
            self.register_buffer("rotary_cosines", cosines[places], persistent=False)
            self.register_buffer("rotary_sines", sines[places], persistent=False)

    def set_length(self, length: int) -> None:
        """Train on samples of so many tokens from now on (curriculum)."""
        device, self.sequence_length = self.places.device, length
        self.make_tables()
        for name, table in self.named_buffers(recurse=False):
            setattr(self, name, table.to(device))

    def layers(self) -> list[nn.Module]:
        """The blocks in order."""
        return list(self.blocks.values())

    def sharding_units(self) -> list[nn.Module]:
        """The parts that every rank calls in the same order: what stage 3 gathers together."""
        return [unit for unit in (self.embedding, *self.layers(), self.head) if unit is not None]

    def split_dimensions(self) -> dict[str, int]:
        """Parameter -> the dimension of which tensor-parallel ranks hold slices; one that is not here is whole on each."""
        found = {}
        for name, module in self.named_modules():
            if isinstance(module, ColumnLinear | RowLinear | VocabularyEmbedding | LowRank | Prefix):
                own = (key for key, value in module.named_parameters(recurse=False) if value is not None)
                found.update({f"{name}.{key}": module.split[key] for key in own if key in module.split})
        return found

    def summand_parameters(self) -> set[str]:
        """Parameters that are whole on each tensor-parallel rank, but get only a summand of their gradient there.

        That is every whole parameter where ranks divide the sequence, and where they divide the experts' widths the router and
        the experts' last biases; and what is whole of an adapter (`LowRank`).
        """
        if self.part.tensor.size == 1:
            return set()
        whole_ones = {name for name, _ in self.named_parameters()} - set(self.split_dimensions())
        if self.part.tensor.sequence_parallel:
            return whole_ones
        return {name for name in whole_ones if any(part in name for part in (".router.", ".experts.", ".adapter."))}

    def expert_parameters(self) -> set[str]:
        """Parameters of experts, where other ranks hold other ones."""
        if self.part.expert.size == 1:
            return set()
        return {name for name, _ in self.named_parameters() if ".experts." in name}

    def forward(self, tokens: Tensor, labels: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens, self.places if places is None else places)
        rotary = self._rotations(x.dtype, places) if self.rotary else None
        documents = None if places is None else documents_in(places, x.dtype, self.spec.head_dim)
        for name, block in self.blocks.items():
            kept = self.kept.get(name)
            x = block(x, rotary, documents) if kept is None else through_kept(block, x, rotary, kept)
        if self.head is None:
            return x
        loss: Tensor = self.head(x, labels)
        return loss

    def _rotations(self, dtype: torch.dtype, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens, or of those that stand at `places` [batch, tokens]."""
        tables = self.rotary_cosines.to(dtype), self.rotary_sines.to(dtype)
        return tables if places is None else (tables[0][places][:, None], tables[1][places][:, None])


def transformer_without_memory(
    spec: ModelSpec,
    sequence_length: int,
    seed: int,
    dtype: torch.dtype,
    loss_chunk_size: int = 0,
    part: Part | None = None,
) -> tuple[Transformer, dict[str, FirstValues]]:
    """The model, or one rank's part, with parameters on the meta device, and their first values by name; tables on the CPU.

    Values depend on the seed, each parameter's name in the whole model and an element's position in the whole parameter. So
    every layout of the same model starts from the same weights, and a rank makes those alone that it keeps.
    """
    with torch.device("meta"):
        model = Transformer(spec, sequence_length, loss_chunk_size, part).to(dtype)
    splits, tensor = model.split_dimensions(), model.part.tensor
    values: dict[str, FirstValues] = {}
    for name, parameter in model.named_parameters():
        values[name] = _first_values(_whole_name(name, spec), parameter, seed, splits.get(name), tensor)
    with torch.device("meta"):
        model.quantise()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedMatrix):
            matrix = values.pop(f"{name.removesuffix('.quantised')}.weight")
            assert isinstance(matrix, Drawn)
            values[f"{name}.packed"] = QuantisedValues(matrix, module)
            module.make_tables(dtype)
    model.make_tables()
    return model, values


def build_transformer(
    spec: ModelSpec,
    sequence_length: int,
    seed: int,
    dtype: torch.dtype,
    loss_chunk_size: int = 0,
    part: Part | None = None,
) -> Transformer:
    """The model, or one rank's part, whole on the CPU with its first values (`transformer_without_memory`)."""
    model, values = transformer_without_memory(spec, sequence_length, seed, dtype, loss_chunk_size, part)
    materialise(model, values, torch.device("cpu"))
    return model


def _whole_name(name: str, spec: ModelSpec) -> str:
    """The name that the whole model has for a parameter: a tied table goes by the embedding's, also on another rank."""
    return "embedding.tokens.weight" if spec.tied_embeddings and name == "head.output.weight" else name


def _first_values(name: str, parameter: Tensor, seed: int, split: int | None, tensor: TensorParallel) -> Drawn:
    """Norm weights 1, biases and adapters' second matrices 0, matrices normal.

    `parameter` is this rank's slice, along dimension `split`, of what has the name.
    """
    shape = [size * tensor.size if dimension == split else size for dimension, size in enumerate(parameter.shape)]
    own = 0 if split is None else parameter.shape[split]
    drawn = draw(name, shape, seed, parameter.dtype, split, tensor.rank * own, own)
    if name.endswith(("bias", OUTWARD, WIDENING)):
        return replace(drawn, kind=Kind.ZEROS)
    return replace(drawn, kind=Kind.ONES) if parameter.dim() == 1 else drawn
