"""Quantised frozen parameters: their size, and the cost of dequantising them."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.parameters import StageParameters, is_quantised, layer_parameters

INDEX_BYTES = 2
"""Bytes per four-bit element: an int32 for every two, as an index into the table of their values."""


def frozen_width(cases: Cases) -> Array:
    """Bytes per element of a layer's matrices: frozen ones in their bits and scales, trained ones in the precision."""
    return np.where(cases.shapes.frozen_bytes > 0, cases.shapes.frozen_bytes, cases.layouts.parameter_bytes)


def frozen_bytes(cases: Cases, held: StageParameters) -> Array:
    """Bytes of a stage's frozen parameters on a rank before sharding. Tables are not quantised."""
    width, whole = frozen_width(cases), cases.layouts.parameter_bytes
    return (held.frozen - held.frozen_tables) * width + held.frozen_tables * whole


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
    return np.where(cases.shapes.frozen_bytes < 1, float(INDEX_BYTES), 0.0)
