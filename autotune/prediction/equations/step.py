"""A prediction: the seconds of a step by what they are spent on, and the memory of the fullest rank."""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from autotune.prediction.equations import offloaded_activations
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import boundary_bandwidth
from autotune.prediction.equations.compressed import sends_integers
from autotune.prediction.equations.compute import MicroBatch, micro_batch
from autotune.prediction.equations.files import file_read_seconds, file_update_seconds
from autotune.prediction.equations.memory import Memory, kept_layer_bytes, memory
from autotune.prediction.equations.optimizer import update_seconds
from autotune.prediction.equations.parameters import StageParameters, divided, stage_parameters
from autotune.prediction.equations.pipeline import Split, boundaries, idle_micro_batches, split_layers
from autotune.prediction.equations.schedules import over_schedule, trained_tokens
from autotune.prediction.equations.state_traffic import exposed_state_seconds
from autotune.prediction.equations.uneven import (
    RankShare,
    marked,
    offloading,
    on_devices,
    overlaid,
    paces_of,
    rank_seconds,
    shares_of,
    where_it_runs,
    written_out,
)
from search_spaces.checkpoints import checkpoint

PARTS = ("compute", "tensor", "pipeline", "data", "optimizer", "offload")
"""What a step is spent on: compute (with recomputation and launches), tensor (with context and expert communication),
pipeline (bubble and boundaries), data (communication that stays exposed), optimizer, offload."""
MASTER_WIDTH = 4.0
"""Bytes of a gradient in the master's type."""
Z90 = 1.645
"""Half-width of a 90 % band in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of each case."""

    parts: dict[str, Array]
    """Part of `PARTS` -> seconds; they sum to the step."""
    memory: Memory
    time_spread: float
    memory_spread: float

    @property
    def seconds(self) -> Array:
        """Of an optimizer step."""
        return _summed(self.parts)

    def seconds_band(self) -> tuple[Array, Array]:
        """Between which the step is nine times out of ten."""
        return _band(self.seconds, self.time_spread)

    def memory_band(self) -> tuple[Array, Array]:
        """Between which the peak is nine times out of ten."""
        return _band(self.memory.total, self.memory_spread)


def predict(cases: Cases, rates: Coefficients) -> Prediction:
    """Step time by parts, and memory by tag. Where only one of them is asked for, `seconds_of` and `memory` are cheaper."""
    return Prediction(
        parts=_parts(cases, rates),
        memory=memory(cases, rates),
        time_spread=rates.time_spread,
        memory_spread=rates.memory_spread,
    )


def seconds_of(cases: Cases, rates: Coefficients) -> Array:
    """Of an optimizer step."""
    return _summed(_parts(cases, rates))


def _parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    """What a step is spent on.

    1. One micro-batch on the slowest rank of the pipeline: layers, output projection, tensor communication.
    2. Times the micro-batches; the pipeline adds its idle time and what boundaries cost.
    3. Gradient and parameter communication, less what backward and forward hide.
    4. The update, on the device or on the host.

    Where the data are scheduled, at points of the schedule, and their mean over the job.
    """
    return over_schedule(cases, lambda own: _parts_of(own, rates))


