"""A prediction: the seconds of a step by part, and the memory of the fullest rank."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from autotune.prediction.equations.activations import kept_layer_bytes
from autotune.prediction.equations.cases import Array, Cases, RankShare
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import boundary_bandwidth, sends_integers, tensor_group
from autotune.prediction.equations.compute import MicroBatchSeconds, micro_batch
from autotune.prediction.equations.kernels import frozen_bytes, scales_rows
from autotune.prediction.equations.layer_shapes import with_layers
from autotune.prediction.equations.memory import Memory, memory
from autotune.prediction.equations.overlap import exposed_copy_seconds
from autotune.prediction.equations.parameters import StageParameters, divided, stage_parameters
from autotune.prediction.equations.pipeline import Split, idle_micro_batches, split_layers
from autotune.prediction.equations.schedules import over_schedule, rank_tokens
from autotune.prediction.equations.software import INT8
from autotune.prediction.equations.state_traffic import (
    exposed_state_seconds,
    file_read_seconds,
    file_update_seconds,
    update_seconds,
)
from autotune.prediction.equations.uneven import (
    layout_overrides,
    offloading,
    on_devices,
    on_own_device,
    paces_of,
    rank_seconds,
    shares_of,
    with_explicit_layers,
)
from search_spaces.lattice import checkpoint

PARTS = ("compute", "tensor", "pipeline", "data", "optimizer", "offload")
"""Parts of a step: compute (with recomputation and launches), tensor (with context and expert communication),
pipeline (bubble and boundaries), data (exposed communication), optimizer, offload."""
Z90 = 1.645
"""Half-width of a 90 % band in standard deviations."""
COUNTED_REACH = 0.02
"""The same of the logarithm of memory whose every term is counted: Megatron-LM's [90 % of its functional tests]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The prediction for each case."""

    parts: dict[str, Array]
    """Part of `PARTS` -> seconds; the sum is the step time."""
    memory: Memory
    time_reach: Array
    """Half-width of the 90 % band of the logarithm of the time."""
    doubts: dict[str, Array]
    """What makes times less sure -> its part of the band, as of `doubts`; trials remove it."""
    memory_reach: Array
    """The same of allocated bytes."""

    @property
    def seconds(self) -> Array:
        """Seconds of an optimizer step."""
        return _summed(self.parts)

    def seconds_band(self) -> tuple[Array, Array]:
        """The interval that contains the step time with a probability of 90 %."""
        return self.seconds * np.exp(-self.time_reach), self.seconds * np.exp(self.time_reach)


def predict(cases: Cases, rates: Coefficients) -> StepPrediction:
    """Step time by part, and memory by tag. If only one of them is needed, `seconds_of` and `memory` are cheaper."""
    terms = doubts(cases, rates)
    return StepPrediction(
        parts=_parts(cases, rates),
        memory=memory(cases, rates),
        time_reach=Z90 * rates.time_spread * rates.time_tail * (1 + rates.time_doubt * (_combined(terms) - 1)),
        doubts={name: rates.time_doubt * term for name, term in terms.items()},
        memory_reach=np.where(cases.megatron.states > 0, COUNTED_REACH, Z90 * rates.memory_spread * rates.memory_tail),
    )


def doubt(cases: Cases, rates: Coefficients) -> Array:
    """Spread of measured / predicted time as a multiple of that of dense models in tuned software that the device bounds."""
    return _combined(doubts(cases, rates))


def _combined(terms: Mapping[str, Array]) -> Array:
    combined: Array = np.sqrt(1.0 + sum(term**2 for term in terms.values()))
    return combined


