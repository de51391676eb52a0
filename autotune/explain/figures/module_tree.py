"""The modules of a model in a step of the winner: parameters and FLOPs from its shape, time, memory of the model states."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.explain.evidence import ExplanationEvidence
from autotune.explain.figures.source import FigureSource, FigureUnit, MakeFigure, column, flops_text, share_text, table
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.compute import micro_batch
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import Question
from autotune.wire.figures import Figure
from search_spaces.models.model import FactoryModel, ModelSpec, Norm, Position
from search_spaces.training.adapters import configured


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
    """The tables of tokens and positions. With narrower embeddings also their projections: into the first layer and out of the
    last one; only these have products."""
    width = spec.embedding_size or spec.hidden_size
    parts = [_part(spec, "token embedding", 1, "embedding", spec.vocab_size * width, 0)]
    if spec.position is Position.LEARNED:
        rows = spec.sequence_length + spec.position_offset
        parts.append(_part(spec, "position embedding", 1, "embedding", rows * spec.hidden_size, 0))
    if spec.embedding_size:
        size = 2 * spec.embedding_size * spec.hidden_size
        parts.append(_part(spec, "projections in and out", 1, "embedding", size, size))
    return parts


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
    # Low-rank adapters, which are trained. Their parameters do not count as the model's.
    adapters = ModulePart(
        label="adapters", depth=2, kind="layer", count=spec.num_layers, parameters=0,
        flops_per_token=6.0 * spec.adapter_parameters,
    )  # fmt: skip
    mlp = _mlp(spec)
    return [
        _sum("attention", 2, "layer", spec.num_layers, [*attention, scores]), *attention, scores,
        _sum("mlp", 2, "layer", spec.num_layers, mlp), *mlp,
        _part(spec, "norms", 2, "layer", norms, norms), *([adapters] if spec.lora_rank else []),
    ]  # fmt: skip


def _mlp(spec: ModelSpec) -> list[ModulePart]:
    layers = spec.expert_layers or spec.num_layers
    parts = _matrices(spec, "", layers, spec.ffn_hidden_size, max(spec.num_experts, 1), max(spec.experts_per_token, 1))
    if spec.num_experts:
        router = layers * spec.num_experts * spec.router_row
        parts.append(_part(spec, "router", 3, "layer", router, router))
    if spec.shared_expert_size:
        parts += _matrices(spec, "shared ", layers, spec.shared_expert_size)
    if layers < spec.num_layers:
        parts += _matrices(spec, "dense ", spec.num_layers - layers, spec.dense_ffn_size)
    return parts


def _matrices(spec: ModelSpec, kind: str, layers: int, width: int, copies: int = 1, active: int = 1) -> list[ModulePart]:
    """The matrices of MLPs of a width in so many layers, of which a token uses `active` of `copies`."""
    parts = []
    for name in ("gate", "up", "down") if spec.gated_mlp else ("up", "down"):
        size = spec.hidden_size * width
        if spec.mlp_bias:
            size += spec.hidden_size if name == "down" else width
        parts.append(_part(spec, f"{kind}{name}", 3, "layer", layers * copies * size, layers * active * size))
    return parts


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
    parts = [_part(spec, "final norm", 1, "head", _norm(spec), _norm(spec))] if spec.final_norm else []
    size = spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    label = "tied output projection" if spec.tied_embeddings else "output projection"
    return [*parts, _part(spec, label, 1, "head", 0 if spec.tied_embeddings else size, size)]


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


def module_tree(source: FigureSource, figure: MakeFigure) -> Figure:
    """Computed from the model's shape; `autotune profile` measures the modules on one rank."""
    evidence = source.evidence
    if source.unpredicted:
        return figure(summary=f"{source.unpredicted} `autotune profile` measures modules.")
    if evidence is None or evidence.question is None:
        return figure(summary=source.lacking())
    question = evidence.question
    if isinstance(question.model, FactoryModel):
        summary = "The model is the user's module, whose parts are not predicted one by one. `autotune profile` measures them."
        return figure(summary=summary)
    estimate = estimates(question, [evidence.config])[0]
    parts = parts_of_model(configured(question.shape, evidence.config), question.sequence_length)
    seconds = _seconds(evidence, question, parts, estimate)
    # Summed over the ranks of one pipeline, each of which holds its part of the model.
    state_bytes = sum(
        rank.by_tag.get(tag, 0.0) for rank in estimate.ranks for tag in ("parameters", "gradients", "optimizer_state")
    )
    bytes_per_parameter = state_bytes / question.model.parameter_count
    flops = [part.flops_per_token * question.tokens for part in parts]
    names = _names(parts)
    modules = table(
        "modules",
        "a module, or all that are alike, with what is inside",
        [
            column("name", "path", names),
            column("label", "module", [part.label for part in parts]),
            column("kind", "kind", [part.kind for part in parts]),
            column("depth", "depth", [part.depth for part in parts]),
            column("count", "modules", [part.count for part in parts]),
            column("parameters", "parameters", [part.parameters for part in parts], FigureUnit.ELEMENTS),
            column("flops", "FLOPs of a step", flops, FigureUnit.FLOPS),
            column("share", "share of the FLOPs", [count / flops[0] for count in flops], FigureUnit.SHARE),
            column("seconds", "time of a step", seconds, FigureUnit.SECONDS),
            column(
                "memory_bytes", "states on a rank", [part.parameters * bytes_per_parameter for part in parts], FigureUnit.BYTES
            ),
        ],
    )
    leaves = [index for index, part in enumerate(parts) if index + 1 == len(parts) or parts[index + 1].depth <= part.depth]
    largest = max(leaves, key=lambda index: flops[index])
    summary = (
        f"{parts[0].parameters:,} parameters and {flops_text(flops[0])} a step; the largest part, "
        f"{share_text(flops[largest] / flops[0])}, is in {names[largest]}."
    )
    return figure(
        summary=summary,
        tables=(modules,),
        notes=(
            "FLOPs are those of all ranks, forward and backward, without recomputation.",
            "Time is predicted for the ranks that hold a module; inside a layer it is divided in proportion to FLOPs.",
            "States are parameters, gradients and optimizer state, predicted, on a rank that holds the module.",
        ),
    )


