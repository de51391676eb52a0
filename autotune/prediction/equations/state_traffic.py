"""Seconds that the states take in a step: collectives of data-parallel ranks where nothing hides them, the update, files."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import (
    CommunicationGroup,
    coding_seconds,
    collective_seconds,
    expert_data_group,
    frozen_share,
    gathered_share,
    has_near,
    near_group,
    replica_group,
    sends_integers,
    sends_signs,
    shard_group,
    tensor_group,
)
from autotune.prediction.equations.kernels import LAYER_KERNELS, frozen_bytes, frozen_width
from autotune.prediction.equations.module_memory import gathers_of_step
from autotune.prediction.equations.overlap import exposed_gather_seconds, gathers, gathers_late
from autotune.prediction.equations.parameters import (
    StageParameters,
    counted_elements,
    gathered_units,
    is_quantised,
    layer_parameters,
    own_experts,
    persistent_parameters,
)
from autotune.prediction.equations.pipeline import Split
from search_spaces.optimizers import BF16_MASTERS, DEVICE_CHUNK_ELEMENTS
from search_spaces.training.states import BUFFERS, CHUNK_ELEMENTS, UNITS

MOVED = {
    "adamw": 38.0, "sgd": 30.0, "lamb": 128.0, "muon": 62.0, "adamw8bit": 200.0, "onebit_adam": 190.0, BF16_MASTERS: 120.0,
}  # fmt: skip
"""Bytes that an update moves per parameter: fused AdamW 28, SGD 20; for the others, reads and writes of the engine's unfused
operators. Each includes 2 for the copy in the precision and 8 for norm and clipping."""
MOVED_BY_KERNEL = 26.0
"""The same of 8-bit AdamW as one kernel for each parameter (the engine's `fused_update`, and bitsandbytes'): it reads weight,
gradient and two codes with 8 / 256 of scales, and writes all but the gradient, 16 bytes."""


def update_seconds(cases: Cases, rates: Coefficients, local: Array, layers: Array) -> Array:
    """Seconds for a rank that updates `local` parameters on the device, in a stage with `layers` layers."""
    by_kernel = (cases.layouts.updates_pieces > 0) & (cases.software.fused_moments > 0)
    update_bytes = np.where(by_kernel, MOVED_BY_KERNEL, cases.layouts.update_bytes)
    moved = local * update_bytes / (cases.hardware.bandwidth * rates.update_efficiency)
    if np.any(cases.layouts.updates_pieces):
        # Never of two parameters. Each has about the operators of a layer's forward: 1 ms on an H200
        # (docs/results/gpu-findings.md).
        # Attention has four matrices.
        matrices = layers * (4.0 + cases.shapes.matrices)
        pieces = np.where(by_kernel, matrices / LAYER_KERNELS, local / DEVICE_CHUNK_ELEMENTS + matrices)
        moved = np.maximum(moved, cases.layouts.updates_pieces * pieces * rates.kernel_seconds)
    if np.any(cases.megatron.states > 0):
        # The host copies every tensor to and from its shards: as much as for a forward.
        copied = rates.kernel_seconds * cases.software.host_work * layers * (cases.layouts.zero_stage > 0)
        moved = moved + np.where(cases.megatron.states > 0, copied, 0.0)
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
        flops = count * 5 * (4 * short**2 * long + 2 * short**3)
        owners = np.where(layouts.zero_stage > 0, layouts.shard, 1.0)
        size = count * rows * columns * 2.0 / owners  # two bytes per element are sent
        shared = 2 * size / layouts.tensor * (owners - 1) / owners
        sliced = size * (layouts.tensor - 1) / layouts.tensor
        seconds = (
            seconds
            + flops / owners / (cases.hardware.peak * cases.hardware.sustained * rates.matrix_efficiency)
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


def file_update_seconds(cases: Cases, rates: Coefficients, elements: Array, shared: Array) -> Array:
    """Seconds to update a rank's states in files; the computation of the update overlaps with this.

    The optimizer state of `elements` is read and written once, and the parameters of `shared` are written once. The ranks of a
    node share its file system, so each gets 1 / ranks of the bandwidth measured with all of them active.
    """
    layouts = cases.layouts
    moved = 2 * layouts.optimizer_in_files * elements * cases.software.state_bytes
    moved = moved + layouts.parameters_in_files * shared * layouts.parameter_bytes
    seconds: Array = moved / _of_a_rank(cases, rates.file_update_bandwidth)
    return seconds


def file_read_seconds(cases: Cases, rates: Coefficients, shared: Array, pace: Array) -> Array:
    """Seconds per step spent waiting for the parameters of `shared`, which are read twice per micro-batch of `pace` seconds.

    A unit is read while the one before it computes; only the excess of the read time is waited for.
    """
    layouts = cases.layouts
    if not np.any(layouts.parameters_in_files > 0):
        return np.zeros(1)
    read = 2 * layouts.parameters_in_files * shared * layouts.parameter_bytes / _of_a_rank(cases, rates.file_read_bandwidth)
    seconds: Array = layouts.accumulation * np.maximum(read - pace, 0.0)
    return seconds


def host_elements(cases: Cases, offloaded: Array) -> Array:
    """The part of a rank's `offloaded` elements whose state is in host memory at once: with files, what the buffers hold."""
    elements: Array = np.where(cases.layouts.optimizer_in_files > 0, np.minimum(offloaded, BUFFERS * CHUNK_ELEMENTS), offloaded)
    return elements


