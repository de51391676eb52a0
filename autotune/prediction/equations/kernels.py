"""Seconds of the kernels that dominate a step, by shape. `benchmarks/prediction/kernel_model.py` fits their forms and priors
to published measurements of nine devices, and shows the errors in docs/kernel-model.md."""

import math
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients
from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.presets import device_preset

_FILE = Path(__file__).with_name("kernels.toml")
SHARP = 4.0
"""Exponent of `smooth_maximum`."""
SHORT_SEQUENCE, NARROW_HEAD = 500.0, 25.0
"""Tokens of a causal sequence, and width of a head, at which a fused attention kernel reaches half of its speed:
FlashAttention 2 on A100, L40S and RTX PRO 6000."""
SMALLEST_KERNEL = 2.5e-6
"""Seconds of a kernel with nothing to do, on a GPU."""
LAYER_KERNELS = 20.0
"""Kernels of a layer's forward."""


def smooth_maximum(one: Array, other: Array) -> Array:
    """A smooth maximum of two overlapping times: if they are similar, they delay each other."""
    found: Array = (one**SHARP + other**SHARP) ** (1 / SHARP)
    return found


def product_seconds(
    rows: Array, inner: Array, outer: Array, peak: Array, bandwidth: Array, element_bytes: Array, rates: Coefficients
) -> Array:
    """Seconds of a product of (rows, inner) and (inner, outer): FLOPs at the efficiency of the shape, and bytes moved.

    Args:
        rows: tokens.
        inner: the width that is summed over.
        outer: the width of the result.
        peak: FLOP/s of large products.
        bandwidth: bytes/s of device memory.
        element_bytes: of an element of the three matrices.
        rates: coefficients.
    """
    slowdown = (1 + rates.rows_half / rows) * (1 + rates.width_half / outer) * (1 + rates.width_half / inner)
    computed = 2 * rows * inner * outer / (peak * rates.matrix_efficiency) * slowdown
    moved = (rows * inner + inner * outer + rows * outer) * element_bytes
    return smooth_maximum(computed, moved / bandwidth)


def attention_slowdown(attended: Array, width: Array, short: float = SHORT_SEQUENCE, narrow: float = NARROW_HEAD) -> Array:
    """How much longer a fused attention kernel takes per FLOP than with 4,096 tokens and heads of 128.

    Args:
        attended: twice the tokens that a token attends to on average: without a window, the sequence length.
        width: of a head.
        short: `attended` at which half of the speed is reached.
        narrow: `width` at which half of the speed is reached.
    """
    usual = (1 + short / 4096) * (1 + narrow / 128)
    return (1 + short / attended) * (1 + narrow / width) / usual


def link_seconds(volume: Array, count: Array, bandwidth: Array, rates: Coefficients) -> Array:
    """Seconds in which `count` collectives together move `volume` bytes through each rank's link, without their latency.

    A message travels in chunks: one that would take T seconds in a single stream takes sqrt(`chunk_seconds` x T) more, with the
    chunks' best size.
    """
    streamed = volume / (bandwidth * rates.link_efficiency)
    return streamed + np.sqrt(rates.chunk_seconds * count * streamed)


def product_efficiency(device: DeviceSpec) -> float:
    """Speed of the device's large products as a share of its peak, relative to that share on A100, H100 and H200.

    A GPU that was not measured borrows from the nearest one by peak and bandwidth, a CPU from none.
    """
    if device.kind == "cpu" or "bf16" not in device.peak_flops:
        return 1.0
    known = _efficiencies()
    return known[device.name if device.name in known else nearest(device, [*map(device_preset, known)]).name]


def nearest(device: DeviceSpec, others: Sequence[DeviceSpec]) -> DeviceSpec:
    """The one whose peak and bandwidth differ least from the device's, as ratios."""

    def distance(other: DeviceSpec) -> float:
        peaks = math.log(device.peak_flops["bf16"] / other.peak_flops["bf16"])
        bandwidths = math.log((device.memory_bandwidth or 1e12) / (other.memory_bandwidth or 1e12))
        return math.hypot(peaks, bandwidths)

    return min(others, key=distance)


@cache
def _efficiencies() -> dict[str, float]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
