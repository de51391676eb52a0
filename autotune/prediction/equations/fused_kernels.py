"""Fused kernels (`fused_kernels`): bytes moved and kept, by the sources of liger_kernel 0.8.5 and Transformer Engine 2.

A profile's `elementwise` is a multiple of the traffic of fused kernels: for a part that is fused, the multiple is 1.
"""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from search_spaces.kernels import KERNEL_CHOICES, LIGER, TRANSFORMER_ENGINE

ACCUMULATED = 4.0
"""Bytes per element in which Liger accumulates the gradient of the output projection over pieces of the rows."""
GATED_KEPT = 0.75
"""Share of a gated hidden layer kept relative to torch's operators: gate, hidden and their product, not the activated gate."""
_LIGER, _ENGINE = (float(KERNEL_CHOICES.index(name)) for name in (LIGER, TRANSFORMER_ENGINE))


def norms_fused(cases: Cases) -> Flags:
    """Whether each norm is a single kernel: Liger has RMSNorm, Transformer Engine both."""
    kernels = cases.layouts.fused_kernels
    fused: Flags = (kernels == _ENGINE) | ((kernels == _LIGER) & (cases.shapes.rms_norm > 0))
    return fused


def gates_fused(cases: Cases) -> Flags:
    """Whether Liger's kernel computes the gated activation."""
    fused: Flags = (cases.layouts.fused_kernels == _LIGER) & (cases.shapes.silu_gated > 0)
    return fused


def rotations_fused(cases: Cases) -> Flags:
    """Whether Liger's kernel applies rotary positions."""
    fused: Flags = (cases.layouts.fused_kernels == _LIGER) & (cases.shapes.rotates_whole > 0)
    return fused


def loss_fused(cases: Cases) -> Flags:
    """Whether Liger fuses the output projection with the loss: only if a rank has the whole vocabulary."""
    fused: Flags = (cases.layouts.fused_kernels == _LIGER) & (cases.layouts.tensor == 1)
    return fused


def moved_elements(cases: Cases, hidden_layer: Array, norms: Array, rotations: Array) -> Array:
    """Elements that a layer moves; each part that is not fused, by a kernel or by compilation, counts times the profile's
    multiple."""
    multiple = np.where(cases.layouts.compiled > 0, np.minimum(cases.software.elementwise, 1.0), cases.software.elementwise)
    parts = ((hidden_layer, gates_fused(cases)), (norms, norms_fused(cases)), (rotations, rotations_fused(cases)))
    moved = np.zeros(1)
    for elements, fused in parts:
        moved = moved + elements * np.where(fused, 1.0, multiple)
    return moved


def norm_extra(cases: Cases) -> Array:
    """Bytes kept per element beyond the inputs of norms; fused kernels and compiled blocks keep only a few numbers per row."""
    return np.where(norms_fused(cases) | (cases.layouts.compiled > 0), 0.0, cases.software.norm_extra)


def mlp_bytes(cases: Cases) -> Array:
    """Bytes kept per element of the MLP's hidden layer. Compiled blocks compute the activated gate again, too: on an H200 they
    kept 0.86 to 0.88 of the activations of a llama, which is the share without it (docs/gpu-findings.md)."""
    fused = gates_fused(cases) | ((cases.layouts.compiled > 0) & (cases.shapes.matrices == 3))
    return cases.software.mlp_bytes * np.where(fused, GATED_KEPT, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The number of pieces, and rows per piece, in which Liger computes logits."""

    rows: Array
    times: Array


def pieces(cases: Cases, rows: Array) -> Pieces:
    """The number of rows for which the logits are about as many as the elements of all rows, rounded to a power of two [0.8.5,
    ops/fused_linear_cross_entropy.py].
    """
    shapes = cases.shapes
    wide = np.ceil(shapes.vocabulary / shapes.hidden)
    at_once = np.minimum(2.0 ** np.ceil(np.log2(np.ceil(np.maximum(rows / wide, 1.0)))), np.maximum(rows, 1.0))
    return Pieces(rows=at_once, times=np.ceil(rows / at_once))


def loss_moved(cases: Cases, rows: Array) -> Array:
    """Bytes that forward and backward of the loss move besides products: logits are read twice and overwritten once, and each
    piece is added to the gradient of the weight, if that is trained.
    """
    shapes, width = cases.shapes, cases.layouts.parameter_bytes
    added = 2 * ACCUMULATED * pieces(cases, rows).times * shapes.vocabulary * shapes.hidden * trained_head(cases)
    return 3 * width * rows * shapes.vocabulary + added


def loss_kept(cases: Cases, rows: Array) -> Array:
    """Bytes of gradients kept from the loss's forward until its backward: of the rows and of the weight."""
    shapes = cases.shapes
    return cases.layouts.parameter_bytes * shapes.hidden * (rows + shapes.vocabulary * trained_head(cases))


def loss_peak(cases: Cases, rows: Array) -> Array:
    """Bytes at the peak of its forward: logits of a piece, gradients, and, if the type of accumulation differs, the weight's
    gradient in that type.
    """
    shapes, width = cases.shapes, cases.layouts.parameter_bytes
    summed = np.where(width < ACCUMULATED, ACCUMULATED, 0.0) * shapes.vocabulary * shapes.hidden * trained_head(cases)
    return pieces(cases, rows).rows * shapes.vocabulary * width + loss_kept(cases, rows) + summed


def trained_head(cases: Cases) -> Array:
    """1 if the output projection is trained, 0 if it is frozen beside adapters."""
    return np.where(cases.shapes.frozen_bytes > 0, 0.0, 1.0)