def _seconds(
    evidence: ExplanationEvidence, question: Question, parts: Sequence[ModulePart], estimate: StepEstimate
) -> list[float]:
    """Seconds for all micro-batches of a rank, scaled down if the measured step is shorter than the predicted one."""
    config = evidence.config
    cases = cases_of(question.model, question.cluster, question.workload, [config], question.engine)
    batch = micro_batch(cases, question.rates)
    scale = min(1.0, evidence.step_seconds / estimate.step_seconds.mean) * float(cases.layouts.accumulation[0])
    whole = {
        "embedding": float(batch.embedding[0]) * scale,
        "layer": float((batch.layer + batch.layer_communication)[0]) * question.shape.num_layers * scale,
        "head": float((batch.head + batch.head_communication)[0]) * scale,
    }
    tops = [part for part in parts if part.depth == 1]
    part_seconds = []
    for part in parts:
        if part.kind == "model":
            part_seconds.append(sum(whole.values()))
            continue
        alike = [top for top in tops if top.kind == part.kind]
        flops = sum(top.flops_per_token for top in alike)
        # Lookup tables have no FLOPs: their time is divided in proportion to their size.
        share = part.flops_per_token / flops if flops else part.parameters / max(sum(top.parameters for top in alike), 1)
        part_seconds.append(whole[part.kind] * share)
    return part_seconds


def _names(parts: Sequence[ModulePart]) -> list[str]:
    """`layers.attention.query`."""
    path: list[str] = []
    names = []
    for part in parts:
        path = [*path[: max(part.depth - 1, 0)], part.label] if part.depth else []
        names.append(".".join(path) or part.label)
    return names
