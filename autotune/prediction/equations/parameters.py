"""Parameters by where they are: in a layer, in the tables, and on a stage of the pipeline."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer, whole."""

    attention: Array
    dense: Array
    """Of the MLP that every token passes: 0 where there are experts."""
    experts: Array
    """Of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters that one rank of a stage holds before anything is sharded over data."""

    trained: Array
    frozen: Array
    frozen_tables: Array
    """Of `frozen`, the tables, which are not quantised."""
    trained_tables: Array
    """Of `trained`, the tables."""
    expert_trained: Array
    """Of `trained`, those of experts: sharded over fewer ranks."""


def layer_parameters(cases: Cases) -> LayerParameters:
    """Matrices of a layer; biases and norms, a ten-thousandth of it, are not counted."""
    shapes = cases.shapes
    mlp = shapes.matrices * shapes.hidden * shapes.ffn
    attention = shapes.hidden * (2 * shapes.query + 2 * shapes.key_value)
    return LayerParameters(
        attention=attention + 2 * shapes.hidden,
        dense=np.where(shapes.experts > 0, shapes.experts * shapes.hidden, mlp),
        experts=shapes.experts * mlp,
    )


def is_quantised(cases: Cases) -> Flags:
    """Whether frozen matrices have fewer than 16 bits."""
    quantised: Flags = (cases.shapes.frozen_bytes > 0) & (cases.shapes.frozen_bytes < 2)
    return quantised


def counted_elements(cases: Cases) -> Array:
    """What thresholds of stage 3 count an element of a layer's matrices as: quantised ones by their bytes."""
    return np.where(is_quantised(cases), cases.shapes.frozen_bytes, 1.0)


def gathered_units(cases: Cases) -> tuple[Array, Array]:
    """Elements of a layer that stage 3 gathers on a rank: of what all data ranks share out, and of its experts, which are
    gathered by themselves where ranks divide them, else (0) with the rest.
    """
    layouts, layer = cases.layouts, layer_parameters(cases)
    apart, experts = layouts.expert > 1, layer.experts / layouts.expert / layouts.tensor
    common = (layer.attention + layer.dense) / layouts.tensor + np.where(apart, 0.0, experts)
    return common, np.where(apart, experts, 0.0)


def persistent_parameters(cases: Cases, layers: Array) -> Array:
    """Of what a rank's layers hold, the parameters that are smaller than the threshold and stay whole at stage 3.

    Of adapters none are counted: they are few beside what is frozen, and gathered anew after each update anyhow.
    """
    shapes, layouts = cases.shapes, cases.layouts
    matrices = (
        (2.0, shapes.hidden + 0 * layouts.tensor),
        (2.0, shapes.hidden * shapes.query / layouts.tensor),
        (2.0, shapes.hidden * shapes.key_value / layouts.tensor),
        (shapes.matrices * np.maximum(shapes.experts, 1.0) / layouts.expert, shapes.hidden * shapes.ffn / layouts.tensor),
    )
    kept = sum((count * size * (counted_elements(cases) * size < layouts.persistence) for count, size in matrices), np.zeros(1))
    return np.where(layouts.zero_stage >= 3, layers * kept, 0.0)


def divided(cases: Cases, held: StageParameters, ranks: Array) -> Array:
    """Trained parameters of one rank where `ranks` share them out; of experts, only those ranks that hold the same ones do."""
    alike = np.where(ranks > 1, np.maximum(ranks / cases.layouts.expert, 1.0), 1.0)
    return (held.trained - held.expert_trained) / ranks + held.expert_trained / alike


def stage_parameters(cases: Cases, layers: Array, first: Array, last: Array) -> StageParameters:
    """What a rank of a stage with so many `layers` holds; `first` and `last` are 1 where the stage has the tables."""
    shapes, layouts = cases.shapes, cases.layouts
    layer, table = layer_parameters(cases), shapes.vocabulary * shapes.hidden / layouts.tensor
    second_copy = np.where((shapes.tied > 0) & (first > 0), 0.0, last)
    tables = (first + second_copy) * table + first * shapes.positions * shapes.hidden
    dense = layers * (layer.attention + layer.dense) / layouts.tensor + tables
    experts = layers * layer.experts / (layouts.tensor * layouts.expert)
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
