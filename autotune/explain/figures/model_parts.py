"""A model's modules with their parameters and FLOPs, computed from its shape; they sum to those of the whole model."""

from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.models.model import ModelSpec, Norm, Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A module, or all modules of a kind, with their submodules."""

    label: str
    depth: int
    """0: the model."""
    kind: str
    """embedding, layer or head: the group whose time it shares."""
    count: int
    """Number of modules that it represents."""
    parameters: int
    """Of all of them."""
    flops_per_token: float
    """Of all of them, forward and backward, for one token, without recomputation."""


def parts_of_model(spec: ModelSpec, sequence_length: int) -> list[ModulePart]:
    """The model first, each module before its submodules.

    FLOPs are as in `ModelSpec.flops_per_token`: 6 per multiplied parameter and token (4 if the parameter is frozen), and
    12 H Q T per layer for attention's products.
    """
    tables, layers, end = _tables(spec), _layer(spec, sequence_length), [*_predictions(spec, sequence_length), *_end(spec)]
    inside = [*tables, _sum("layers", 1, "layer", spec.num_layers, layers), *layers, *end]
    whole = [part for part in inside if part.depth == 1]
    return [_sum("model", 0, "model", 1, whole), *inside]


def _tables(spec: ModelSpec) -> list[ModulePart]:
    width = spec.embedding_size or spec.hidden_size
    found = [_part(spec, "token embedding", 1, "embedding", spec.vocab_size * width, 0)]
    if spec.position is Position.LEARNED:
        rows = spec.sequence_length + spec.position_offset
        found.append(_part(spec, "position embedding", 1, "embedding", rows * spec.hidden_size, 0))
    if spec.embedding_size:
        size = 2 * spec.embedding_size * spec.hidden_size
        found.append(_part(spec, "projections in and out", 1, "embedding", size, size))
    return found


def _layer(spec: ModelSpec, sequence_length: int) -> list[ModulePart]:
    """The modules of all layers: attention, the MLP, the norms."""
    products = 6.0 * spec.num_layers * spec.num_attention_heads * (spec.head_dim + spec.value_size)
    products *= spec.attended(sequence_length)
    attention = [
        _part(spec, name, 3, "layer", spec.num_layers * size, spec.num_layers * size)
        for name, size in spec.attention_matrices.items()
    ]
    scores = ModulePart(
        label="scores", depth=3, kind="layer", count=spec.num_layers, parameters=0, flops_per_token=products
    )  # fmt: skip
    norms = spec.num_layers * (spec.layer_norms * _norm(spec) + spec.head_norm_parameters)
    adapters = [_adapters(spec)] if spec.lora_rank else []
    mlp = _mlp(spec)
    return [
        _sum("attention", 2, "layer", spec.num_layers, [*attention, scores]), *attention, scores,
        _sum("mlp", 2, "layer", spec.num_layers, mlp), *mlp,
        _part(spec, "norms", 2, "layer", norms, norms), *adapters,
    ]  # fmt: skip


def _mlp(spec: ModelSpec) -> list[ModulePart]:
    layers = spec.expert_layers or spec.num_layers
    found = _matrices(spec, "", layers, spec.ffn_hidden_size, max(spec.num_experts, 1), max(spec.experts_per_token, 1))
    if spec.num_experts:
        router = layers * spec.num_experts * spec.router_row
        found.append(_part(spec, "router", 3, "layer", router, router))
    if spec.shared_expert_size:
        found += _matrices(spec, "shared ", layers, spec.shared_expert_size)
    if layers < spec.num_layers:
        found += _matrices(spec, "dense ", spec.num_layers - layers, spec.dense_ffn_size)
    return found


def _matrices(spec: ModelSpec, kind: str, layers: int, width: int, copies: int = 1, active: int = 1) -> list[ModulePart]:
    """The matrices of MLPs of a width in so many layers, of which a token uses `active` of `copies`."""
    found = []
    for name in ("gate", "up", "down") if spec.gated_mlp else ("up", "down"):
        size = spec.hidden_size * width
        if spec.mlp_bias:
            size += spec.hidden_size if name == "down" else width
        found.append(_part(spec, f"{kind}{name}", 3, "layer", layers * copies * size, layers * active * size))
    return found


def _predictions(spec: ModelSpec, sequence_length: int) -> list[ModulePart]:
    """The modules for multi-token prediction, after the layers; they share the tables."""
    if not spec.mtp_layers:
        return []
    return [
        ModulePart(
            label="multi-token prediction", depth=1, kind="head", count=spec.mtp_layers, parameters=spec.mtp_parameters,
            flops_per_token=spec.mtp_flops_per_token(sequence_length),
        )
    ]  # fmt: skip


def _end(spec: ModelSpec) -> list[ModulePart]:
    found = [_part(spec, "final norm", 1, "head", _norm(spec), _norm(spec))] if spec.final_norm else []
    size = spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    label = "tied output projection" if spec.tied_embeddings else "output projection"
    return [*found, _part(spec, label, 1, "head", 0 if spec.tied_embeddings else size, size)]


def _adapters(spec: ModelSpec) -> ModulePart:
    """Low-rank adapters, which are trained. Their parameters do not count as the model's."""
    flops = 6.0 * spec.adapter_parameters
    return ModulePart(label="adapters", depth=2, kind="layer", count=spec.num_layers, parameters=0, flops_per_token=flops)


def _part(spec: ModelSpec, label: str, depth: int, kind: str, parameters: int, multiplied: int) -> ModulePart:
    # No weight gradient is computed for a frozen matrix.
    flops = (4.0 if spec.adapts else 6.0) * multiplied
    count = spec.num_layers if kind == "layer" else 1
    return ModulePart(label=label, depth=depth, kind=kind, count=count, parameters=parameters, flops_per_token=flops)


def _sum(label: str, depth: int, kind: str, count: int, parts: Sequence[ModulePart]) -> ModulePart:
    nearest = [part for part in parts if part.depth == depth + 1]
    return ModulePart(
        label=label, depth=depth, kind=kind, count=count, parameters=sum(part.parameters for part in nearest),
        flops_per_token=sum(part.flops_per_token for part in nearest),
    )  # fmt: skip


def _norm(spec: ModelSpec) -> int:
    return spec.hidden_size * (2 if spec.norm is Norm.LAYERNORM else 1)
