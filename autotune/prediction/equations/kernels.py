"""Seconds of the kernels that dominate a step, by shape, and the bytes that fused, replayed and low-precision kernels keep."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags, Layouts
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.parameters import StageParameters, is_quantised, layer_parameters
from autotune.prediction.equations.schedules import rank_tokens
from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.devices import device_preset
from search_spaces.kernels import KERNEL_CHOICES, LIGER, TRANSFORMER_ENGINE
from search_spaces.knob import Value
from search_spaces.knobs.computation import FP8_RECIPES, ROWWISE, ROWWISE_WITH_GW_HP

SHORT_SEQUENCE, NARROW_HEAD = 500.0, 25.0
"""Tokens of a causal sequence, and width of a head, at which a fused attention kernel reaches half of its speed:
FlashAttention 2 on A100, L40S and RTX PRO 6000."""
A100_PEAK = 312e12
"""FLOP/s of A100 in bf16. Since then products have become faster and exponentials have not: the width grows with the peak."""
SMALLEST_KERNEL = 2.5e-6
"""Seconds of a kernel with nothing to do, on a GPU."""
LAYER_KERNELS = 20.0
"""Kernels of a layer's forward."""


def smooth_maximum(first: Array, second: Array) -> Array:
    """A smooth maximum of two overlapping times: if they are similar, they delay each other."""
    # Exponent of `smooth_maximum`.
    sharp = 4.0
    maximum: Array = (first**sharp + second**sharp) ** (1 / sharp)
    return maximum


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


def attention_slowdown(
    attended: Array, width: Array, peak: Array | float = A100_PEAK, short: float = SHORT_SEQUENCE, narrow: float = NARROW_HEAD
) -> Array:
    """How much longer a fused attention kernel takes per FLOP than with 4,096 tokens and heads of 128.

    A score takes as many FLOPs as the head is wide, and one exponential: narrow heads wait for it, the more the faster products
    are.

    Args:
        attended: twice the tokens that a token attends to on average: without a window, the sequence length.
        width: of a head.
        peak: FLOP/s of products.
        short: `attended` at which half of the speed is reached.
        narrow: `width` at which half of the speed is reached on an A100.
    """
    half = narrow * np.where(width < 128, np.maximum(peak / A100_PEAK, 1.0), 1.0)
    usual = (1 + short / 4096) * (1 + half / 128)
    return np.asarray((1 + short / attended) * (1 + half / width) / usual)


def link_seconds(volume: Array, count: Array, bandwidth: Array, rates: Coefficients) -> Array:
    """Seconds in which `count` collectives together move `volume` bytes through each rank's link, without their latency.

    A message travels in chunks: one that would take T seconds in a single stream takes sqrt(`chunk_seconds` x T) more, with the
    chunks' best size.
    """
    streamed = volume / (bandwidth * rates.link_efficiency)
    return streamed + np.sqrt(rates.chunk_seconds * count * streamed)


def product_efficiency(device: DeviceSpec) -> float:
    """Speed of the device's large products as a share of its peak, relative to that share on A100, H100 and H200."""
    return _shares(device)[0]


def sustained_share(device: DeviceSpec, precision: str) -> float:
    """Speed of products in 16 bits under a lasting load, relative to a short one: 1, or less where they exceed the power limit,
    so that the clock falls.
    """
    return _shares(device)[1] if precision in ("bf16", "fp16") else 1.0


def _shares(device: DeviceSpec) -> tuple[float, float]:
    """A GPU that was not measured borrows from the nearest by peak and bandwidth, a CPU and a GPU without bf16 from none."""
    speeds, sustained = _measured()["speed"], _measured()["sustained"]
    if device.kind == "cpu" or "bf16" not in device.peak_flops:
        return 1.0, sustained.get(device.name, 1.0)
    if device.name in (consumer := _measured()["consumer"]):
        return consumer[device.name], 1.0
    name = device.name if device.name in speeds else nearest(device, [*map(device_preset, speeds)]).name
    return speeds[name], sustained.get(name, 1.0)


