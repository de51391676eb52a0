"""Products in 8 bits on the native engine: what rounding their operands takes and costs (`executor.parallel.float8`)."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.parameters import layer_parameters
from autotune.prediction.equations.schedules import trained_tokens
from search_spaces.float8 import FLOAT8
from search_spaces.trial_config import TrialConfig

APART, FUSED = 5.0, 1.0
"""Bytes that a number takes while it is rounded: in fp32 and in 8 bits where operators run apart, compiled in 8 bits alone."""
ROUNDED = 2.0 + 6.0 + 5.0
"""Bytes moved to round a bf16 number so: its magnitude is read, fp32 written, read again and rounded."""
TURNED = 2.0
"""Bytes moved to lay one of 8 bits in the other order, as gradients of inputs and of weights need theirs."""


def rounding_bytes(config: TrialConfig) -> float:
    """Of `Layouts.rounding_bytes`."""
    if config.precision != FLOAT8:
        return 0.0
    return FUSED if config.compile_blocks else APART


def rounded_bytes(cases: Cases) -> Array:
    """Bytes that the largest product of a layer takes for a while: one operand is there in 8 bits, the other is rounded."""
    shapes, layouts = cases.shapes, cases.layouts
    wide = np.maximum(shapes.ffn, shapes.query) / layouts.tensor
    rows = layouts.micro_batch * trained_tokens(cases) / layouts.context * np.maximum(shapes.hidden, wide)
    matrix, rounding = shapes.hidden * wide, layouts.rounding_bytes
    return np.where(rounding > 0, np.maximum(rounding * rows + matrix, rows + rounding * matrix), 0.0)


def rounding_seconds(cases: Cases, tokens: Array) -> Array:
    """Seconds in which one micro-batch's passes through a layer round operands, beyond what `FP8_GAIN` has of compiled ones.

    Forward rounds inputs and weights; backward both again, laid in the other order, and gradients of outputs in either order.
    A layer that is computed again rounds the first ones again.
    """
    shapes, layouts, layer = cases.shapes, cases.layouts, layer_parameters(cases)
    matrices = (layer.attention + np.where(shapes.experts > 0, layer.experts, layer.dense)) / layouts.tensor
    fan_in, routed = shapes.matrices - 1, np.maximum(shapes.experts_per_token, 1)
    inputs = (3 + fan_in * routed) * shapes.hidden + (shapes.query + shapes.ffn * routed) / layouts.tensor
    results = (shapes.query + 2 * shapes.key_value + fan_in * shapes.ffn * routed) / layouts.tensor
    results = results + (1 + routed) * shapes.hidden
    again = np.where(layouts.recompute > 0, 1.0, 0.0) / layouts.recompute_every
    operands = matrices + tokens * inputs
    moved = (2 + again) * operands * ROUNDED + operands * TURNED + tokens * results * (ROUNDED + TURNED)
    return np.where(layouts.rounding_bytes == APART, moved / cases.hardware.bandwidth, 0.0)