def host_parameter_bytes(cases: Cases, offloaded: Array) -> Array:
    """Bytes of a rank's offloaded parameters that are in host memory at once: with files, what the buffers hold.

    The buffers hold units being read and chunks of the update being written.
    """
    if not np.any(cases.layouts.parameters_in_files > 0):
        return offloaded
    width = cases.layouts.parameter_bytes
    layer = layer_parameters(cases)
    unit = (layer.attention + layer.dense) / cases.layouts.tensor + own_experts(cases, layer)
    table = cases.shapes.vocabulary * cases.shapes.hidden / cases.layouts.tensor
    units = UNITS * np.maximum(unit, table) / cases.layouts.shard * width
    written = BUFFERS / 2 * np.minimum(offloaded, CHUNK_ELEMENTS * width)
    host_bytes: Array = np.where(cases.layouts.parameters_in_files > 0, np.minimum(units + written, offloaded), offloaded)
    return host_bytes


def _of_a_rank(cases: Cases, bandwidth: float) -> Array:
    share: Array = bandwidth / np.minimum(cases.hardware.devices_per_node, cases.layouts.world)
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frequency:
    """The numbers of collectives and of messages per step."""

    reductions: Array
    """Reductions of every gradient."""
    gathers: Array
    """Gathers of every parameter."""
    buckets: Array
    """Buckets of the gradients."""
    pieces: Array
    """Messages per gather: at stage 3 one per layer."""
    sent: Array
    """Messages per reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seconds:
    """Seconds of a step if nothing were hidden."""

    scatter: Array
    """Of gradients; at stage 0 the first half of their all-reduce."""
    gather: Array
    """Of parameters; at stage 0 the second half."""
    copies: Array
    """Sums over copies of the shards."""


def exposed_state_seconds(
    cases: Cases, rates: Coefficients, slowest: Array, split: Split, parameter_counts: StageParameters
) -> Array:
    """Seconds of a step: 2 P sent, (m + 1) P at stage 2, 3 m P at stage 3 [Rajbhandari 2020], minus the hidden part.

    1. Reductions are hidden by the backward of the preceding micro-batch, gathers of stage 3 by computation.
    2. If a reduction waits for its bucket, the last one begins after backward, as does the sum over copies of the shards; with
       software that reduces sharded gradients at the end of a step, all do. The
       part of each layer's gather that exceeds the prefetch bucket begins when the layer is used.
    3. Updated parameters gathered late are hidden by one forward. Signs of momenta are sent after backward. Packing and
       unpacking of integers is not hidden.

    Args:
        cases: the configurations.
        rates: coefficients.
        slowest: seconds of a micro-batch on the slowest rank.
        split: layers of the pipeline's ranks.
        parameter_counts: parameters of the rank with the most layers.
    """
    layouts, frequency = cases.layouts, _frequency(cases, split, parameter_counts)
    at_three, signs = layouts.zero_stage == 3, sends_signs(cases)
    seconds = _Seconds(
        scatter=_scatter_seconds(cases, rates, parameter_counts, frequency),
        gather=_gather_seconds(cases, rates, split, parameter_counts, frequency),
        copies=_copies_seconds(cases, rates, parameter_counts, frequency),
    )
    all_reduced = (layouts.zero_stage == 0) & ~signs
    reduction = np.where(all_reduced, seconds.scatter + seconds.gather, seconds.scatter) + seconds.copies
    last = np.where(_waits(cases), 1 / frequency.buckets, 0.0)
    sharded_once = (layouts.zero_stage > 0) & (frequency.reductions == 1) & ~at_three
    last = np.where((cases.software.reduces_last > 0) & sharded_once, 1.0, last)
    ahead = np.where(_waits(cases), _ahead(cases, parameter_counts), 1.0)
    late = exposed_gather_seconds(cases, rates, seconds.gather, slowest, split.before_last, parameter_counts)
    after = np.where(gathers_late(cases), late, seconds.gather)
    may_hide = reduction * (1 - last) + np.where(at_three, seconds.gather * ahead, 0.0)
    unhidden = reduction * last + np.where(at_three, seconds.gather * (1 - ahead), np.where(all_reduced, 0.0, after))
    backward = slowest * rates.backward_ratio / (1 + rates.backward_ratio)
    beside = np.where(at_three, slowest * layouts.accumulation, backward * frequency.reductions)
    shown = _shown(cases, rates, np.where(signs, 0.0, may_hide), beside)
    coding = coding_seconds(cases, rates, parameter_counts, frequency.reductions, np.where(at_three, frequency.gathers, 0.0))
    exposed: Array = shown + np.where(signs, seconds.scatter + seconds.gather, unhidden) + coding
    return exposed


def _ahead(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Share of the gathers of stage 3 that starts before use: with prefetching, as much of the next layer as fits
    `max_live_parameters` next to the running one.
    """
    layouts, counted = cases.layouts, counted_elements(cases)

    def share(unit: Array) -> Array:
        room = np.maximum(layouts.max_live_parameters / counted - unit, 0.0)
        return np.where(layouts.prefetch_bucket_size > 0, np.minimum(room / np.maximum(unit, 1.0), 1.0), 0.0)

    common, experts = gathered_units(cases)
    of_experts = _of_experts(cases, parameter_counts) / np.maximum(parameter_counts.trained, 1.0)
    ahead_share: Array = share(common) * (1 - of_experts) + share(experts) * of_experts
    return ahead_share


