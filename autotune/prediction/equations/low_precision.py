"""Numbers of low precision: products in 8 bits on the native engine, and quantised frozen parameters."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.parameters import StageParameters, is_quantised, layer_parameters
from autotune.prediction.equations.schedules import trained_tokens
from search_spaces.knob import Value

SEPARATE, FUSED = 5.0, 1.0
"""Temporary bytes per number during rounding: fp32 and 8 bits with separate operators, only 8 bits if compiled."""
ROUNDED = 2.0 + 6.0 + 5.0
"""Bytes moved to round a bf16 number with separate operators: its magnitude is read, fp32 written, read again and rounded."""
TURNED = 2.0
"""Bytes moved to transpose an 8-bit number, as gradients of inputs and of weights require."""


def rounding_bytes(compiled: Value) -> float:
    """The value of `Layouts.rounding_bytes` of products in 8 bits, by `compile_blocks`."""
    return FUSED if compiled else SEPARATE


def rounded_bytes(cases: Cases) -> Array:
    """Temporary bytes of the largest product of a layer: one operand exists in 8 bits while the other is rounded."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(layouts.rounding_bytes > 0):
        return np.zeros(1)
    wide = np.maximum(shapes.ffn, shapes.query) / layouts.tensor
    rows = layouts.micro_batch_size * trained_tokens(cases) / layouts.context * np.maximum(shapes.hidden, wide)
    matrix, rounding = shapes.hidden * wide, layouts.rounding_bytes
    return np.where(rounding > 0, np.maximum(rounding * rows + matrix, rows + rounding * matrix), 0.0)


def rounding_seconds(cases: Cases, tokens: Array) -> Array:
    """Seconds per micro-batch to round a layer's operands, beyond what `FP8_GAIN` includes for compiled ones.

    Forward rounds inputs and weights; backward rounds both again, transposed, and gradients of outputs in both orders. A
    recomputed layer repeats the forward part.
    """
    if not np.any(cases.layouts.rounding_bytes == SEPARATE):
        return np.zeros(1)
    shapes, layouts, layer = cases.shapes, cases.layouts, layer_parameters(cases)
    matrices = layer.attention / layouts.tensor
    matrices = matrices + np.where(shapes.experts > 0, layer.experts / layouts.expert_tensor, layer.dense / layouts.tensor)
    fan_in, routed = shapes.matrices - 1, shapes.routed
    inputs = (3 + fan_in * routed) * shapes.hidden + (shapes.query + shapes.mlp_width) / layouts.tensor
    results = (shapes.query + 2 * shapes.key_value + fan_in * shapes.mlp_width) / layouts.tensor
    results = results + (1 + routed) * shapes.hidden
    again = np.where(layouts.activation_checkpointing > 0, 1.0, 0.0) / layouts.checkpoint_every_k
    operands = matrices + tokens * inputs
    moved = (2 + again) * operands * ROUNDED + operands * TURNED + tokens * results * (ROUNDED + TURNED)
    return np.where(layouts.rounding_bytes == SEPARATE, moved / cases.hardware.bandwidth, 0.0)


def frozen_width(cases: Cases) -> Array:
    """Bytes per element of a layer's matrices: frozen ones in their bits and scales, trained ones in the precision."""
    return np.where(cases.shapes.frozen_bytes > 0, cases.shapes.frozen_bytes, cases.layouts.parameter_bytes)


def frozen_bytes(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of a stage's frozen parameters on a rank before sharding. Tables are not quantised."""
    width, whole = frozen_width(cases), cases.layouts.parameter_bytes
    return (parameter_counts.frozen - parameter_counts.frozen_tables) * width + parameter_counts.frozen_tables * whole


def unpacked_bytes(cases: Cases) -> Array:
    """Temporary bytes to dequantise the largest matrix of a layer."""
    shapes, layouts = cases.shapes, cases.layouts
    largest = shapes.hidden * np.maximum(shapes.ffn, shapes.query) / layouts.tensor
    return np.where(_unpacks(cases), largest * (layouts.parameter_bytes + _index_bytes(cases)), 0.0)


def unpacking_seconds(cases: Cases) -> Array:
    """Seconds per micro-batch to dequantise a layer's matrices: forward, backward, and recomputation.

    Codes are read; for four bits indices are written and read; values are written, read, scaled and written.
    """
    layouts, layer = cases.layouts, layer_parameters(cases)
    elements = (layer.attention + np.where(cases.shapes.experts > 0, layer.experts, layer.dense)) / layouts.tensor
    moved = cases.shapes.frozen_bytes + 2 * _index_bytes(cases) + 3 * layouts.parameter_bytes
    passes = 2.0 + np.where(layouts.activation_checkpointing > 0, 1.0, 0.0) / layouts.checkpoint_every_k
    return np.where(_unpacks(cases), passes * elements * moved / cases.hardware.bandwidth, 0.0)


def _unpacks(cases: Cases) -> Flags:
    unpacks: Flags = is_quantised(cases) & (cases.software.unpacks > 0)
    return unpacks


def _index_bytes(cases: Cases) -> Array:
    # Per four-bit element: an int32 for every two, as an index into the table of their values.
    return np.where(cases.shapes.frozen_bytes < 1, 2.0, 0.0)
