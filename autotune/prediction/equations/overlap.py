"""Overlapped transfers (docs/performance.md): gathered parameters, sums of tensor parallelism, activations in host memory."""

from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import collective_seconds, tensor_group
from autotune.prediction.equations.parameters import StageParameters, layer_parameters, own_experts
from search_spaces.communication import ROW_PARTS

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


def exposed_gather_seconds(
    cases: Cases, rates: Coefficients, seconds: Array, pace: Array, layers: Array, parameter_counts: StageParameters
) -> Array:
    """The part of the gathers' `seconds` that no computation hides; a micro-batch takes `pace` seconds.

    The first unit waits for its own gather. The others are hidden only by the forward of the first micro-batch, since its last
    unit needs the last gather.
    """
    if not np.any(gathers_late(cases)):  # only then is it read
        return seconds
    forward = pace / (1 + rates.backward_ratio)
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, _table(cases) / np.maximum(parameter_counts.trained, 1.0))
    first = np.minimum(np.maximum(1 / gathers(layers), table), 1.0)
    behind = seconds * (1 - first)
    shown = np.maximum(behind - forward * (1 - rates.data_exposed), rates.data_exposed * behind)
    slowed = np.minimum(behind, forward) * rates.overlap_slowdown
    exposed: Array = seconds * first + np.minimum(shown + slowed, behind)
    return exposed


def buffer_bytes(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of gathered units in flight, and their shares in the parameters' type: the table and a layer, or two layers."""
    if not np.any(gathers_late(cases)):
        return np.zeros(1)
    layouts, layer = cases.layouts, layer_parameters(cases)
    layer_elements = (layer.attention + layer.dense) / layouts.tensor + own_experts(cases, layer)
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, _table(cases))
    units = np.minimum(np.maximum(IN_FLIGHT * layer_elements, layer_elements + table), parameter_counts.trained)
    cast = np.where(layouts.parameter_bytes < 4, 1 / layouts.shard, 0.0)
    return np.where(gathers_late(cases), units * layouts.parameter_bytes * (1 + cast), 0.0)


