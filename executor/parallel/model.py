"""A decoder-only transformer of any shape that a ModelSpec describes, or one rank's part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.batches import labels_ahead, through_kept
from executor.parallel.adapters import OUTWARD, Bottleneck, LowRank, Prefix, Prompt, apply_adapter
from executor.parallel.attention import Documents, Scores, Sinks, attend_in_documents, documents_in
from executor.parallel.collectives import ProcessGroup
from executor.parallel.context import ContextParallel
from executor.parallel.expert_rows import Multiply
from executor.parallel.experts import Experts
from executor.parallel.head import Head, PredictionModule
from executor.parallel.initialization import Distribution, Drawn, FirstValues, draw, materialise
from executor.parallel.latent import LatentAttention
from executor.parallel.operators import Operators, Rotary, query_factors, rotary_table
from executor.parallel.quantised import QuantisedMatrix, QuantisedValues
from executor.parallel.tensor import ColumnLinear, RowLinear, TensorParallel, VocabularyEmbedding, WholeLinear, enter_through
from search_spaces.knobs.computation import ACTIVATIONS, ATTENTION, EXPERT_ACTIVATIONS, NORMS
from search_spaces.models.model import HeadNorm, ModelSpec, NormPlace, Position
from search_spaces.training.expert_loads import drawn_choices
from search_spaces.training.windows import window_of

EXPERTS = ".experts."
"""Part of the names of the parameters of experts, and of no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """One rank's part of the model: its layers, its slice of the matrices and its tokens of a sequence."""

    layers: Sequence[int]
    first: bool
    """Whether the embedding comes before these layers."""
    last: bool
    """Whether the head comes after them."""
    tensor: TensorParallel
    context: ContextParallel
    expert: ProcessGroup = field(default_factory=lambda: ProcessGroup(None, 1, 0))
    """The ranks that divide the experts."""
    expert_tensor: TensorParallel | None = None
    """The ranks that divide each expert, if they are not all of `tensor`: they divide the sequence among them."""
    operators: Operators = field(default_factory=Operators)
    """Implementations of norms, rotations, gates and the loss."""
    overlaps_shared_experts: bool = False
    """Whether shared experts compute while tokens travel between the ranks that divide the experts."""
    losses_wait: bool = False
    """Whether losses of other micro-batches may be computed between a loss and its backward."""

    def dividing(self, name: str) -> TensorParallel:
        """The ranks that divide the parameter of this name in the whole model."""
        return self.expert_tensor if self.expert_tensor is not None and EXPERTS in name else self.tensor


def whole(spec: ModelSpec) -> RankModel:
    """The whole model on one rank."""
    single = ProcessGroup(None, 1, 0)
    tensor, context = TensorParallel(single, sequence_parallel=False), ContextParallel(single)
    return RankModel(layers=range(spec.num_layers), first=True, last=True, tensor=tensor, context=context)