def _shown(cases: Cases, rates: Coefficients, may_hide: Array, beside: Array) -> Array:
    """The exposed part of communication that overlaps with computation; each slows the other down."""
    overlapped = np.maximum(may_hide - beside * (1 - rates.data_exposed), rates.data_exposed * may_hide)
    slowed = np.minimum(may_hide, beside) * rates.overlap_slowdown
    return np.where(cases.layouts.overlap_comm > 0, np.minimum(overlapped + slowed, may_hide), may_hide)


def _frequency(cases: Cases, split: Split, parameter_counts: StageParameters) -> _Frequency:
    layouts, m, signs = cases.layouts, cases.layouts.accumulation, sends_signs(cases)
    at_three = layouts.zero_stage == 3
    every_time = at_three | ((layouts.zero_stage == 2) & (layouts.defer_gradient_reduction == 0))
    buckets = np.maximum(np.ceil(parameter_counts.trained / layouts.reduce_bucket_size), 1.0)
    # Below stage 3 our engine gathers parameters in separate buckets.
    refills = np.where(_waits(cases), np.ceil(parameter_counts.trained / layouts.allgather_bucket_size), buckets)
    if np.any(cases.software.sends_matrices > 0):
        # Tensors of a layer: four of attention, three of a gated MLP, two norms.
        refills = np.where(cases.software.sends_matrices > 0, 9.0 * split.before_last, refills)
    below = np.where(layouts.zero_stage == 0, buckets, np.maximum(refills, 1.0))
    pieces = np.where(signs, 1.0, np.where(at_three, np.maximum(split.first, 1.0), below))
    return _Frequency(
        reductions=np.where(every_time, m, 1.0),
        gathers=np.where(at_three, m * np.where(layouts.reshard_after_forward > 0, 2.0, 1.0), 1.0),
        buckets=buckets,
        pieces=pieces,
        sent=np.where(_waits(cases) & ~signs, buckets, pieces),
    )