def nearest(device: DeviceSpec, candidates: Sequence[DeviceSpec]) -> DeviceSpec:
    """The one whose peak and bandwidth differ least from the device's, as ratios."""

    def distance(other: DeviceSpec) -> float:
        peaks = math.log(device.peak_flops["bf16"] / other.peak_flops["bf16"])
        bandwidths = math.log((device.memory_bandwidth or 1e12) / (other.memory_bandwidth or 1e12))
        return math.hypot(peaks, bandwidths)

    return min(candidates, key=distance)


@cache
def _measured() -> dict[str, dict[str, float]]:
    return tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))


ACCUMULATED = 4.0
"""Bytes per element in which Liger accumulates the gradient of the output projection over pieces of the rows."""
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


def eager_norm_extra(cases: Cases) -> Array:
    """Bytes kept per element beyond the inputs of norms by separate operators. Models with gated MLPs have RMSNorms."""
    return np.where(cases.shapes.matrices == 3, cases.software.rms_extra, 0.0)


def norm_extra(cases: Cases) -> Array:
    """The same, but fused kernels and compiled blocks keep only a few numbers per row."""
    return np.where(norms_fused(cases) | (cases.layouts.compiled > 0), 0.0, eager_norm_extra(cases))


def mlp_bytes(cases: Cases) -> Array:
    """Bytes kept per element of the MLP's hidden layer. Compiled blocks compute the activated gate again, too: on an H200 they
    kept 0.86 to 0.88 of the activations of a llama, which is the share without it (docs/results/gpu-findings.md)."""
    gated = cases.shapes.matrices == 3
    fused = gates_fused(cases) | ((cases.layouts.compiled > 0) & gated)
    # Relative to torch's operators: gate, hidden layer and their product are kept, not the activated gate.
    return np.where(gated, cases.software.gated_bytes, cases.software.plain_bytes) * np.where(fused, 0.75, 1.0)


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


STATIC_MESSAGES = 3.0
"""Hidden states that a layer's graphs keep besides those saved for backward: its result (which is copied to the next layer's
input), and the gradients of its result and of its input."""


def launches(cases: Cases, backward_ratio: float) -> Array:
    """Launches of a layer's forward and backward, as a multiple of those of a forward."""
    # Of about twenty launches of a forward remain a copy of the input and one graph; of about forty of a backward a copy, the
    # graph, and a copy of each of about nine gradients out of static buffers.
    graph_launches = 0.1 + 0.25 * backward_ratio
    return np.where(cases.layouts.cuda_graphs > 0, graph_launches, 1 + backward_ratio)


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
    return rank_tokens(cases) * cases.shapes.hidden * layouts.parameter_bytes


_OF_ROWS = _, _HALF_WEIGHTS = tuple(1.0 + FP8_RECIPES.index(name) for name in (ROWWISE, ROWWISE_WITH_GW_HP))
SEPARATE, FUSED = 5.0, 1.0
"""Temporary bytes per number during rounding: fp32 and 8 bits with separate operators, only 8 bits if compiled."""


def rounding_bytes(compiled: Value) -> float:
    """The value of `Layouts.rounding_bytes` of products in 8 bits, by `compile_blocks`."""
    return FUSED if compiled else SEPARATE


