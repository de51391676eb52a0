"""Bytes that operators between products move in a layer of Transformers, and what adapters and quantised matrices add.

Counted per token from the operators that the source runs one by one (as `equations.transformers`): what each reads and writes.
"""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.software import NO_BITS
from autotune.prediction.equations.transformers import Replica

OPERATORS = 30.0
"""Of a layer's forward whose launches take `Coefficients.kernel_seconds`."""
WITHOUT_TENSOR_CORES = 16.0
"""Peak of products in 16 bits, relative to those in fp32 without tensor cores: of an A100, and about that of others."""


def layer_traffic(cases: Cases) -> tuple[Array, Array]:
    """Bytes per token of a layer's forward and of its backward.

    - Residuals: two sums, and as many of gradients.
    - Norms: 4 bytes an element in one kernel, 6 in backward. Eager ones: a copy in fp32, its square, their mean, the product
      with its root, the copy back, and the product with the weight; in backward each of them again, in fp32.
    - Rotations: one pass in a kernel; else products with cosines and sines, halves that are negated and joined, and their sum.
    - The MLP: the activation and the product of its factors; the rows of experts are taken, weighed and added up.
    """
    shapes, layer = cases.shapes, Replica(cases)
    h, w, s = shapes.hidden, layer.inner, layer.state
    norm = np.where(layer.fused_norms, 2 * s, 4.0 * (4 + 3) + np.where(layer.wide, 4.0, 8.0))
    norm_backward = np.where(layer.fused_norms, 3 * s, 4.0 * 13 + np.where(layer.wide, 4.0, 8.0))
    rotation = np.where(layer.fused_norms, 2 * w, 10 * w) * (shapes.query + shapes.key_value)
    gated = shapes.matrices == 3
    fused = layer.gates > 0
    mlp = np.where(gated, np.where(fused, 3.0, 5.0), 2.0) * w * shapes.mlp_width
    mlp_backward = np.where(gated, np.where(fused, 5.0, 9.0), 3.0) * w * shapes.mlp_width
    rows = np.where(shapes.experts > 0, shapes.routed, 0.0) * h * layer.width
    forward = 6 * s * h + 2 * norm * h + rotation + mlp + 7 * rows
    backward = 6 * s * h + 2 * norm_backward * h + rotation + mlp_backward + 10 * rows
    inputs, outputs = _adapted_widths(layer)
    dropout = cases.transformers.adapter_dropout
    half = layer.adapter_width <= layer.width
    casts = cases.transformers.autocast > 0
    fused = cases.transformers.fused_adapters > 0
    # Of an adapter's input and of its result, which the matrix's is added to.
    by_input = np.select([fused | half, casts], [2 + 5 * dropout, 14 + 9 * dropout], default=10 + 9 * dropout)
    by_output = np.select([fused, casts | half], [8.0, 12.0], default=28.0)
    input_backward = np.select([fused, half, casts], [20.0, 10 + 5 * dropout, 22 + 9 * dropout], default=20 + 9 * dropout)
    output_backward = np.select([fused, casts | half], [6.0, 8.0], default=22.0)
    forward = forward + by_input * inputs + by_output * outputs
    backward = backward + input_backward * inputs + output_backward * outputs
    # bitsandbytes casts what it gets and returns the type of that.
    widths = 4 * h + 2 * shapes.query + 2 * shapes.key_value + 3 * shapes.mlp_width
    converted = np.where(layer.converts, 6.0, 0.0) * widths
    return forward + converted, backward + converted


def _adapted_widths(layer: Replica) -> tuple[Array, Array]:
    """Elements of the inputs, and of the results, of the matrices of a layer that have adapters."""
    shapes, adapts = layer.shapes, layer.adapts
    h, ffn = shapes.hidden, shapes.mlp_width
    inputs = adapts("query", "key", "value", "gate", "up") * h + adapts("output") * shapes.query + adapts("down") * ffn
    keys = adapts("key", "value") * shapes.key_value
    return inputs, adapts("query") * shapes.query + keys + adapts("output", "down") * h + adapts("gate", "up") * ffn


def added_seconds(cases: Cases) -> Array:
    """Seconds of a layer and micro-batch in which quantised matrices are dequantised, for each product with them, and in which
    adapters in fp32 are multiplied outside of autocast, without tensor cores."""
    layer = Replica(cases)
    passes = 2 + layer.recomputed
    matrices = np.where(layer.words.bits > NO_BITS, layer.counts.frozen - layer.counts.frozen_tables, 0.0)
    # Operators of torch: 32 bits for each value, which are cast to 8, masked, shifted by the zeros and scaled.
    element = np.where(layer.words.torch_unpacking > 0, 4 + 4 + 1 + 2 + 2 + 1 + layer.width, 0.5 + layer.width)
    unpacked = passes * matrices / cases.shapes.layers * element / cases.hardware.bandwidth
    inputs, outputs = _adapted_widths(layer)
    rank = layer.counts.trained / cases.shapes.layers / np.maximum(inputs + outputs, 1.0)
    whole = layer.frozen & (layer.words.autocast == 0) & (layer.adapter_width >= 4) & (layer.words.fused_adapters == 0)
    products = np.where(whole, 2 * (2 + passes) * layer.tokens * rank * (inputs + outputs), 0.0)
    return unpacked + products / (cases.hardware.peak / WITHOUT_TENSOR_CORES)


def added_launches(cases: Cases) -> Array:
    """Operators that a layer's forward has beyond those of one with fused norms and rotations, as a multiple of its: eager
    norms have six more each, rotations eight, an adapter seven, with its casts."""
    layer = Replica(cases)
    count = layer.adapts("query", "key", "value", "output", "gate", "up", "down")
    adapters = np.where(layer.words.fused_adapters > 0, 2.0, np.where(layer.adapter_width <= layer.width, 4.0, 7.0)) * count
    return (np.where(layer.fused_norms, 0.0, 20.0) + adapters) / OPERATORS
