"""Blocks as CUDA graphs (`cuda_graphs`): remaining launches, copies into static buffers, and their own memory."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Layouts
from autotune.prediction.equations.parameters import layer_parameters
from autotune.prediction.equations.schedules import trained_tokens

FORWARD_LEFT = 0.1
"""Share of a layer's forward launches that remains: about twenty kernels become a copy of the input and one graph."""
BACKWARD_LEFT = 0.25
"""In backward: about forty become a copy, the graph, and a copy of each of about nine gradients out of static buffers."""
STATIC_MESSAGES = 3.0
"""Hidden states that a layer's graphs keep besides those saved for backward: its result (which is copied to the next layer's
input), and the gradients of its result and of its input."""


def launches(cases: Cases, backward_ratio: float) -> Array:
    """Launches of a layer's forward and backward, as a multiple of those of a forward."""
    left = FORWARD_LEFT + BACKWARD_LEFT * backward_ratio
    return np.where(cases.layouts.cuda_graphs > 0, left, 1 + backward_ratio)


def copy_seconds(cases: Cases) -> Array:
    """Seconds per layer and micro-batch: its input and the gradient of its result are each read and written."""
    return cases.layouts.cuda_graphs * 4 * _message(cases) / cases.hardware.bandwidth


def shared_memory(layouts: Layouts) -> Array:
    """1 if a layer's working memory is shared with what follows. 0: graphs have a memory pool of their own, so that it coexists
    with the logits and stays to the end."""
    return 1 - layouts.cuda_graphs


def static_gradients(cases: Cases, layers: Array) -> Array:
    """Bytes of the static buffers for gradients of the layers' parameters."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(layouts.cuda_graphs > 0):
        return np.zeros(1)
    layer = layer_parameters(cases)
    adapters = shapes.adapter + shapes.adapter_divided / layouts.tensor
    trained = np.where(shapes.frozen_bytes > 0, adapters, (layer.attention + layer.dense) / layouts.tensor)
    return layouts.cuda_graphs * layers * trained * layouts.parameter_bytes


def static_messages(cases: Cases, layers: Array) -> Array:
    """Bytes of the static buffers for hidden states and their gradients."""
    return cases.layouts.cuda_graphs * layers * STATIC_MESSAGES * _message(cases)


def _message(cases: Cases) -> Array:
    layouts = cases.layouts
    return layouts.micro_batch_size * trained_tokens(cases) / layouts.context * cases.shapes.hidden * layouts.parameter_bytes