def doubts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    """What makes times less sure -> its part of `doubt`.

    It is the share of a layer that is the host's, which differs by processor and version; experts, whose routing and kernels
    differ; a tensor group that crosses link domains, or stages of many nodes that block each other; and software that nobody
    tuned.
    """
    unbound = dataclasses.replace(rates, kernel_seconds=1e-9, collective_launch=1e-9)
    bound, free = (batch.layer + batch.layer_communication for batch in (micro_batch(cases, at) for at in (rates, unbound)))
    layouts, software = cases.layouts, cases.software
    # Messages that block the host stall runs on many nodes, now and then.
    stalls = np.where(layouts.pipeline > 1, software.sends_shapes * layouts.world / cases.hardware.linked_devices / 16, 0.0)
    return {
        "the host bounds its layers": 2.5 * (1 - free / bound),
        "its layers have experts": 1.5 * (cases.shapes.experts > 0),
        "a tensor group crosses link domains": 5.0 * (layouts.tensor > tensor_group(cases).in_domain),
        "its software is not known to be tuned": 2.5 * software.untuned,
        "stages of many nodes block each other": stalls,
        "no published run has products of 8-bit weights": 2.5 * (cases.transformers.bits == INT8),
        "published runs gain less from products with scales of rows": 1.0 * scales_rows(cases),
    }


def seconds_of(cases: Cases, rates: Coefficients) -> Array:
    """Seconds of an optimizer step."""
    return _summed(_parts(cases, rates))


def least_seconds_of(cases: Cases, rates: Coefficients) -> Array:
    """A lower bound of `seconds_of`: the parts of the micro-batches, which do not depend on how the states are sharded."""
    return _summed(
        over_schedule(
            cases,
            lambda point_cases: with_explicit_layers(
                point_cases, lambda at: _even_pace(at, rates)[0], lambda at: _uneven_pace(at, rates)[0]
            ),
        )
    )


def _parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    """Seconds of a step by part (`PARTS`): arrays over the cases, of one element where all cases agree. Those of a scan have an
    axis for each axis of its product.

    1. One micro-batch on the slowest rank of the pipeline: layers, output projection, tensor communication.
    2. Times the number of micro-batches; the pipeline adds its idle time and the cost of boundaries.
    3. Gradient and parameter communication, minus the part hidden by backward and forward.
    4. The update, on the device or on the host.

    With a data schedule, the mean over the job of the values at points of the schedule. If samples contain padding, the seconds
    are those of a whole step's useful tokens: divided by the share of useful tokens. Cases with explicit layers (a balanced
    split, unlike layers, unlike devices) are computed rank by rank.
    """

    def at_point(point_cases: Cases) -> dict[str, Array]:
        checkpoint()  # a request that nobody waits for any more ends here
        return with_explicit_layers(
            point_cases, lambda subset: _even_parts(subset, rates), lambda subset: _uneven_parts(subset, rates)
        )

    return over_schedule(cases, at_point)


def _even_parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    parts, pace, split = _even_pace(cases, rates)
    return {**parts, **_after(cases, rates, pace, split)}


def _even_pace(cases: Cases, rates: Coefficients) -> tuple[dict[str, Array], Array, Split]:
    """The parts of the micro-batches, the seconds of one on the slowest rank, and the layers of ranks."""
    batch, split = micro_batch(cases, rates), split_layers(cases)
    layers, has_head = _slowest(cases, batch, split)
    compute = layers * batch.layer + has_head * batch.head + batch.embedding
    tensor = layers * batch.layer_communication + has_head * batch.head_communication
    # Summed over all ranks of the pipeline.
    whole = cases.shapes.layers * (batch.layer + batch.layer_communication) + batch.head + batch.head_communication
    return _paced(cases, rates, compute, tensor, whole), compute + tensor, split


def _paced(cases: Cases, rates: Coefficients, compute: Array, tensor: Array, whole: Array) -> dict[str, Array]:
    """The parts of the micro-batches, from those of one on the slowest rank and the sum of all ranks' seconds."""
    m, slowest = cases.layouts.accumulation, compute + tensor
    # What the slowest rank gains because waiting ranks leave it their cores.
    gained = (1 - cases.hardware.idle_cost) * (slowest - _mean_pace(cases, slowest, whole))
    return {
        "compute": m * (compute - gained) + rates.step_seconds,
        "tensor": m * tensor,
        "pipeline": _pipeline(cases, rates, slowest, whole),
    }