def _parts_of(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    checkpoint()
    even = _even_parts(cases, rates)
    return overlaid(cases, even, lambda own: _uneven_parts(own, rates)) if written_out(cases) else even


def _even_parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    batch, split = micro_batch(cases, rates), split_layers(cases)
    layers, has_head = _slowest(cases, batch, split)
    compute = layers * batch.layer + has_head * batch.head + batch.embedding
    tensor = layers * batch.layer_communication
    m, whole = cases.layouts.accumulation, _summed_over_ranks(cases, batch)
    return {
        "compute": m * (compute - _left_to_others(cases, compute + tensor, whole)) + rates.step_seconds,
        "tensor": m * tensor,
        "pipeline": _pipeline(cases, rates, compute + tensor, whole),
        "data": _data(cases, rates, compute + tensor, split),
        "optimizer": _optimizer(cases, rates, split),
        "offload": _offload(cases, rates, compute + tensor, split),
    }


def _uneven_parts(cases: Cases, rates: Coefficients) -> dict[str, Array]:
    """The same where the layers of stages are written out: each rank at its own pace.

    Micro-batches go at the pace of the slowest rank. What follows them, communication that does not hide behind them and the
    update, is that of the rank on which it takes longest.
    """
    paces, (recomputes, offloads) = paces_of(cases, rates), marked(cases)
    compute = tensor = everywhere = np.zeros(1)
    for share in shares_of(cases):
        own_compute, own_tensor = rank_seconds(paces, share, recomputes)
        everywhere = everywhere + own_compute + own_tensor
        own_compute = own_compute + where_it_runs(share, [own.knobs.embedding for own in paces])
        slower = own_compute + own_tensor > compute + tensor
        compute, tensor = np.where(slower, own_compute, compute), np.where(slower, own_tensor, tensor)
    after = {name: np.full(1, -np.inf) for name in ("data", "optimizer", "offload")}
    for share in shares_of(cases):
        own = after_backward(cases, rates, share, offloads, compute + tensor)
        longer = (share.layers > 0) & (_summed(own) > _summed(after))
        after = {name: np.where(longer, own[name], after[name]) for name in after}
    m = cases.layouts.accumulation
    return {
        "compute": m * (compute - _left_to_others(cases, compute + tensor, everywhere)) + rates.step_seconds,
        "tensor": m * tensor,
        "pipeline": _pipeline(cases, rates, compute + tensor, everywhere),
        **after,
    }


def after_backward(cases: Cases, rates: Coefficients, share: RankShare, marks: Array, pace: Array) -> dict[str, Array]:
    """What follows the micro-batches on a rank, of which the slowest takes `pace` seconds for one; `marks`: where the layout
    offloads.
    """
    split = Split(first=share.layers, last=share.layers, most=share.layers, place=share.place)
    told = [
        {
            "data": _data(own, rates, pace, split),
            "optimizer": _optimizer(own, rates, split),
            "offload": _offload(own, rates, pace, split),
        }
        for own in on_devices(offloading(cases, share, marks))
    ]
    return {name: where_it_runs(share, [own[name] for own in told]) for name in told[0]}


def _summed_over_ranks(cases: Cases, batch: MicroBatch) -> Array:
    """Seconds of a micro-batch on all ranks of the pipeline together."""
    return cases.shapes.layers * (batch.layer + batch.layer_communication) + batch.head


def _summed(parts: dict[str, Array]) -> Array:
    return reduce(np.add, parts.values())


def _slowest(cases: Cases, batch: MicroBatch, split: Split) -> tuple[Array, Array]:
    """Layers of the rank that takes longest, and whether it is the one with the output projection."""
    layer = batch.layer + batch.layer_communication
    with_head = split.last * layer + batch.head
    without = split.before_last * layer
    alone = cases.layouts.pipeline == 1
    last = alone | (with_head >= without)
    return np.where(last, split.last, split.before_last), np.where(last, 1.0, 0.0)


def _left_to_others(cases: Cases, slowest: Array, whole: Array) -> Array:
    """Seconds of a micro-batch by which the slowest rank is quicker than alone, since those that wait leave it their cores."""
    left: Array = (1 - cases.hardware.idle_cost) * (slowest - _mean_pace(cases, slowest, whole))
    return left


def _mean_pace(cases: Cases, slowest: Array, whole: Array) -> Array:
    """Seconds of a micro-batch on the mean rank; on the one that there is without a pipeline."""
    p = cases.layouts.pipeline
    return np.where(p > 1, np.minimum(whole / p, slowest), slowest)


def _pipeline(cases: Cases, rates: Coefficients, slowest: Array, whole: Array) -> Array:
    """Idle time, at the pace of the mean rank: those before wait for the first micro-batch, those after for the last.

    Boundaries move 2 b s h / c bytes (/ t under sequence parallelism); exposed while the pipeline fills and drains, and a
    latency for every micro-batch.
    """
    layouts = cases.layouts
    crossed = 2 * boundaries(cases) * hop_seconds(cases, rates)
    exposed = crossed * (layouts.accumulation * 0.5 + layouts.pipeline - 1)
    return np.where(layouts.pipeline > 1, idle_micro_batches(cases) * _mean_pace(cases, slowest, whole) + exposed, 0.0)


def hop_seconds(cases: Cases, rates: Coefficients) -> Array:
    """Seconds until a micro-batch's hidden state is on the next stage."""
    layouts, shapes = cases.layouts, cases.shapes
    divided = np.where((layouts.sequence_parallel > 0) | (cases.software.scatters > 0), layouts.tensor, 1.0)
    tokens = layouts.micro_batch * trained_tokens(cases) / layouts.context
    message = tokens * shapes.hidden * layouts.parameter_bytes / divided
    hop: Array = message / boundary_bandwidth(cases, rates) + rates.hop_seconds
    return hop


def _data(cases: Cases, rates: Coefficients, slowest: Array, split: Split) -> Array:
    return exposed_state_seconds(cases, rates, slowest, split, _held(cases, split))


def _optimizer(cases: Cases, rates: Coefficients, split: Split) -> Array:
    local = _local_parameters(cases, split) * (1 - cases.layouts.offload_optimizer)
    return update_seconds(cases, rates, local, split.before_last)


def _offload(cases: Cases, rates: Coefficients, slowest: Array, split: Split) -> Array:
    """The update on the host, gradients to it beyond what backward hides, parameters back; what of parameters and saved
    activations every micro-batch copies.
    """
    layouts, hardware = cases.layouts, cases.hardware
    local = _local_parameters(cases, split) * layouts.offload_optimizer
    backward = slowest * rates.backward_ratio / (1 + rates.backward_ratio)
    # What hides communication does not hide copies as well.
    free = np.where(layouts.data * layouts.context > 1, rates.data_exposed, 1.0)
    # Integers are summed in fp32 before they leave.
    width = np.where(sends_integers(cases), MASTER_WIDTH, layouts.reduce_bytes)
    down = np.maximum(local * width / hardware.host_link - backward * np.minimum(free, 1.0), 0.0)
    up = local * layouts.parameter_bytes / hardware.host_link
    per_rank = hardware.host_bandwidth / np.minimum(hardware.devices_per_node, _world(cases))
    update = local * 30 / (per_rank * rates.host_update_efficiency)
    shared = _local_parameters(cases, split)
    update = np.maximum(update, file_update_seconds(cases, rates, local, shared))
    fetched = shared * layouts.parameter_bytes * layouts.offload_parameters
    waited = file_read_seconds(cases, rates, shared, slowest)
    saved = offloaded_activations.exposed_seconds(cases, rates, split.before_last, kept_layer_bytes(cases), slowest)
    return saved + down + up + update + 2 * layouts.accumulation * fetched / hardware.host_link + waited


def _held(cases: Cases, split: Split) -> StageParameters:
    """What the rank with the most layers holds, the input table with it."""
    alone = np.where(cases.layouts.pipeline == 1, 1.0, 0.0)
    return stage_parameters(cases, split.before_last, np.ones(1), alone)


def _local_parameters(cases: Cases, split: Split) -> Array:
    return divided(cases, _held(cases, split), np.where(cases.layouts.zero_stage >= 1, cases.layouts.shard, 1.0))


def _world(cases: Cases) -> Array:
    layouts = cases.layouts
    return layouts.data * layouts.tensor * layouts.pipeline * layouts.context


def _band(values: Array, spread: float) -> tuple[Array, Array]:
    return values * np.exp(-Z90 * spread), values * np.exp(Z90 * spread)
