"""Updated parameters gathered during the next step's forward (`overlap_param_gather`): seconds and bytes."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.parameters import StageParameters, layer_parameters, own_experts

IN_FLIGHT = 2.0
"""Gathers in flight at once."""


def gathers_late(cases: Cases) -> Flags:
    """Whether there is something to gather and it is gathered during forward."""
    layouts = cases.layouts
    stages = (layouts.zero_stage == 1) | (layouts.zero_stage == 2)
    late: Flags = stages & (layouts.overlap_param_gather > 0) & (layouts.shard > 1)
    return late


def gathers(layers: Array) -> Array:
    """Number of gathers of a rank with `layers` layers: one per layer, and the table."""
    return np.maximum(layers, 1.0) + 1


def exposed_seconds(
    cases: Cases, rates: Coefficients, seconds: Array, pace: Array, layers: Array, held: StageParameters
) -> Array:
    """The part of the gathers' `seconds` that no computation hides; a micro-batch takes `pace` seconds.

    The first unit waits for its own gather. The others are hidden only by the forward of the first micro-batch, since its last
    unit needs the last gather.
    """
    if not np.any(gathers_late(cases)):  # only then is it read
        return seconds
    forward = pace / (1 + rates.backward_ratio)
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, _table(cases) / np.maximum(held.trained, 1.0))
    first = np.minimum(np.maximum(1 / gathers(layers), table), 1.0)
    behind = seconds * (1 - first)
    shown = np.maximum(behind - forward * (1 - rates.data_exposed), rates.data_exposed * behind)
    slowed = np.minimum(behind, forward) * rates.overlap_slowdown
    exposed: Array = seconds * first + np.minimum(shown + slowed, behind)
    return exposed


def buffer_bytes(cases: Cases, held: StageParameters) -> Array:
    """Bytes of gathered units in flight, and their shares in the parameters' type: the table and a layer, or two layers."""
    if not np.any(gathers_late(cases)):
        return np.zeros(1)
    layouts, layer = cases.layouts, layer_parameters(cases)
    own = (layer.attention + layer.dense) / layouts.tensor + own_experts(cases, layer)
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, _table(cases))
    units = np.minimum(np.maximum(IN_FLIGHT * own, own + table), held.trained)
    cast = np.where(layouts.parameter_bytes < 4, 1 / layouts.shard, 0.0)
    return np.where(gathers_late(cases), units * layouts.parameter_bytes * (1 + cast), 0.0)


def refill_bytes(cases: Cases, held: StageParameters) -> Array:
    """Bytes of gathers of updated parameters in flight at the end of the update, for an engine that gathers in buckets; plus
    their shares in the parameters' type.
    """
    layouts = cases.layouts
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, np.minimum(_table(cases), held.trained_tables))
    each = layouts.allgather_bucket_size
    elements = np.maximum(each, table) + np.where(layouts.overlap_comm > 0, IN_FLIGHT - 1, 0.0) * each
    cast = np.where(layouts.parameter_bytes < 4, 1 / layouts.shard, 0.0)
    found = np.minimum(elements, held.trained) * layouts.parameter_bytes * (1 + cast)
    stages = (layouts.zero_stage == 1) | (layouts.zero_stage == 2)
    at_end = stages & (layouts.shard > 1) & ~gathers_late(cases) & (cases.software.waits_for_bucket > 0)
    return np.where(at_end, found, 0.0)


def standing_bytes(cases: Cases, own: Array) -> Array:
    """Bytes of the share of `own` elements in the parameters' type: it stays until gathered if the master is not entirely on
    the device.
    """
    return np.where(gathers_late(cases) & (cases.layouts.offload_optimizer > 0), own * cases.layouts.parameter_bytes, 0.0)


def _table(cases: Cases) -> Array:
    return cases.shapes.vocabulary * cases.shapes.hidden / cases.layouts.tensor