def _uneven_parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    """The parts if the layers of stages are given explicitly: each rank has its own pace.

    Micro-batches run at the pace of the slowest rank. Exposed communication and the update, which follow them, are those of
    the rank on which they take longest.
    """
    parts, pace = _uneven_pace(cases, rates)
    offloads = layout_overrides(cases)[1]
    after = {name: np.full(1, -np.inf) for name in ("data", "optimizer", "offload")}
    for share in shares_of(cases, contenders=True):
        rank_parts = after_backward(cases, rates, share, offloads, pace)
        longer = (share.layers > 0) & (_summed(rank_parts) > _summed(after))
        after = {name: np.where(longer, rank_parts[name], after[name]) for name in after}
    return {**parts, **after}


def _uneven_pace(cases: Cases, rates: Coefficients) -> tuple[dict[str, Array], Array]:
    """The parts of the micro-batches, and the seconds of one on the slowest rank."""
    recomputes, _ = layout_overrides(cases)
    paces = paces_of(cases, rates, bool(np.any(recomputes > 0)))
    compute = tensor = everywhere = np.zeros(1)
    for share in shares_of(cases):
        own_compute, own_tensor = rank_seconds(paces, share, recomputes)
        everywhere = everywhere + share.alike * (own_compute + own_tensor)
        own_compute = own_compute + on_own_device(share, [pace.knobs.embedding for pace in paces])
        slower = own_compute + own_tensor > compute + tensor
        compute, tensor = np.where(slower, own_compute, compute), np.where(slower, own_tensor, tensor)
    return _paced(cases, rates, compute, tensor, everywhere), compute + tensor


def after_backward(cases: Cases, rates: Coefficients, share: RankShare, overrides: Array, pace: Array) -> dict[str, Array]:
    """Seconds of the parts after the micro-batches on a rank; `pace`: of a micro-batch on the slowest rank; `overrides`:
    1 if the layout states what is offloaded.
    """
    split = Split(first=share.layers, last=share.layers, most=share.layers, pipeline_rank=share.pipeline_rank)
    rank_cases = offloading(with_layers(cases, share.kinds), share, overrides)
    parts = [_after(device_cases, rates, pace, split) for device_cases in on_devices(rank_cases)]
    return {name: on_own_device(share, [part[name] for part in parts]) for name in parts[0]}


def _summed(parts: dict[str, Array]) -> Array:
    return reduce(np.add, parts.values())


def _slowest(cases: Cases, batch: MicroBatchSeconds, split: Split) -> tuple[Array, Array]:
    """Layers of the slowest rank, and whether it is the one with the output projection."""
    layer = batch.layer + batch.layer_communication
    with_head = split.last * layer + batch.head + batch.head_communication
    without = split.before_last * layer
    single = cases.layouts.pipeline == 1
    last = single | (with_head >= without)
    return np.where(last, split.last, split.before_last), np.where(last, 1.0, 0.0)


def _mean_pace(cases: Cases, slowest: Array, whole: Array) -> Array:
    """Seconds of a micro-batch on the mean rank; on the only one without a pipeline."""
    p = cases.layouts.pipeline
    return np.where(p > 1, np.minimum(whole / p, slowest), slowest)


def _pipeline(cases: Cases, rates: Coefficients, slowest: Array, whole: Array) -> Array:
    """Idle time at the pace of the mean rank: earlier stages wait for the first micro-batch, later ones for the last.

    Boundaries move 2 b s h / c bytes (/ t under sequence parallelism); exposed while the pipeline fills and drains, with a
    latency for every micro-batch. Software that sends shapes first also waits in each, the longer the more nodes there are.
    """
    layouts = cases.layouts
    # A micro-batch crosses a boundary at each of a rank's stages, forward and backward.
    crossed = 2 * layouts.virtual_stages * hop_seconds(cases, rates)
    exposed = crossed * (layouts.accumulation * 0.5 + layouts.pipeline - 1)
    if np.any(cases.software.sends_shapes > 0):
        domains = np.maximum(layouts.world / cases.hardware.linked_devices, 1.0)
        exposed = exposed + cases.software.sends_shapes * rates.blocked_seconds * domains**2 * layouts.accumulation
    return np.where(layouts.pipeline > 1, idle_micro_batches(cases) * _mean_pace(cases, slowest, whole) + exposed, 0.0)