def rounded_bytes(cases: Cases) -> Array:
    """Temporary bytes of the largest product of a layer: one operand exists in 8 bits while the other is rounded."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(layouts.rounding_bytes > 0):
        return np.zeros(1)
    wide = np.maximum(shapes.ffn, shapes.query) / layouts.tensor
    rows = rank_tokens(cases) * np.maximum(shapes.hidden, wide)
    matrix, rounding = shapes.hidden * wide, layouts.rounding_bytes
    return np.where(rounding > 0, np.maximum(rounding * rows + matrix, rows + rounding * matrix), 0.0)


def scales_rows(cases: Cases) -> Flags:
    """Whether the operands of products in 8 bits have scales of rows."""
    return np.isin(cases.layouts.fp8_recipe, _OF_ROWS)


def product_speed(cases: Cases) -> Array:
    """Speed of a layer's three products relative to bf16's. Forward has torch's kernel of rows, if those have scales; backward
    has cuBLAS's, and `rowwise_with_gw_hp` one product of three in bf16 [docs/numerics.md derives the four speeds].
    """
    recipe, blocks = cases.layouts.fp8_recipe, cases.hardware.block_products > 0
    by_cublas, by_rows = np.where(blocks, 1.71, 2.0), np.where(blocks, 1.44, 1.96)
    forward = np.where(scales_rows(cases), by_rows, by_cublas)
    weights = np.where(recipe == _HALF_WEIGHTS, 1.0, by_cublas)
    return np.where(recipe > 0, 3 / (1 / forward + 1 / by_cublas + 1 / weights), 1.0)


def rounding_seconds(cases: Cases, tokens: Array) -> Array:
    """Seconds per micro-batch to round a layer's operands to 8 bits [bytes counted as in torchao's training/roofline_utils.py].

    Forward rounds inputs and weights; backward rounds both again, transposed, and gradients of outputs in both orders. With one
    scale for a matrix its 8 bits are transposed, with those of rows and blocks its numbers before they are rounded; a product
    with scales of rows multiplies its result by them, except in forward. A recomputed layer repeats the forward part.
    """
    recipe = cases.layouts.fp8_recipe
    if not np.any(recipe):
        return np.zeros(1)
    shapes, layouts, layer = cases.shapes, cases.layouts, layer_parameters(cases)
    matrices = layer.attention / layouts.tensor
    matrices = matrices + np.where(shapes.experts > 0, layer.experts / layouts.expert_tensor, layer.dense / layouts.tensor)
    fan_in, routed = shapes.matrices - 1, shapes.routed
    inputs = (3 + fan_in * routed) * shapes.hidden + (shapes.query + shapes.mlp_width) / layouts.tensor
    results = (shapes.query + 2 * shapes.key_value + fan_in * shapes.mlp_width) / layouts.tensor
    results = results + (1 + routed) * shapes.hidden
    again = np.where(layouts.activation_checkpointing > 0, 1.0, 0.0) / layouts.checkpoint_every_k
    whole, wide = recipe == 1, recipe == _HALF_WEIGHTS
    # Bytes moved to round a bf16 number. With separate operators its magnitude is read, fp32 written, read again and rounded;
    # compiled, a row is read once, a matrix twice.
    separate = (layouts.rounding_bytes == SEPARATE) & (cases.megatron.states == 0)
    rounded = np.where(separate, 2.0 + 6.0 + 5.0, np.where(whole, 5.0, 3.0))
    # Bytes moved to transpose an 8-bit number, or one of 16 bits before it is rounded.
    turned = np.where(whole, 2.0, 4.0)
    twice, gradients = 2 * rounded + turned, np.where(whole, rounded + turned, 2 * rounded + turned)
    scaled = np.where(scales_rows(cases), 4.0, 0.0)
    moved = matrices * (twice + again * rounded + np.where(wide, 0.0, scaled))
    moved = moved + tokens * inputs * (np.where(wide, rounded, twice) + again * rounded + scaled)
    moved = moved + tokens * results * np.where(wide, rounded, gradients)
    return np.where(recipe > 0, moved / cases.hardware.bandwidth, 0.0)


def rounding_of_step(cases: Cases) -> Array:
    """The same of all layers of a mean pipeline stage, in a step."""
    layers = cases.shapes.layers / cases.layouts.pipeline
    return cases.layouts.accumulation * layers * rounding_seconds(cases, rank_tokens(cases))


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