class Attention(nn.Module):
    """Causal grouped-query attention: [batch, tokens, hidden] to the same shape. Tensor ranks divide the heads."""

    recomputable: ClassVar[Mapping[str, str]] = {"mixed": ATTENTION}
    """Attribute -> the module as `recompute_modules` names it, as in the classes below."""

    def __init__(self, spec: ModelSpec, part: RankModel, layer: int) -> None:
        super().__init__()
        self.spec, self.tensor, self.context, self.window = spec, part.tensor, part.context, window_of(spec, layer)
        self.operators = part.operators
        queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.query = ColumnLinear(spec.hidden_size, queries, part.tensor, bias=spec.qkv_bias)
        self.key = ColumnLinear(spec.hidden_size, keys, part.tensor, bias=spec.qkv_bias)
        self.value = ColumnLinear(spec.hidden_size, keys, part.tensor, bias=spec.qkv_bias)
        heads = spec.num_key_value_heads // part.tensor.size
        self.prefix = Prefix(heads, spec.prefix_length, spec.head_dim) if spec.prefix_length else None
        self.output = RowLinear(queries, spec.hidden_size, part.tensor, bias=spec.attention_output_bias)
        self.rotated = spec.is_rotated(layer)
        self.query_norm, self.key_norm = (_head_norm(spec, part, width) for width in (queries, keys))
        # torch's kernels multiply scores by 1 / sqrt(head_dim).
        self.query_factor = spec.attention_scale * spec.head_dim**0.5 or 1.0
        self.sinks = Sinks(spec.num_attention_heads // part.tensor.size) if spec.attention_sinks else None

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        query, key, value = enter_through(x, self.tensor, (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
        query, key, value = (self._split(projected) for projected in (query, key, value))
        if rotary is not None:
            query, key = self._placed(query, key, rotary)
        if self.query_factor != 1:
            query = query * self.query_factor
        result: Tensor = self.output(self.mixed(query, key, value, documents).transpose(1, 2).flatten(2))
        return result

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        """The values of the tokens that each query attends to, [batch, heads, tokens, head_dim]."""
        grouped = self.spec.num_key_value_heads != self.spec.num_attention_heads
        if documents is None:
            return self.context.attend(query, key, value, self.window, grouped, self.prefix, self._scores())
        return attend_in_documents(query, key, value, documents, grouped, self._scores())

    def _placed(self, query: Tensor, key: Tensor, rotary: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, heads, tokens, head_dim] after what depends on their positions."""
        if not self.rotated:
            (factors,) = rotary
            return (query * factors).to(query.dtype), key
        query, key = self.operators.rotate(query, key, *rotary)
        if self.spec.head_norm is not HeadNorm.ROTATED:
            return query, key
        width, epsilon = (self.spec.head_dim,), self.spec.norm_epsilon
        return functional.rms_norm(query, width, eps=epsilon), functional.rms_norm(key, width, eps=epsilon)

    def _scores(self) -> Scores | None:
        """What is done with the scores; None: nothing beyond the kernel."""
        if not self.spec.changes_scores:
            return None
        return Scores(self.spec.attention_softcap, None if self.sinks is None else self.sinks.weight)

    def _normed(self, norm: nn.Module, projected: Tensor) -> Tensor:
        """Projected queries or keys [..., width of this rank's heads], each head or all of them together normed."""
        per_head = self.spec.head_norm is HeadNorm.HEAD
        normed: Tensor = norm(projected.view(*projected.shape[:-1], -1, self.spec.head_dim) if per_head else projected)
        return normed.flatten(-2) if per_head else normed

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The MLP, gated or not: [..., hidden] to the same shape. Tensor ranks divide its width.

    In an expert, the enclosing expert layer does the communication between tensor ranks.
    """

    def __init__(
        self, spec: ModelSpec, part: RankModel, expert: bool = False, width: int = 0, activations: str = ACTIVATIONS
    ) -> None:
        """`width`: of the hidden layer; 0: `ffn_hidden_size`."""
        super().__init__()
        self.recomputable = {"activated": activations}
        self.kind, self.tensor, self.expert, self.operators = spec.activation, part.tensor, expert, part.operators
        hidden, width, bias = spec.hidden_size, width or spec.ffn_hidden_size, spec.mlp_bias
        self.gate = ColumnLinear(hidden, width, part.tensor, bias=bias) if spec.gated_mlp else None
        self.up = ColumnLinear(hidden, width, part.tensor, bias=bias)
        self.down = RowLinear(width, hidden, part.tensor, bias=bias, leaves=not expert)

    def forward(self, x: Tensor, multiply: Multiply | None = None) -> Tensor:
        """`multiply`: multiplies by the matrices of many experts, by name, instead of by this one's."""
        hidden = self.widen(x, multiply)
        return self.narrow(hidden) if multiply is None else multiply("down", hidden)

    def widen(self, x: Tensor, multiply: Multiply | None = None) -> Tensor:
        """The hidden layer after its activation."""
        matrices = {"up": self.up} if self.gate is None else {"up": self.up, "gate": self.gate}
        if multiply is not None:
            hidden, *gate = [multiply(name, x) for name in matrices]
        elif self.expert:
            hidden, *gate = [matrix(x) for matrix in matrices.values()]
        else:
            hidden, *gate = enter_through(x, self.tensor, tuple(matrices.values()))
        return self.activated(hidden, *gate)

    def activated(self, hidden: Tensor, *gate: Tensor) -> Tensor:
        """The hidden layer from its products."""
        return self.operators.gate(gate[0], hidden, self.kind) if gate else self.operators.activate(hidden, self.kind)

    def narrow(self, hidden: Tensor) -> Tensor:
        """The result, from the hidden layer."""
        result: Tensor = self.down(hidden)
        return result


def _head_norm(spec: ModelSpec, part: RankModel, width: int) -> nn.Module | None:
    """The norm of queries or keys, which are `width` wide."""
    if spec.head_norm in (HeadNorm.NONE, HeadNorm.ROTATED):
        return None
    return part.operators.make_norm(spec, spec.head_dim if spec.head_norm is HeadNorm.HEAD else width)


def _experts(spec: ModelSpec, part: RankModel) -> Experts:
    of_experts = part if part.expert_tensor is None else replace(part, tensor=part.expert_tensor)
    width, beside = spec.shared_expert_size, part.expert_tensor is None
    return Experts(
        spec, part.tensor, part.expert, lambda: FeedForward(spec, of_experts, True, activations=EXPERT_ACTIVATIONS),
        of_experts.tensor,
        FeedForward(spec, part, expert=beside, width=width) if width else None, part.overlaps_shared_experts,
    )  # fmt: skip


def _attention(spec: ModelSpec, part: RankModel, layer: int) -> nn.Module:
    if spec.latent is None:
        return Attention(spec, part, layer)
    return LatentAttention(spec, spec.latent, part.tensor, part.context, part.operators, window_of(spec, layer))


def _mlp(spec: ModelSpec, part: RankModel, layer: int) -> nn.Module:
    return _experts(spec, part) if spec.has_experts(layer) else FeedForward(spec, part, width=spec.dense_ffn_size)


def _bottleneck(spec: ModelSpec) -> Bottleneck | None:
    return Bottleneck(spec.hidden_size, spec.adapter_size) if spec.adapter_size else None


class Block(nn.Module):
    """One layer: [batch, tokens, hidden] to the same shape."""

    recomputable: ClassVar[Mapping[str, str]] = {"attention_norm": NORMS, "mlp_norm": NORMS}

    def __init__(self, spec: ModelSpec, part: RankModel, layer: int) -> None:
        super().__init__()
        self.norm_place, self.parallel_residual, self.scale = spec.norm_place, spec.parallel_residual, spec.residual_scale
        self.norms_inputs = spec.norm_place in (NormPlace.INPUT, NormPlace.BOTH)
        makes_outer = spec.norm_place is NormPlace.BOTH
        self.attention_norm = part.operators.make_norm(spec)
        self.attention = _attention(spec, part, layer)
        self.attention_adapter = _bottleneck(spec)
        self.attention_output_norm = part.operators.make_norm(spec) if makes_outer else None
        self.mlp_norm = part.operators.make_norm(spec)
        self.mlp = _mlp(spec, part, layer)
        self.mlp_adapter = _bottleneck(spec)
        self.mlp_output_norm = part.operators.make_norm(spec) if makes_outer else None

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        read = self.attention_norm(x) if self.norms_inputs else x
        added = apply_adapter(self.attention_adapter, self.attention(read, rotary, documents))
        attended = self._sum(x, added, self.attention_norm, self.attention_output_norm)
        read = self.mlp_norm(x if self.parallel_residual else attended) if self.norms_inputs else attended
        return self._sum(attended, apply_adapter(self.mlp_adapter, self.mlp(read)), self.mlp_norm, self.mlp_output_norm)

    def _sum(self, x: Tensor, added: Tensor, norm: nn.Module, output_norm: nn.Module | None) -> Tensor:
        """The sum of a sub-layer's input and its output."""
        if output_norm is not None:
            added = output_norm(added)
        elif self.norm_place is NormPlace.OUTPUT:
            added = norm(added)
        total = x + (added if self.scale == 1 else added * self.scale)
        return norm(total) if self.norm_place is NormPlace.SUM else total


class Embedding(nn.Module):
    """Token ids [batch, tokens] to [batch, tokens, hidden], with learned positions if the model has them.

    Tensor ranks divide the table's rows; with sequence parallelism each returns its share of the tokens.
    """

    def __init__(self, spec: ModelSpec, part: RankModel) -> None:
        super().__init__()
        self.offset, self.tensor, self.scale = spec.position_offset, part.tensor, spec.embedding_scale
        self.prompt = Prompt(spec.prompt_length, spec.table_width) if spec.prompt_length else None
        self.tokens = VocabularyEmbedding(spec.vocab_size, spec.table_width, part.tensor)
        self.project = nn.Linear(spec.embedding_size, spec.hidden_size, bias=False) if spec.embedding_size else None
        learned = spec.position is Position.LEARNED
        rows = spec.sequence_length + spec.position_offset
        self.positions = nn.Embedding(rows, spec.hidden_size) if learned else None

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """`places` [tokens] or [batch, tokens]: positions of the tokens in the sequence, or in their documents."""
        x: Tensor = self.tokens(tokens, self.prompt)
        if self.project is not None:
            x = self.project(x)
        if self.scale != 1:
            # The factor in the precision of the table, as models were trained; rounded on the host, so that nothing is sent.
            x = x * torch.tensor(self.scale, dtype=x.dtype, device="cpu").item()
        if self.positions is not None:
            x = x + self._positions(self.positions, places + self.offset)
        return x

    def _positions(self, table: nn.Embedding, rows: Tensor) -> Tensor:
        """Learned positions of the rank's tokens; zeros for virtual tokens."""
        if self.prompt is None:
            learned: Tensor = table(self.tensor.own_tokens(rows.movedim(-1, 0)).movedim(0, -1))
            return learned
        return self.tensor.own_tokens(functional.pad(table(rows), (0, 0, self.prompt.length, 0)))


class Transformer(nn.Module):
    """The model, or one rank's part of it.

    The first part takes `tokens` [batch, tokens]. Later parts take the hidden states [batch, tokens, hidden] of the previous
    part instead, with the virtual tokens of a prompt first. The last part returns the mean loss against `labels` [batch,
    tokens], a scalar; the others return their hidden states. With packed rows every part also takes `places` [batch, tokens]:
    the positions of the tokens in their documents, starting at 0. With context parallelism the tokens are those of the rank's
    positions; with sequence parallelism the hidden states are of a share of them.

    Modules for multi-token prediction are in the last part, which then also has the embedding, and takes `ahead` [batch,
    tokens, modules] (`labels_ahead`); without it, labels are those of whole samples. Their losses enter the gradient, not the
    value that is returned.
    """

    places: Tensor
    query_factors: Tensor

    def __init__(self, spec: ModelSpec, sequence_length: int, loss_chunk_size: int = 0, part: RankModel | None = None) -> None:
        super().__init__()
        self.spec, self.sequence_length = spec, sequence_length
        self.part = part = part or whole(spec)
        self.embedding = Embedding(spec, part) if part.first or (part.last and spec.mtp_layers) else None
        # Named by the layer's number in the whole model, because initial weights depend on their names.
        self.blocks = nn.ModuleDict({str(layer): Block(spec, part, layer) for layer in part.layers})
        modules = range(spec.mtp_layers if part.last else 0)
        self.predictions = nn.ModuleDict({
            str(depth): PredictionModule(spec, part.operators, Block(spec, part, spec.num_layers + depth)) for depth in modules
        })  # fmt: skip
        self.head = Head(spec, part.tensor, part.operators, part.losses_wait, loss_chunk_size) if part.last else None
        self.adapt()
        self.tie()
        self.rotary = spec.position is Position.ROTARY
        self.seed = 0
        """Of choices of experts that follow stated loads."""
        self.kept: dict[str, Tensor] = {}
        """Layer -> the tokens that it processes in this step (random-LTD); layers that process all are omitted."""
        self.make_tables()

    def tie(self) -> None:
        """Tie the output projection to the embedding table, if the model ties them and this part has both."""
        if self.spec.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def adapt(self) -> None:
        """If adapters or virtual tokens are trained, freeze all other parameters and add low-rank adapters to matrices."""
        if not self.spec.adapts:
            return
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Bottleneck | Prefix | Prompt):
                module.requires_grad_(True)
        named_modules = [pair for block in self.layers() for pair in block.named_modules()]
        for name, matrix in named_modules if self.spec.lora_rank else ():
            adapts = isinstance(matrix, ColumnLinear | RowLinear | WholeLinear)
            if adapts and name.rpartition(".")[2] in self.spec.lora_targets:
                matrix.adapt(self.spec.lora_rank)

    def quantise(self) -> None:
        """Quantise the matrices of the layers, if the model has frozen weights of fewer bits. Tables and norms stay."""
        if self.spec.adapts and self.spec.frozen_bits < 16:
            for _, matrix in self.matrices():
                matrix.quantise(self.spec.frozen_bits)

    def multiply_in_float8(self, recipe: str) -> None:
        """Multiply by the matrices of the layers in float8 from now on. Tables, routers and the output projection stay."""
        for _, matrix in self.matrices():
            matrix.float8 = recipe

    def matrices(self) -> list[tuple[str, ColumnLinear | RowLinear]]:
        """Names and matrices of the layers, without routers and those that are whole on each tensor rank."""
        named_modules = [pair for block in self.layers() for pair in block.named_modules()]
        return [(name, module) for name, module in named_modules if isinstance(module, ColumnLinear | RowLinear)]

    def make_tables(self) -> None:
        """Create the rotations of the rank's tokens, including virtual ones, in fp32 whatever the parameters' dtype."""
        self.register_buffer("places", self.part.context.positions(self.sequence_length), persistent=False)
        length = self.sequence_length + self.spec.prompt_length
        places = self.part.context.positions(length)
        for kind in ("rotary", "window_rotary") if self.spec.window_rope_theta else ("rotary",) if self.rotary else ():
            cosines, sines = rotary_table(self.spec, length, windowed=kind == "window_rotary")
            self.register_buffer(f"{kind}_cosines", cosines[places], persistent=False)
            self.register_buffer(f"{kind}_sines", sines[places], persistent=False)
        if self.spec.query_temperature:
            self.register_buffer("query_factors", query_factors(self.spec, length)[places], persistent=False)

        if self.spec.expert_loads and not places.is_meta:
            for layer, experts in self._experts().items():
                chosen = drawn_choices(self.spec, layer, length, self.seed)
                experts.follow(torch.tensor(chosen, device="cpu")[places])

    def _experts(self) -> dict[int, Experts]:
        """The layers with experts by number; those of modules for multi-token prediction follow the last layer's."""
        numbers = [*map(int, self.blocks), *(self.spec.num_layers + int(depth) for depth in self.predictions)]
        mlps = zip(numbers, (getattr(block, "mlp", None) for block in self.layers()), strict=True)
        return {layer: mlp for layer, mlp in mlps if isinstance(mlp, Experts)}

    def set_length(self, length: int) -> None:
        """Train on samples of `length` tokens from now on (curriculum)."""
        device, self.sequence_length = self.places.device, length
        self.make_tables()
        for module in (self, *self._experts().values()):
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, table.to(device))

    def layers(self) -> list[nn.Module]:
        """The blocks in order, those of modules for multi-token prediction last."""
        return [*self.blocks.values(), *(module.get_submodule("block") for module in self.predictions.values())]

    def sharding_units(self) -> list[nn.Module]:
        """The modules that stage 3 gathers as units; every rank calls them in the same order, each once."""
        further = () if not self.predictions or self.head is None else (self.head.norm, *self.predictions.values())
        return [unit for unit in (self.embedding, *self.blocks.values(), *further, self.head) if unit is not None]

    def split_dimensions(self) -> dict[str, int]:
        """Parameter -> the dimension that is sliced over tensor-parallel ranks; omitted parameters are whole on each rank."""
        dimensions = {}
        for name, module in self.named_modules():
            if isinstance(module, ColumnLinear | RowLinear | VocabularyEmbedding | LowRank | Prefix | Sinks):
                keys = (key for key, value in module.named_parameters(recurse=False) if value is not None)
                dimensions.update({f"{name}.{key}": module.split[key] for key in keys if key in module.split})
        return dimensions

    def summand_parameters(self) -> set[str]:
        """Parameters that are whole on each tensor-parallel rank, but get only a summand of their gradient there.

        With sequence parallelism these are all whole parameters. Otherwise they are the router and the experts' last biases, if
        ranks divide the experts' widths, the whole factors of adapters (`LowRank`) of divided matrices, and norms of heads.
        Gradients of experts are summed over the ranks that divide each expert.
        """
        if self.part.tensor.size == 1:
            return set()
        whole_ones = {name for name, _ in self.named_parameters()} - set(self.split_dimensions())
        if self.part.tensor.sequence_parallel:
            return whole_ones
        parts = [".router.", EXPERTS, ".adapter.", ".query_norm.", ".key_norm."]
        if self.part.expert_tensor is None:
            parts.append(".shared.")  # its sum is that of the experts, else it has its own
        computed_whole = tuple(f"{name}." for name, module in self.named_modules() if isinstance(module, WholeLinear))
        return {name for name in whole_ones if any(part in name for part in parts) and not name.startswith(computed_whole)}

    def expert_parameters(self) -> set[str]:
        """Parameters of experts, if experts are divided over other ranks than the rest of the model."""
        if self.part.expert.size == 1 and self.part.expert_tensor is None:
            return set()
        return {name for name, _ in self.named_parameters() if EXPERTS in name}

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, places: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        if self.predictions and ahead is None and labels is not None:
            ahead = labels_ahead(labels, self.spec.mtp_layers, places)
        x, *embedded = self._embedded(tokens, labels, places, ahead)
        rotary = self._rotations("rotary", x.dtype, places) if self.rotary else None
        window_rotary = self._rotations("window_rotary", x.dtype, places) if self.spec.window_rope_theta else rotary
        factors = self._query_factors(x.dtype, places)
        documents = near_documents = None if places is None else documents_in(places, x.dtype, self.spec.head_dim)
        if places is not None and (window := window_of(self.spec)).chunked and window.hides(self.sequence_length):
            near_documents = documents_in(places, x.dtype, self.spec.head_dim, window.tokens)

        def positions(layer: int) -> Rotary:
            return factors if not self.spec.is_rotated(layer) else window_rotary if self.spec.has_window(layer) else rotary

        def documents_of(layer: int) -> Documents | None:
            return near_documents if self.spec.has_window(layer) else documents

        for name, block in self.blocks.items():
            token_positions, layer = self.kept.get(name), int(name)
            layer_rotary = positions(layer)
            x = (
                block(x, layer_rotary, documents_of(layer))
                if token_positions is None
                else through_kept(block, x, layer_rotary, token_positions)
            )
        if self.head is None:
            return x
        further: list[Tensor] = []
        if self.predictions and self.head.norm is not None:
            x, layer = self.head.norm(x), self.spec.num_layers
            hidden = x
            for module, own_embedded in zip(self.predictions.values(), embedded, strict=True):
                hidden = module(hidden, own_embedded, positions(layer), documents_of(layer))
                further.append(hidden)
        loss: Tensor = self.head(x, labels, further, ahead)
        return loss

    def _query_factors(self, dtype: torch.dtype, places: Tensor | None) -> tuple[Tensor] | None:
        """Factors of the queries of layers that are not rotated, in at least fp32; None: there are none, or all are 1."""
        if not self.spec.query_temperature or self.sequence_length + self.spec.prompt_length < self.spec.temperature_span:
            return None
        factors = self.query_factors.to(torch.promote_types(dtype, torch.float32))
        return (factors if places is None else factors[places][:, None],)

    def _embedded(self, tokens: Tensor, labels: Tensor | None, places: Tensor | None, ahead: Tensor | None) -> Sequence[Tensor]:
        """The input of the layers, and of each module for multi-token prediction the embeddings of the tokens that were
        predicted before it. One lookup for all, because stage 3 gathers the table once for each call.
        """
        if self.embedding is None:
            return (tokens,)
        ids = [tokens] if self.part.first else []
        if labels is not None and ahead is not None:
            # A token without a target there contributes to no loss; any id will do.
            ids += [token_ids.clamp(min=0) for token_ids in (labels, *ahead.unbind(-1)[:-1])]
        embeddings = self.embedding(torch.cat(ids) if len(ids) > 1 else ids[0], self.places if places is None else places)
        parts = embeddings.chunk(len(ids))
        return parts if self.part.first else (tokens, *parts)

    def _rotations(self, kind: str, dtype: torch.dtype, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens, or of tokens at positions `places` [batch, tokens]."""
        tables = getattr(self, f"{kind}_cosines").to(dtype), getattr(self, f"{kind}_sines").to(dtype)
        return tables if places is None else (tables[0][places][:, None], tables[1][places][:, None])


def transformer_without_memory(
    spec: ModelSpec,
    sequence_length: int,
    seed: int,
    dtype: torch.dtype,
    loss_chunk_size: int = 0,
    part: RankModel | None = None,
) -> tuple[Transformer, dict[str, FirstValues]]:
    """The model, or one rank's part, with parameters on the meta device and tables on the CPU; initial values by name.

    Values depend on the seed, each parameter's name in the whole model and an element's position in the whole parameter. So
    every layout of a model starts from the same weights, and a rank creates only those that it keeps.
    """
    with torch.device("meta"):
        model = Transformer(spec, sequence_length, loss_chunk_size, part).to(dtype)
    model.seed = seed
    splits = model.split_dimensions()
    values: dict[str, FirstValues] = {}
    for name, parameter in model.named_parameters():
        # A tied output projection has the embedding's values, even on another rank.
        whole_name = "embedding.tokens.weight" if spec.tied_embeddings and name == "head.output.weight" else name
        drawn = _first_values(whole_name, parameter, seed, splits.get(name), model.part.dividing(name))
        zeros = spec.zero_centered_norms and "norm" in name
        values[name] = replace(drawn, kind=Distribution.ZEROS) if zeros else drawn
    with torch.device("meta"):
        model.quantise()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedMatrix):
            matrix = values.pop(f"{name.removesuffix('.quantised')}.weight")
            assert isinstance(matrix, Drawn)
            values[f"{name}.packed"] = QuantisedValues(matrix, module)
            module.make_tables(dtype)
        if isinstance(module, Experts):
            module.make_tables(dtype)
    model.make_tables()
    return model, values


def build_transformer(
    spec: ModelSpec,
    sequence_length: int,
    seed: int,
    dtype: torch.dtype,
    loss_chunk_size: int = 0,
    part: RankModel | None = None,
) -> Transformer:
    """The model, or one rank's part, on the CPU with its initial values (`transformer_without_memory`)."""
    model, values = transformer_without_memory(spec, sequence_length, seed, dtype, loss_chunk_size, part)
    materialise(model, values, torch.device("cpu"))
    return model


def _first_values(name: str, parameter: Tensor, seed: int, split: int | None, tensor: TensorParallel) -> Drawn:
    """Norm weights are 1, biases and adapters' second matrices 0, other matrices normal.

    `parameter` is this rank's slice, along dimension `split`, of the named parameter.
    """
    shape = [size * tensor.size if dimension == split else size for dimension, size in enumerate(parameter.shape)]
    width = 0 if split is None else parameter.shape[split]
    drawn = draw(name, shape, seed, parameter.dtype, split, tensor.rank * width, width)
    if name.endswith(("bias", ".sinks.weight", OUTWARD, "_adapter.up.weight")):
        return replace(drawn, kind=Distribution.ZEROS)
    return replace(drawn, kind=Distribution.ONES) if parameter.dim() == 1 else drawn
