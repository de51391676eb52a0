"""Seconds of an update on the device: what each optimizer moves, and what Muon computes and sends besides."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import collective_seconds, shard_group, tensor_group

MOVED = {"adamw": 38.0, "sgd": 30.0, "lamb": 128.0, "muon": 62.0, "adamw8bit": 200.0, "onebit_adam": 190.0}
"""Bytes that an update moves for a parameter: fused AdamW 28, SGD 20; the others what the engine's operations one by one read
and write. With each 2 for the copy in the precision and 8 for norm and clipping."""
SENT_BYTES = 2.0
"""Of an element that Muon sends."""
ROUNDS = 5
"""Of the iteration that makes a matrix orthogonal: three products each."""


def update_seconds(cases: Cases, rates: Coefficients, local: Array, layers: Array) -> Array:
    """Of a rank that updates so many parameters on the device, of a stage with so many layers."""
    moved = local * cases.layouts.update_bytes / (cases.hardware.bandwidth * rates.update_efficiency)
    if not np.any(cases.layouts.orthogonalizes):  # in most spaces, whose millions of layouts need not be asked
        return moved
    return moved + np.where(cases.layouts.orthogonalizes > 0, layers * _orthogonal_seconds(cases, rates), 0.0)


def _orthogonal_seconds(cases: Cases, rates: Coefficients) -> Array:
    """Of a layer: its matrices dealt out to the ranks that share them, made orthogonal there, and their shares sent back.

    Slices of tensor ranks are gathered by each, who all do the whole matrix.
    """
    layouts, shards, slices = cases.layouts, shard_group(cases), tensor_group(cases)
    seconds = np.zeros(1)
    for count, rows, columns in _matrices(cases):
        short, long = np.minimum(rows, columns), np.maximum(rows, columns)
        flops = count * ROUNDS * (4 * short**2 * long + 2 * short**3)
        owners = np.where(layouts.zero_stage > 0, layouts.shard, 1.0)
        size = count * rows * columns * SENT_BYTES / owners
        shared = 2 * size / layouts.tensor * (owners - 1) / owners
        sliced = size * (layouts.tensor - 1) / layouts.tensor
        seconds = (
            seconds
            + flops / owners / (cases.hardware.peak * rates.matrix_efficiency)
            + np.where(
                shared > 0, collective_seconds(cases, shards, shared, 2 / np.maximum(cases.shapes.layers, 1), rates), 0.0
            )
            + collective_seconds(cases, slices, sliced, count / owners, rates)
        )
    return seconds


def _matrices(cases: Cases) -> tuple[tuple[Array, Array, Array], ...]:
    """Of a layer: how many of each shape."""
    shapes = cases.shapes
    experts = np.maximum(shapes.experts, 1.0) / cases.layouts.expert
    return (
        (2 * np.ones(1), shapes.hidden, shapes.query),
        (2 * np.ones(1), shapes.hidden, shapes.key_value),
        (shapes.matrices * experts, shapes.hidden, shapes.ffn),
    )