def _scatter_seconds(cases: Cases, rates: Coefficients, parameter_counts: StageParameters, frequency: _Frequency) -> Array:
    layouts, experts = cases.layouts, _of_experts(cases, parameter_counts)
    by_another_way = sends_signs(cases) | sends_integers(cases) | (layouts.zero_stage == 0)
    volume = np.where(by_another_way, 1.0, cases.hardware.scatter_volume)
    width, count = layouts.reduce_bytes * frequency.reductions * volume, frequency.reductions * frequency.sent
    # A bucket contains either parameters shared by all ranks, or experts.
    expert_share = experts / np.maximum(parameter_counts.trained, 1.0)
    common = _along(cases, rates, shard_group(cases), (parameter_counts.trained - experts) * width, count * (1 - expert_share))
    return common + _along(cases, rates, expert_data_group(cases), experts * width, count * expert_share)


def _gather_seconds(
    cases: Cases, rates: Coefficients, split: Split, parameter_counts: StageParameters, frequency: _Frequency
) -> Array:
    """With a nearby second copy of the parameters, one gather of each uses all ranks, and the others stay among neighbours."""
    layouts, most = cases.layouts, split.before_last
    pieces = np.where(gathers_late(cases), gathers(most), frequency.pieces)
    messages = np.where((layouts.zero_stage == 3) & is_quantised(cases), 2.0, 1.0)
    message, full_gathers = _gathered_bytes(cases, parameter_counts, most), np.where(has_near(cases), 1.0, frequency.gathers)
    volume, count = message * full_gathers, full_gathers * pieces * messages
    if cases.module is not None:
        times, sizes = gathers_of_step(cases)
        at_three, share = layouts.zero_stage == 3, gathered_share(cases) / layouts.tensor
        volume, count = np.where(at_three, sizes * share, volume), np.where(at_three, times, count)
    seconds = _along(cases, rates, shard_group(cases), volume, count)
    if cases.module is None and np.any(has_near(cases)):
        again = frequency.gathers - full_gathers
        seconds = seconds + _along(cases, rates, near_group(cases), message * again, again * pieces * messages)
    width = np.where(layouts.zero_stage == 0, layouts.reduce_bytes, layouts.parameter_bytes * gathered_share(cases))
    of_experts = _of_experts(cases, parameter_counts) * width * frequency.gathers
    return seconds + _along(cases, rates, expert_data_group(cases), of_experts, frequency.gathers * pieces)


def _gathered_bytes(cases: Cases, parameter_counts: StageParameters, layers: Array) -> Array:
    """Bytes of one whole gather over the data ranks of a rank that holds `layers` layers, without experts that ranks divide.

    Of the parameters that are not persistent; at stage 0, of the reduced gradients, as the second half of their all-reduce.
    """
    layouts, trained = cases.layouts, parameter_counts.trained - _of_experts(cases, parameter_counts)
    frozen = np.where(layouts.zero_stage == 3, frozen_bytes(cases, parameter_counts) * frozen_share(cases), 0.0)
    whole = trained * layouts.parameter_bytes * gathered_share(cases) + frozen
    share = np.where(cases.shapes.frozen_bytes > 0, frozen_share(cases), gathered_share(cases))
    persistent = persistent_parameters(cases, layers) * frozen_width(cases) * share
    return np.where(layouts.zero_stage == 0, trained * layouts.reduce_bytes, np.maximum(whole - persistent, 0.0))


def _copies_seconds(cases: Cases, rates: Coefficients, parameter_counts: StageParameters, frequency: _Frequency) -> Array:
    """All-reduces over copies of the shards: once per step if each bucket's last reduction is waited for, else every time."""
    group, times = replica_group(cases), np.where(_waits(cases), 1.0, frequency.reductions)
    share = parameter_counts.trained / cases.layouts.shard * cases.layouts.reduce_bytes
    volume = 2 * share * (group.ranks - 1) / np.maximum(group.ranks, 1.0)
    return collective_seconds(cases, group, volume * times, times * frequency.sent, rates)


def _of_experts(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Trained parameters of experts if they are divided over other ranks than the rest."""
    return np.where(cases.layouts.apart, parameter_counts.expert_trained, 0.0)


def _waits(cases: Cases) -> Flags:
    """Whether a reduction begins only when its whole bucket is ready."""
    waits: Flags = cases.software.waits_for_bucket > 0
    return waits


def _along(cases: Cases, rates: Coefficients, group: CommunicationGroup, message: Array, count: Array) -> Array:
    """Seconds of gathers or scatters of `message` bytes in total over a group; 0 if nothing is sent."""
    count = np.where(message > 0, count, 0.0)
    return collective_seconds(cases, group, message * (group.ranks - 1) / group.ranks, count, rates)
