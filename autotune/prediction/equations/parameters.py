"""Parameters by location: in a layer, in the tables, and on a pipeline stage."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from search_spaces.models.module_profile import ModuleProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer, undivided."""

    attention: Array
    dense: Array
    """Of the MLP that every token passes through; with experts, of the router."""
    experts: Array
    """Of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters of one rank of a stage before sharding over data."""

    trained: Array
    frozen: Array
    frozen_tables: Array
    """The part of `frozen` in tables, which are not quantised."""
    trained_tables: Array
    """The part of `trained` in tables."""
    expert_trained: Array
    """The part of `trained` in experts: sharded over fewer ranks."""


def layer_parameters(cases: Cases) -> LayerParameters:
    """Matrices of a layer; biases and norms, about 1/10,000 of it, are not counted."""
    shapes = cases.shapes
    mlp, share = shapes.matrices * shapes.hidden, shapes.expert_share
    attention = shapes.hidden * (2 * shapes.query + 2 * shapes.key_value)
    if np.any(shapes.key_value_rank > 0):
        attention = np.where(shapes.key_value_rank > 0, _latent_attention(cases), attention)
    beside = share * (shapes.experts * shapes.hidden + mlp * shapes.shared_ffn) + (1 - share) * mlp * shapes.dense_ffn
    return LayerParameters(
        attention=attention + 2 * shapes.hidden,
        dense=np.where(shapes.experts > 0, beside, mlp * shapes.ffn),
        experts=share * shapes.experts * mlp * shapes.ffn,
    )


def _latent_attention(cases: Cases) -> Array:
    """Every tensor rank has the projections to narrow vectors whole: they count once for each rank."""
    shapes, latent = cases.shapes, cases.shapes.key_value_rank
    whole = shapes.hidden * (shapes.query_rank + latent + shapes.rotated)
    query = np.where(shapes.query_rank > 0, shapes.query_rank, shapes.hidden) * shapes.query
    keys = latent * (shapes.query - shapes.heads * shapes.rotated + shapes.value)
    return whole * cases.layouts.tensor + query + keys + shapes.value * shapes.hidden


def is_quantised(cases: Cases) -> Flags:
    """Whether frozen matrices have fewer than 16 bits."""
    quantised: Flags = (cases.shapes.frozen_bytes > 0) & (cases.shapes.frozen_bytes < 2)
    return quantised


def counted_elements(cases: Cases) -> Array:
    """How thresholds of stage 3 count an element of a layer's matrices: quantised ones by their bytes."""
    return np.where(is_quantised(cases), cases.shapes.frozen_bytes, 1.0)


def gathered_units(cases: Cases) -> tuple[Array, Array]:
    """Elements of a layer that stage 3 gathers on a rank: those sharded over all data ranks, and those of its experts, which
    are gathered separately if ranks divide them, else (0) with the rest.
    """
    if cases.module is not None:
        profile = cases.module.profile
        blocks = profile.block_elements
        unit = blocks / len(profile.block_names) if blocks else profile.trained_elements
        return np.array([unit], dtype=np.float64) / cases.layouts.tensor, np.zeros(1)
    layouts, layer = cases.layouts, layer_parameters(cases)
    divides, experts = layouts.apart, own_experts(cases, layer)
    common = (layer.attention + layer.dense) / layouts.tensor + np.where(divides, 0.0, experts)
    return common, np.where(divides, experts, 0.0)