def hop_seconds(cases: Cases, rates: Coefficients) -> Array:
    """Seconds to send a micro-batch's hidden state to the next stage."""
    layouts, shapes = cases.layouts, cases.shapes
    divided = np.where((layouts.sequence_parallel > 0) | (cases.software.scatters > 0), layouts.tensor, 1.0)
    message = rank_tokens(cases) * shapes.hidden * layouts.parameter_bytes / divided
    hop: Array = message / boundary_bandwidth(cases, rates) + rates.hop_seconds
    return hop


def _after(cases: Cases, rates: Coefficients, slowest: Array, split: Split) -> dict[str, Array]:
    """The parts after the micro-batches; `slowest`: seconds of one on the slowest rank."""
    parameters = _fullest_parameters(cases, split)
    local = divided(cases, parameters, cases.layouts.zero_stage >= 1)
    return {
        "data": exposed_state_seconds(cases, rates, slowest, split, parameters),
        "optimizer": update_seconds(cases, rates, local * (1 - cases.layouts.offload_optimizer), split.before_last),
        "offload": offload_seconds(cases, rates, slowest, split, local, frozen_bytes(cases, parameters)),
    }


def offload_seconds(
    cases: Cases, rates: Coefficients, slowest: Array, split: Split, shared: Array, frozen: Array | float = 0.0
) -> Array:
    """The update on the host; gradients sent to it beyond what backward hides, parameters sent back; per micro-batch, copies of
    parameters and saved activations. `shared`: a rank's share of the trained parameters; `frozen`: bytes of the others.
    """
    layouts, hardware = cases.layouts, cases.hardware
    local = shared * layouts.offload_optimizer
    backward = slowest * rates.backward_ratio / (1 + rates.backward_ratio)
    # Computation that hides communication does not also hide copies.
    free = np.where(layouts.data * layouts.context > 1, rates.data_exposed, 1.0)
    # Integers are summed in fp32 before the copy.
    width = np.where(sends_integers(cases), 4.0, layouts.reduce_bytes)
    down = np.maximum(local * width / hardware.host_link - backward * np.minimum(free, 1.0), 0.0)
    up = local * layouts.parameter_bytes / hardware.host_link
    per_rank = hardware.host_bandwidth / np.minimum(hardware.devices_per_node, layouts.world)
    update = local * 30 / (per_rank * rates.host_update_efficiency)
    update = np.maximum(update, file_update_seconds(cases, rates, local, shared))
    fetched = (shared * layouts.parameter_bytes + frozen / layouts.shard) * layouts.offload_parameters
    waited = file_read_seconds(cases, rates, shared, slowest)
    saved = exposed_copy_seconds(cases, rates, split.before_last, kept_layer_bytes(cases), slowest)
    return saved + down + up + update + 2 * layouts.accumulation * fetched / hardware.host_link + waited


def _fullest_parameters(cases: Cases, split: Split) -> StageParameters:
    """Parameters of the rank with the most layers, the input table included; of the last one if it has more, by modules for
    multi-token prediction.
    """
    single = np.where(cases.layouts.pipeline == 1, 1.0, 0.0)
    fullest = stage_parameters(cases, split.before_last, np.ones(1), single)
    if not np.any(cases.shapes.modules > 0):
        return fullest
    last = stage_parameters(cases, split.last, single, np.ones(1))
    fuller = last.trained > fullest.trained
    fields = (item.name for item in dataclasses.fields(fullest))
    return StageParameters(**{name: np.where(fuller, getattr(last, name), getattr(fullest, name)) for name in fields})


def local_parameters(cases: Cases, split: Split) -> Array:
    """A rank's share of the parameters of the fullest rank."""
    return divided(cases, _fullest_parameters(cases, split), cases.layouts.zero_stage >= 1)
