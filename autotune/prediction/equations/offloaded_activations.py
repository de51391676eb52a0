"""Activations saved for backward in host memory (`offload_activations`): bytes on both sides, and the cost of copies."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.overlap_param_gather import gathers_late

AT_ONCE = 2.0
"""Layers whose activations are on the device: the running one, and the one whose copies are in flight."""
SPLIT_BACKWARD = 4
"""The first of the schedules that compute gradients of inputs and of weights separately, so that backward reads all twice."""


def on_device(cases: Cases, layers: Array, kept: Array, in_flight: Array) -> Array:
    """Bytes per token on the device, of those that all `layers` together keep, over all micro-batches awaiting backward."""
    if not np.any(cases.layouts.offload_activations > 0):
        return in_flight * kept
    near = kept * np.minimum(AT_ONCE / np.maximum(layers, 1.0), 1.0)
    return np.where(cases.layouts.offload_activations > 0, near, in_flight * kept)


def host_bytes(cases: Cases, layers: Array, kept: Array, in_flight: Array) -> Array:
    """Bytes on the host of a rank whose layers together keep `kept` bytes per token of a micro-batch."""
    if not np.any(cases.layouts.offload_activations > 0):
        return np.zeros(1)
    share = _copied_layers(cases, layers) / np.maximum(layers, 1.0)
    return cases.layouts.offload_activations * _tokens(cases) * in_flight * kept * share


def exposed_seconds(cases: Cases, rates: Coefficients, layers: Array, kept: Array, pace: Array) -> Array:
    """Seconds of a step: the exposed part of copying a layer's `kept` bytes per token, out in forward, in for backward.

    `pace`: seconds of a micro-batch, forward and backward. Computation that hides communication does not also hide copies.
    """
    layouts = cases.layouts
    if not np.any(layouts.offload_activations > 0):
        return np.zeros(1)
    copied = _tokens(cases) * kept * _copied_layers(cases, layers) / cases.hardware.host_link
    forward = pace / (1 + rates.backward_ratio)
    split = (layouts.pipeline > 1) & (layouts.pipeline_schedule >= SPLIT_BACKWARD)
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
    left = np.maximum(copied - computing * np.minimum(rates.data_exposed, 1.0), 0.0)
    shown: Array = shared * left + (1 - shared) * np.maximum(copied - computing, 0.0)
    return shown


def _copied_layers(cases: Cases, layers: Array) -> Array:
    """Number of layers that are copied. Without a pipeline the last layer's stay: its backward follows at once."""
    return np.maximum(layers - np.where(cases.layouts.pipeline == 1, 1.0, 0.0), 0.0)


def _tokens(cases: Cases) -> Array:
    return cases.layouts.micro_batch_size * cases.shapes.sequence / cases.layouts.context