def persistent_parameters(cases: Cases, layers: Array) -> Array:
    """The parameters of a rank's layers that are below the threshold and stay unsharded at stage 3.

    Adapters are not counted: they are few compared to the frozen parameters, and regathered after each update anyway.
    """
    shapes, layouts = cases.shapes, cases.layouts
    if cases.module is not None:
        sizes = np.array([parameter.elements for parameter in cases.module.profile.trained], dtype=np.float64)
        below = [float(sizes[sizes <= least].sum()) for least in layouts.param_persistence_threshold.reshape(-1)]
        small = np.array(below).reshape(layouts.param_persistence_threshold.shape) * layers / shapes.layers / layouts.tensor
        return np.where(layouts.zero_stage >= 3, small, 0.0)
    experts = np.where(shapes.experts > 0, shapes.expert_share * shapes.experts, 1.0)  # per layer, as a mean over the layers
    matrices = (
        (2.0, shapes.hidden + 0 * layouts.tensor),
        (2.0, shapes.hidden * shapes.query / layouts.tensor),
        (2.0, shapes.hidden * shapes.key_value / layouts.tensor),
        (shapes.matrices * experts / layouts.expert, shapes.hidden * shapes.ffn / layouts.expert_tensor),
    )
    persistent = sum(
        (count * size * (counted_elements(cases) * size < layouts.param_persistence_threshold) for count, size in matrices),
        np.zeros(1),
    )
    return np.where(layouts.zero_stage >= 3, layers * persistent, 0.0)


def own_experts(cases: Cases, layer: LayerParameters) -> Array:
    """Parameters of a layer's experts on a rank, before sharding."""
    return layer.experts / (cases.layouts.expert * cases.layouts.expert_tensor)


def divided(cases: Cases, parameter_counts: StageParameters, sharded: Flags) -> Array:
    """Trained parameters of one rank, where `sharded` over the ranks that hold the same ones: experts over others."""
    ranks, alike = np.where(sharded, cases.layouts.shard, 1.0), np.where(sharded, cases.layouts.alike, 1.0)
    return (parameter_counts.trained - parameter_counts.expert_trained) / ranks + parameter_counts.expert_trained / alike


def stage_parameters(cases: Cases, layers: Array, first: Array, last: Array) -> StageParameters:
    """Parameters of a rank of a stage with `layers` layers; `first` and `last` are 1 if the stage has the tables.

    The last stage also has the modules for multi-token prediction, whose projection every tensor rank holds whole, and which
    read the table of the first.
    """
    shapes, layouts = cases.shapes, cases.layouts
    if cases.module is not None:
        return _module_parameters(cases, cases.module.profile, layers, first, last)
    layer, table = layer_parameters(cases), shapes.vocabulary * shapes.hidden / layouts.tensor
    second_copy = np.where((shapes.tied > 0) & (first > 0), 0.0, last)
    modules = last * shapes.modules
    read_copy = np.where((modules > 0) & (shapes.tied == 0), 1 - first, 0.0)
    tables = (first + second_copy + read_copy) * table + first * shapes.positions * shapes.hidden
    layers = layers + modules
    dense = layers * (layer.attention + layer.dense) / layouts.tensor + tables + modules * 2 * shapes.hidden**2
    experts = layers * own_experts(cases, layer)
    adapters = layers * (shapes.adapter + shapes.adapter_divided / layouts.tensor)
    adapters = adapters + first * shapes.prompt * shapes.hidden
    frozen = shapes.frozen_bytes > 0
    return StageParameters(
        trained=np.where(frozen, adapters, dense + experts),
        frozen=np.where(frozen, dense + experts, 0.0),
        frozen_tables=np.where(frozen, tables, 0.0),
        trained_tables=np.where(frozen, 0.0, tables),
        expert_trained=np.where(frozen, 0.0, experts),
    )


def _module_parameters(cases: Cases, profile: ModuleProfile, layers: Array, first: Array, last: Array) -> StageParameters:
    """Of a user's module. What is outside of its blocks is at both ends; frozen parameters are never sent."""
    blocks = profile.block_elements
    ends = profile.trained_elements - blocks
    outside = np.where(cases.layouts.pipeline > 1, (first + last) / 2, 1.0) * ends
    inside = np.where(cases.layouts.pipeline > 1, layers / cases.shapes.layers, 1.0) * blocks
    nothing = np.zeros(1)
    return StageParameters(
        trained=(inside + outside) / cases.layouts.tensor, frozen=nothing, frozen_tables=nothing,
        trained_tables=outside / cases.layouts.tensor, expert_trained=nothing,
    )  # fmt: skip
