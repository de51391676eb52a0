"""Seconds of an update on the device: bytes moved by each optimizer, and Muon's additional computation and communication."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import collective_seconds, shard_group, tensor_group
from search_spaces.optimizers import DEVICE_CHUNK_ELEMENTS

MOVED = {"adamw": 38.0, "sgd": 30.0, "lamb": 128.0, "muon": 62.0, "adamw8bit": 200.0, "onebit_adam": 190.0}
"""Bytes that an update moves per parameter: fused AdamW 28, SGD 20; for the others, reads and writes of the engine's unfused
operators. Each includes 2 for the copy in the precision and 8 for norm and clipping."""
PROJECTIONS = 4.0
"""Matrices of a layer's attention."""
ROUNDS = 5
"""Iterations of the orthogonalisation: three products each."""


def update_seconds(cases: Cases, rates: Coefficients, local: Array, layers: Array) -> Array:
    """Seconds for a rank that updates `local` parameters on the device, in a stage with `layers` layers."""
    moved = local * cases.layouts.update_bytes / (cases.hardware.bandwidth * rates.update_efficiency)
    if np.any(cases.layouts.updates_pieces):
        # Never of two parameters. Each has about the operators of a layer's forward: 1 ms on an H200
        # (docs/results/gpu-findings.md).
        pieces = local / DEVICE_CHUNK_ELEMENTS + layers * (PROJECTIONS + cases.shapes.matrices)
        moved = np.maximum(moved, cases.layouts.updates_pieces * pieces * rates.kernel_seconds)
    if not np.any(cases.layouts.orthogonalizes):  # true for most spaces: skips computation over millions of layouts
        return moved
    return moved + np.where(cases.layouts.orthogonalizes > 0, layers * _orthogonal_seconds(cases, rates), 0.0)


def _orthogonal_seconds(cases: Cases, rates: Coefficients) -> Array:
    """Seconds per layer: its matrices are distributed over the ranks that share them, orthogonalised, and the shares sent back.

    Each tensor rank gathers all slices and processes the whole matrix, of experts all slices of the ranks that divide each.
    """
    layouts, shards, slices = cases.layouts, shard_group(cases), tensor_group(cases)
    seconds = np.zeros(1)
    for count, rows, columns in _matrices(cases):
        short, long = np.minimum(rows, columns), np.maximum(rows, columns)
        flops = count * ROUNDS * (4 * short**2 * long + 2 * short**3)
        owners = np.where(layouts.zero_stage > 0, layouts.shard, 1.0)
        size = count * rows * columns * 2.0 / owners  # two bytes per element are sent
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
    """The matrices of a layer: (number, rows, columns) of each shape."""
    shapes = cases.shapes
    experts = np.maximum(shapes.experts, 1.0) / cases.layouts.expert
    return (
        (2 * np.ones(1), shapes.hidden, shapes.query),
        (2 * np.ones(1), shapes.hidden, shapes.key_value),
        (shapes.matrices * experts, shapes.hidden, shapes.ffn),
    )
