"""What blocks save for backward in host memory (`offload_activations`): bytes on either side, and what copies cost."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.overlap_param_gather import gathers_late

AT_ONCE = 2.0
"""Layers whose activations are on the device: the one that runs, and the one whose copies leave or come beside it."""
SPLIT_BACKWARD = 4
"""The first of the schedules that make gradients of inputs and of weights apart, so that backward reads everything twice."""


def on_device(cases: Cases, layers: Array, kept: Array, in_flight: Array) -> Array:
    """Of the bytes a token that all `layers` together keep, those on the device, of all micro-batches whose backward is to
    come.
    """
    near = kept * np.minimum(AT_ONCE / np.maximum(layers, 1.0), 1.0)
    return np.where(cases.layouts.offload_activations > 0, near, in_flight * kept)


def host_bytes(cases: Cases, layers: Array, kept: Array, in_flight: Array) -> Array:
    """Of a rank, whose layers together keep so many bytes a token of a micro-batch."""
    share = _leaving(cases, layers) / np.maximum(layers, 1.0)
    return cases.layouts.offload_activations * _tokens(cases) * in_flight * kept * share


def exposed_seconds(cases: Cases, rates: Coefficients, layers: Array, kept: Array, pace: Array) -> Array:
    """Of a step: what neither pass hides of the copies of a layer's `kept` bytes a token, out in forward, in for backward.

    `pace`: seconds of a micro-batch, forward and backward. What hides communication does not hide copies as well.
    """
    layouts = cases.layouts
    copied = _tokens(cases) * kept * _leaving(cases, layers) / cases.hardware.host_link
    forward = pace / (1 + rates.backward_ratio)
    split = (layouts.pipeline > 1) & (layouts.schedule >= SPLIT_BACKWARD)
    back, backward = copied * np.where(split, 2.0, 1.0), pace - forward
    sends = np.where(layouts.data * layouts.context > 1, 1.0, 0.0)
    once, at_three = 1 / np.maximum(layouts.accumulation, 1.0), layouts.zero_stage == 3
    gathers = sends * np.where(at_three, 1.0, np.where(gathers_late(cases), once, 0.0))
    reduces = sends * np.where(at_three | ((layouts.zero_stage == 2) & (layouts.defer == 0)), 1.0, once)
    shown = _shown(rates, copied, forward, gathers) + _shown(rates, back, backward, reduces)
    slowed = (np.minimum(copied, forward) + np.minimum(back, backward)) * rates.overlap_slowdown
    exposed: Array = layouts.offload_activations * layouts.accumulation * (shown + slowed)
    return exposed


def _shown(rates: Coefficients, copied: Array, computing: Array, shared: Array) -> Array:
    """What computation does not hide, where it hides communication in a share of the micro-batches, and copies in its place."""
    left = np.maximum(copied - computing * np.minimum(rates.data_exposed, 1.0), 0.0)
    shown: Array = shared * left + (1 - shared) * np.maximum(copied - computing, 0.0)
    return shown


def _leaving(cases: Cases, layers: Array) -> Array:
    """Without a pipeline the last layer's stay: its backward follows at once."""
    return np.maximum(layers - np.where(cases.layouts.pipeline == 1, 1.0, 0.0), 0.0)


def _tokens(cases: Cases) -> Array:
    return cases.layouts.micro_batch * cases.shapes.sequence / cases.layouts.context
