"""Seconds of a micro-batch of a user's module, from the products, the bytes and the operators that its profile counts."""

import numpy as np

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.kernels import LAYER_KERNELS, SMALLEST_KERNEL, product_seconds, smooth_maximum
from search_spaces.models.module_profile import Affine, BlockWork, MatrixProduct, Work


def module_seconds(cases: Cases, rates: Coefficients) -> Array:
    """Seconds of forward and backward of a micro-batch on one rank that holds the whole module, recomputation included.

    Each part of the module takes its products by their shapes, attention by its kernel, and the bytes of all other operators;
    or as long as launching its operators. Tensor-parallel ranks divide all of it.
    """
    module = cases.described
    trace, layouts = module.trace, cases.layouts
    total = _part(cases, rates, trace.outer)
    for work, count in _alike(trace.blocks):
        total = total + count * _part(cases, rates, work)
    again = np.zeros(1)
    for policy, name in enumerate(RECOMPUTE):
        if name in trace.again:
            chosen = layouts.activation_checkpointing == policy
            again = again + np.where(chosen, _again(cases, rates, name), 0.0)
    return (total + again / layouts.checkpoint_every_k) / layouts.tensor


def _alike(blocks: tuple[BlockWork, ...]) -> list[tuple[BlockWork, int]]:
    """Equal blocks counted, in order."""
    counts: dict[BlockWork, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    return [*counts.items()]


def _part(cases: Cases, rates: Coefficients, work: BlockWork) -> Array:
    ratio = rates.backward_ratio / 2
    return _seconds(cases, rates, work.forward) + ratio * _seconds(cases, rates, work.backward)


def _seconds(cases: Cases, rates: Coefficients, work: Work) -> Array:
    hardware = cases.hardware
    computed = np.zeros(1)
    for product in work.products:
        computed = computed + product.count * _product(cases, rates, product)
    speed = hardware.peak * rates.attention_efficiency * cases.software.attention_speed
    computed = computed + _at(cases, work.attention_flops) / speed
    computed = computed + _at(cases, work.moved_bytes) * rates.traffic / hardware.bandwidth
    computed = computed + work.operators * SMALLEST_KERNEL
    launched = np.full(1, work.operators * rates.kernel_seconds / LAYER_KERNELS)
    return np.asarray(smooth_maximum(np.maximum(computed, 0.0), launched), dtype=np.float64)


def _product(cases: Cases, rates: Coefficients, product: MatrixProduct) -> Array:
    """By FLOPs at the efficiency of its shape, or by its bytes, as `compute` for our own model."""
    hardware = cases.hardware
    rows, inner, outer = (_at(cases, size) for size in (product.rows, product.inner, product.outer))
    # The efficiency falls with few rows; in gradients of weights the rows are the inner size.
    most = np.maximum(np.maximum(rows, inner), outer)
    width = np.minimum(np.minimum(rows, inner), outer)
    middle = rows * inner * outer / np.maximum(most * width, 1.0)
    peak = hardware.peak * hardware.sustained
    seconds = product_seconds(most, middle, width, peak, hardware.bandwidth, cases.layouts.parameter_bytes, rates)
    return np.asarray(seconds, dtype=np.float64)


def _again(cases: Cases, rates: Coefficients, policy: str) -> Array:
    """Seconds of recomputing every block: a forward as far as its FLOPs are computed again, and its other operators whole."""
    trace = cases.described.trace
    total = np.zeros(1)
    for block, flops in zip(trace.blocks, trace.again[policy], strict=True):
        whole = _at(cases, block.forward.flops)
        share = np.where(whole > 0, _at(cases, flops) / np.maximum(whole, 1.0), 1.0)
        cheap = Work(moved_bytes=block.forward.moved_bytes, operators=block.forward.operators)
        cheap_seconds = _seconds(cases, rates, cheap)
        total = total + cheap_seconds + share * np.maximum(_seconds(cases, rates, block.forward) - cheap_seconds, 0.0)
    return total


def _at(cases: Cases, value: Affine) -> Array:
    return value[0] + value[1] * cases.layouts.micro_batch_size