def refill_bytes(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of gathers of updated parameters in flight at the end of the update, for an engine that gathers in buckets; plus
    their shares in the parameters' type.
    """
    layouts = cases.layouts
    table = np.where(cases.shapes.frozen_bytes > 0, 0.0, np.minimum(_table(cases), parameter_counts.trained_tables))
    bucket_size = layouts.allgather_bucket_size
    elements = np.maximum(bucket_size, table) + np.where(layouts.overlap_comm > 0, IN_FLIGHT - 1, 0.0) * bucket_size
    cast = np.where(layouts.parameter_bytes < 4, 1 / layouts.shard, 0.0)
    gathered_bytes = np.minimum(elements, parameter_counts.trained) * layouts.parameter_bytes * (1 + cast)
    stages = (layouts.zero_stage == 1) | (layouts.zero_stage == 2)
    at_end = stages & (layouts.shard > 1) & ~gathers_late(cases) & (cases.software.waits_for_bucket > 0)
    return np.where(at_end, gathered_bytes, 0.0)


def _table(cases: Cases) -> Array:
    return cases.shapes.vocabulary * cases.shapes.hidden / cases.layouts.tensor


def saved_seconds(
    cases: Cases, rates: Coefficients, message: Array, rows: Sequence[tuple[Array, Array]], weights: Sequence[Array]
) -> Array:
    """Seconds of a layer's tensor communication saved per micro-batch; negative where more messages cost more.

    1. A row product is split into p parts, whose sums are p messages; all but the last overlap with later parts, so at most
       (p - 1) / p of the product can hide communication.
    2. The sum of a column product's input gradient overlaps with the weights' gradients.
    3. Computation is slowed by overlapping communication.
    4. Under sequence parallelism this applies to half of the volume: gathers are not overlapped.

    Args:
        cases: the configurations.
        rates: coefficients.
        message: bytes of a micro-batch's hidden state.
        rows: for each row product its seconds, and how often it is computed.
        weights: seconds of each gradient of column weights.
    """
    layouts, group, behind = cases.layouts, tensor_group(cases), (ROW_PARTS - 1) / ROW_PARTS
    share = np.where(layouts.sequence_parallel > 0, 0.5, 1.0)
    volume = 2 * (group.ranks - 1) / group.ranks * message
    whole = collective_seconds(cases, group, volume, np.ones(1), rates) * share
    parted = collective_seconds(cases, group, volume, np.full(1, float(ROW_PARTS)), rates) * share
    saved = np.zeros(1)
    for seconds, times in rows:
        hidden = np.minimum(parted, seconds) * behind * (1 - rates.overlap_slowdown)
        saved = saved + times * (hidden - (parted - whole))
    for seconds in weights:
        saved = saved + np.minimum(whole, seconds) * (1 - rates.overlap_slowdown)
    return np.where((layouts.async_tensor_parallel > 0) & (layouts.tensor > 1), saved, 0.0)


def on_device(cases: Cases, layers: Array, kept_bytes: Array, in_flight: Array) -> Array:
    """Bytes per token on the device, of those that all `layers` together keep, over all micro-batches awaiting backward."""
    if not np.any(cases.layouts.offload_activations > 0):
        return in_flight * kept_bytes
    # Of two layers: the running one, and the one whose copies are in flight.
    device_bytes = kept_bytes * np.minimum(2.0 / np.maximum(layers, 1.0), 1.0)
    return np.where(cases.layouts.offload_activations > 0, device_bytes, in_flight * kept_bytes)


def host_bytes(cases: Cases, layers: Array, kept_bytes: Array, in_flight: Array) -> Array:
    """Bytes on the host of a rank whose layers together keep `kept_bytes` bytes per token of a micro-batch."""
    if not np.any(cases.layouts.offload_activations > 0):
        return np.zeros(1)
    share = _copied_layers(cases, layers) / np.maximum(layers, 1.0)
    return cases.layouts.offload_activations * _tokens(cases) * in_flight * kept_bytes * share


def exposed_copy_seconds(cases: Cases, rates: Coefficients, layers: Array, kept_bytes: Array, pace: Array) -> Array:
    """Seconds of a step: the exposed part of copying a layer's `kept_bytes` bytes per token, out in forward, in for backward.

    `pace`: seconds of a micro-batch, forward and backward. Computation that hides communication does not also hide copies.
    """
    layouts = cases.layouts
    if not np.any(layouts.offload_activations > 0):
        return np.zeros(1)
    copied = _tokens(cases) * kept_bytes * _copied_layers(cases, layers) / cases.hardware.host_link
    forward = pace / (1 + rates.backward_ratio)
    # From the fifth schedule on, gradients of inputs and of weights are computed separately, so that backward reads all twice.
    split = (layouts.pipeline > 1) & (layouts.pipeline_schedule >= 4)
    back, backward = copied * np.where(split, 2.0, 1.0), pace - forward
    sends = np.where(layouts.data * layouts.context > 1, 1.0, 0.0)
    once, at_three = 1 / np.maximum(layouts.accumulation, 1.0), layouts.zero_stage == 3
    gathers = sends * np.where(at_three, 1.0, np.where(gathers_late(cases), once, 0.0))
    reduces = sends * np.where(at_three | ((layouts.zero_stage == 2) & (layouts.defer_gradient_reduction == 0)), 1.0, once)
    shown = _shown(rates, copied, forward, gathers) + _shown(rates, back, backward, reduces)
    slowed = (np.minimum(copied, forward) + np.minimum(back, backward)) * rates.overlap_slowdown
    exposed: Array = layouts.offload_activations * layouts.accumulation * (shown + slowed)
    return exposed


def _shown(rates: Coefficients, copied: Array, computing: Array, shared: Array) -> Array:
    """The exposed part of copies if communication uses the computation of a share of the micro-batches."""
    unhidden = np.maximum(copied - computing * np.minimum(rates.data_exposed, 1.0), 0.0)
    shown: Array = shared * unhidden + (1 - shared) * np.maximum(copied - computing, 0.0)
    return shown


def _copied_layers(cases: Cases, layers: Array) -> Array:
    """Number of layers that are copied. Without a pipeline the last layer's stay: its backward follows at once."""
    return np.maximum(layers - np.where(cases.layouts.pipeline == 1, 1.0, 0.0), 0.0)


def _tokens(cases: Cases) -> Array:
    return cases.layouts.micro_batch_size * cases.shapes.sequence / cases.layouts.context
