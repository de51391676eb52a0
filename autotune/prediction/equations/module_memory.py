"""Bytes that a rank holds at its peak while it trains a user's module: the module's trace and the engine's states together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, DescribedModule
from autotune.prediction.equations.distinct_rows import DistinctRows
from autotune.prediction.equations.module_pipeline import (
    ModuleStage,
    PipelineLayout,
    Shape,
    composed,
    curve_of,
    cut_stage,
    is_legal,
    kept_by_block,
    received_buffers,
    shape_of,
    shortened,
    stages_of,
)
from autotune.prediction.equations.module_replay import follow, replay
from autotune.prediction.equations.module_states import (
    GRADIENTS,
    Held,
    StateKnobs,
    StateSeries,
    micro_batches,
)
from search_spaces.communication import cut
from search_spaces.models.module_profile import Affine, ModuleProfile, Trace, at

STATES = (
    "shard", "zero_stage", "accumulation", "offload_optimizer", "offload_parameters", "parameter_bytes", "reduce_bytes",
    "accumulation_bytes", "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
    "overlap_comm", "defer_gradient_reduction", "reshard_after_forward", "pipeline",
)  # fmt: skip
"""Fields of `Layouts` that decide how states are sharded and sent."""
PIPELINE = ("pipeline", "virtual_stages", "pipeline_schedule")
MOMENTS = ("activation_checkpointing", "checkpoint_every_k", "offload_activations")
COLUMNS = (
    *STATES, "virtual_stages", "pipeline_schedule", *MOMENTS, "tensor", "micro_batch_size", "allgather_bucket_size",
    "moment_bytes", "other_moment_bytes", "overlap_param_gather",
)  # fmt: skip
"""Fields of `Layouts` on which the memory depends."""
PEAK = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "host")
"""The result by column."""
Columns = dict[str, Array]
"""Field, or `pipeline_rank`: the rank's position in the pipeline -> its value in each case."""


def gathers_of_step(cases: Cases) -> tuple[Array, Array]:
    """Gathers of parameters in a step of stage 3, and the bytes of their messages: of the first rank of a pipeline."""
    module = _module(cases)
    rows = DistinctRows.of({name: getattr(cases.layouts, name) for name in (*STATES, *PIPELINE[1:], *MOMENTS[:2])})
    traffic = np.zeros((rows.count, 2))
    for row in np.flatnonzero(rows.columns["zero_stage"] == 3).tolist():
        traffic[row] = _gathered(module, {name: float(values[row]) for name, values in rows.columns.items()})
    return rows.spread(traffic[:, 0]), rows.spread(traffic[:, 1])


def _gathered(module: DescribedModule, values: dict[str, float]) -> tuple[float, float]:
    states, count = _knobs(module, tuple(values[name] for name in STATES)), values["accumulation"]
    policy, every, _ = _moments(module, {**values, "offload_activations": 0.0})
    if values["pipeline"] == 1:
        return _steps(_shape(module, policy, every), states).gathered(count)
    layout = _layout({**values, "pipeline_rank": 0.0}, int(count))
    if not is_legal(module.profile, layout):
        return 0.0, 0.0
    traffic = [follow(stage.shape, states).gathered(count) for stage in _stages(module, layout, policy, every, offloads=False)]
    return sum(times for times, _ in traffic), sum(sizes for _, sizes in traffic)


def module_bytes(cases: Cases, pipeline_rank: Array) -> dict[str, Array]:
    """The bytes of `PEAK` for each case, evaluated once for each combination of the values that matter.

    `pipeline_rank`: the rank's position in the pipeline.
    """
    module = _module(cases)
    rows = DistinctRows.of({**{name: getattr(cases.layouts, name) for name in COLUMNS}, "pipeline_rank": pipeline_rank})
    columns = rows.columns
    ranks, virtual_stages, schedule = (columns[name] for name in PIPELINE)
    columns["short"] = shortened(ranks, virtual_stages, schedule, columns["accumulation"])
    peak_bytes = np.zeros((rows.count, len(PEAK)))
    for places in rows.alike((*PIPELINE, *MOMENTS, "pipeline_rank", "short")):
        peak_bytes[places] = _group_bytes(module, DistinctRows({name: values[places] for name, values in columns.items()}))
    return {name: rows.spread(peak_bytes[:, column]) for column, name in enumerate(PEAK)}


def _module(cases: Cases) -> DescribedModule:
    assert cases.module is not None
    return cases.module


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fullest:
    """The fullest moment of a rank's step in each case, in bytes, as if tensor-parallel ranks divided nothing."""

    moment: Array
    """(cases, 4): activations, parameters, gradients and buffers, of what follows the moments."""
    received: Array
    """Buffers of hidden states, which nothing divides."""
    on_host: Array
    """Activations in the main memory."""


def _group_bytes(module: DescribedModule, rows: DistinctRows) -> Array:
    """(cases, columns of `PEAK`) of cases with one pipeline and one kind of checkpointing."""
    first = {name: float(values[0]) for name, values in rows.columns.items()}
    knobs, knob_index = _distinct_knobs(module, rows)
    profiles = [module.profile]
    if first["pipeline"] > 1:
        layout = _layout(first, int(first["short"]))
        if not is_legal(module.profile, layout):  # rules refuse it, but grids evaluate it
            return np.zeros((rows.count, len(PEAK)))
        stages = _stages(module, layout, *_moments(module, first))
        profiles = [stage.profile for stage in stages]
        fullest = _of_pipeline(module, rows, layout, stages, knobs, knob_index)
    else:
        fullest = _of_module(module, rows, knobs, knob_index)
    columns, trace, part = rows.columns, module.trace, 1 / rows.columns["tensor"]
    activations, parameters, gradients, buffers = (part * column for column in fullest.moment.T)
    standing, state, host = _state_bytes(module, profiles, rows, knobs, knob_index)
    inputs = columns["accumulation"] * _at(trace.batch_bytes, columns["micro_batch_size"])
    peak_columns = (
        parameters + standing * part, gradients, state * part, activations + inputs,
        buffers + fullest.received + trace.buffer_bytes, host * part + fullest.on_host,
    )  # fmt: skip
    return np.stack(peak_columns, axis=1)


def _of_pipeline(
    module: DescribedModule, rows: DistinctRows, layout: PipelineLayout, stages: Sequence[ModuleStage],
    knobs: Sequence[StateKnobs], knob_index: NDArray[np.int64],
) -> _Fullest:  # fmt: skip
    """Of a rank's stages together: while they run, while the optimizer steps, and while updated parameters are gathered."""
    columns, profile, trace = rows.columns, module.profile, module.trace
    batch = columns["micro_batch_size"]
    hidden = _at(trace.hidden_bytes, batch)
    replayed = replay(layout, stages, knobs, knob_index, batch, hidden, columns["accumulation"] - columns["short"])
    stepping, refilling = _updates([stage.profile for stage in stages], rows, knobs, knob_index)
    nothing = np.zeros(rows.count)
    moments = np.stack([
        np.column_stack([replayed.activations, replayed.states]),
        np.column_stack([replayed.sent, nothing, replayed.after[:, GRADIENTS], stepping.sum(axis=0)]),
        np.column_stack([replayed.sent, nothing, nothing, refilling.max(axis=0)]),
    ])  # fmt: skip
    policy, _, offloads = _moments(module, {name: float(columns[name][0]) for name in MOMENTS})
    on_host = nothing
    if offloads:
        blocks_held = sum(len(blocks) for _, blocks in stages_of(profile, layout)) / max(len(profile.block_names), 1)
        sizes, batch_index = np.unique(batch, return_inverse=True)
        on_host = (
            np.array([_offloaded(trace, policy, size) for size in sizes.tolist()])[batch_index]
            * blocks_held
            * replayed.in_flight
        )
    received = received_buffers(layout) * columns["accumulation"] * hidden
    return _Fullest(
        moment=moments[moments.sum(axis=2).argmax(axis=0), np.arange(rows.count)], received=received, on_host=on_host
    )


def _of_module(
    module: DescribedModule, rows: DistinctRows, knobs: Sequence[StateKnobs], knob_index: NDArray[np.int64]
) -> _Fullest:
    """Of a rank without a pipeline."""
    batch = rows.columns["micro_batch_size"]
    policy, every, offloads = _moments(module, {name: float(rows.columns[name][0]) for name in MOMENTS})
    curve, shape = curve_of(module.trace, policy, every, offloads), _shape(module, policy, every)
    stepping, refilling = _updates([module.profile], rows, knobs, knob_index)
    nothing = np.zeros(rows.count)
    pairs = [*zip(knob_index.tolist(), batch.tolist(), strict=True)]
    steps = [_steps(shape, states) for states in knobs]
    once = {(index, size): _fullest_moment(steps[index], curve, size) for index, size in dict.fromkeys(pairs)}
    after = np.array([step.after[GRADIENTS] for step in steps])[knob_index]
    moments = np.stack([
        np.array([once[pair] for pair in pairs]),
        np.column_stack([nothing, nothing, after, stepping[0]]),
        np.column_stack([nothing, nothing, nothing, refilling[0]]),
    ])  # fmt: skip
    on_host = np.array([_offloaded(module.trace, policy, size) for size in batch.tolist()]) if offloads else nothing
    return _Fullest(
        moment=moments[moments.sum(axis=2).argmax(axis=0), np.arange(rows.count)], received=nothing, on_host=on_host
    )


def _fullest_moment(steps: "_Steps", curve: Array, batch: float) -> Array:
    """(4): the fullest moment of the first and of the last micro-batch."""
    peaks, levels = (curve[:, 2 * column] + curve[:, 2 * column + 1] * batch for column in range(2))
    moments = np.concatenate([
        np.concatenate([np.column_stack([peaks, states]), np.column_stack([levels, acting])])
        for states, acting in zip(steps.during, steps.acting, strict=True)
    ])  # fmt: skip
    fullest: Array = moments[int(moments.sum(axis=1).argmax())]
    return fullest


def _at(value: Affine, samples: Array) -> Array:
    return value[0] + value[1] * samples


def _moments(module: DescribedModule, values: dict[str, float]) -> tuple[str, int, bool]:
    """Checkpointing, its distance, and whether activations are offloaded."""
    policy = RECOMPUTE[int(values["activation_checkpointing"])] if module.profile.block_names else RECOMPUTE[0]
    return policy, int(values["checkpoint_every_k"]), values["offload_activations"] > 0


def _layout(values: dict[str, float], micro_batches: int) -> PipelineLayout:
    return PipelineLayout(
        ranks=int(values["pipeline"]), virtual_stages=int(values["virtual_stages"]), schedule=int(values["pipeline_schedule"]),
        pipeline_rank=int(values["pipeline_rank"]), micro_batches=micro_batches,
    )  # fmt: skip


def _stages(module: DescribedModule, layout: PipelineLayout, policy: str, every: int, offloads: bool) -> list[ModuleStage]:
    cuts = stages_of(module.profile, layout)
    return [cut_stage(module.profile, module.trace, policy, every, offloads, blocks) for _, blocks in cuts]


def _distinct_knobs(module: DescribedModule, rows: DistinctRows) -> tuple[list[StateKnobs], NDArray[np.int64]]:
    """How states are sharded and sent, each once, and which of it each case has."""
    table = np.stack([rows.columns[name] for name in STATES], axis=1)
    indices: dict[StateKnobs, int] = {}
    knob_index = [indices.setdefault(_knobs(module, tuple(row)), len(indices)) for row in table.tolist()]
    return [*indices], np.array(knob_index)


@lru_cache(maxsize=1 << 16)
def _knobs(module: DescribedModule, row: tuple[float, ...]) -> StateKnobs:
    """The knobs that matter at the stage; others, and sizes beyond the module's, have one value. `row`: see `STATES`."""
    knobs = dict(zip(STATES, row, strict=True))
    stage, width = int(knobs["zero_stage"]), knobs["parameter_bytes"]
    master, three = max(width, 4.0), stage == 3
    elements, accumulates = float(sum(_shared_elements(module.profile, 1))), knobs["accumulation"] > 1
    summed = knobs["accumulation_bytes"] if knobs["accumulation_bytes"] < 4 else master
    return StateKnobs(
        zero_stage=stage, ranks=int(knobs["shard"]) if stage else 1, width=width, master_width=master,
        reduce_width=knobs["reduce_bytes"] if knobs["reduce_bytes"] < 4 else master,
        sum_width=summed if accumulates else master, accumulates=accumulates, overlaps=knobs["overlap_comm"] > 0,
        defers=stage == 2 and accumulates and knobs["defer_gradient_reduction"] > 0,
        reshards=not three or knobs["reshard_after_forward"] > 0,
        bucket=min(knobs["reduce_bucket_size"], elements),
        prefetch=min(knobs["prefetch_bucket_size"], elements) if three else 0.0,
        persistence=_largest_below(module.profile, knobs["param_persistence_threshold"]) if three else 0.0,
        max_live=min(knobs["max_live_parameters"], elements) if three else 0.0, copies=module.copies,
        shard_beside_master=three and knobs["offload_optimizer"] > 0 and not knobs["offload_parameters"],
        pipelined=knobs["pipeline"] > 1, shard_on_host=three and knobs["offload_parameters"] > 0,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _largest_below(profile: ModuleProfile, threshold: float) -> float:
    """Elements of the largest parameter that a threshold keeps whole."""
    return float(max((parameter.elements for parameter in profile.trained if parameter.elements <= threshold), default=0))


@lru_cache(maxsize=4096)
def _shared_elements(profile: ModuleProfile, ranks: int) -> tuple[int, int]:
    """Elements of a rank's share of the trained parameters, with padding: inside and outside of blocks."""
    inside = sum(-(-parameter.elements // ranks) for parameter in profile.trained if parameter.block >= 0)
    return inside, sum(-(-parameter.elements // ranks) for parameter in profile.trained) - inside


def _state_bytes(
    module: DescribedModule, profiles: Sequence[ModuleProfile], rows: DistinctRows, knobs: Sequence[StateKnobs],
    knob_index: NDArray[np.int64],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Of the parts of a module on a rank, in each case:

    - Parameters that are there throughout; what stage 3 gathers is counted with the moments.
    - The device's part of the optimizer's state: the master, unless parameters are views of it, and moments.
    - State and parameters in the main memory.
    """
    columns, frozen = rows.columns, module.trace.frozen_bytes / max(module.profile.frozen, 1)
    whole = sum(sum(_shared_elements(profile, 1)) for profile in profiles)
    shares = [np.sum([_shared_elements(profile, states.ranks) for profile in profiles], axis=0) for states in knobs]
    inside, outside = np.array(shares, dtype=np.float64)[knob_index].T
    fields = [
        (states.zero_stage, states.ranks, states.width, states.master_width, states.shard_beside_master) for states in knobs
    ]
    stage, ranks, width, master, beside = np.array(fields, dtype=np.float64)[knob_index].T
    elements, offloaded = inside + outside, columns["offload_optimizer"]
    late = (columns["overlap_param_gather"] > 0) & ((stage == 1) | (stage == 2)) & (ranks > 1) & (offloaded > 0)
    standing = frozen * sum(profile.frozen for profile in profiles) + np.where(
        stage < 3, whole * width, beside * elements * width
    )
    views = (stage == 0) & (width == master)
    moments = inside * columns["moment_bytes"] + outside * columns["other_moment_bytes"]
    on_device = (elements * np.where(views, 0.0, master) + moments * master / 4) * (1 - offloaded)
    of_host = elements * offloaded * (master + columns["moment_bytes"] * master / 4)
    on_host = of_host + elements * width * columns["offload_parameters"]
    return standing + np.where(late, elements * width, 0.0), on_device, on_host


def _updates(
    profiles: Sequence[ModuleProfile], rows: DistinctRows, knobs: Sequence[StateKnobs], knob_index: NDArray[np.int64]
) -> tuple[Array, Array]:
    """(profiles, cases) bytes of buffers in the update: while the optimizer steps, beside the gradients, and while updated
    parameters are gathered (stages 1 and 2)."""
    columns = rows.columns
    chosen = knob_index.tolist(), columns["allgather_bucket_size"].tolist(), (columns["offload_optimizer"] > 0).tolist()
    cases = [*zip(*chosen, strict=True)]
    once = {case: [_update(profile, knobs[case[0]], *case[1:]) for profile in profiles] for case in dict.fromkeys(cases)}
    stepping, refilling = np.array([once[case] for case in cases]).T
    return stepping, refilling


def _update(profile: ModuleProfile, states: StateKnobs, bucket: float, offloaded: bool) -> tuple[float, float]:
    share_bytes = sum(_shared_elements(profile, states.ranks)) * states.width
    offloads = offloaded and states.zero_stage < 3
    stepping = share_bytes if offloads else 0.0
    if states.zero_stage not in (1, 2) or states.ranks == 1:
        return stepping, stepping
    casts = states.width < states.master_width and not offloads
    bucket = min(bucket, float(sum(_shared_elements(profile, 1))))
    return stepping, stepping + _refilling(profile, states.ranks, states.width, casts, states.copies, states.overlaps, bucket)


@lru_cache(maxsize=4096)
def _refilling(
    profile: ModuleProfile, ranks: int, width: float, casts: bool, copies: bool, overlaps: bool, bucket: float
) -> float:
    """Bytes of the buckets in which updated parameters are gathered."""
    sizes = [parameter.elements for parameter in reversed(profile.trained)]
    rows = []
    for group in cut(range(len(sizes)), sizes.__getitem__, bucket):
        columns = sum(-(-sizes[index] // ranks) for index in group)
        padded = sum(-(-sizes[index] // ranks) * ranks for index in group if sizes[index] % ranks)
        bucket_bytes = columns * width * (ranks + (1 if casts else 0))
        rows.append((bucket_bytes + (columns * width * ranks if copies else 0.0), bucket_bytes + padded * width))
    at_once = 2 if overlaps else 1
    return max(
        max(sum(first for first, _ in rows[index : index + at_once]),
            rows[index][1] + sum(first for first, _ in rows[index + 1 : index + at_once]))
        for index in range(len(rows))
    )  # fmt: skip


class _Steps:
    """The states as arrays of shape (moments, 3), for each micro-batch."""

    def __init__(self, steps: Sequence[StateSeries], after: Held) -> None:
        self.during = [np.array(step.during) for step in steps]
        self.acting = [np.array(step.acting) for step in steps]
        self.after, self._steps = after, steps

    def gathered(self, micro_batches: float) -> tuple[float, float]:
        """Gathers of a step and the bytes of their messages: every micro-batch but the last is like the first."""
        first, last = self._steps[0], self._steps[-1]
        before = micro_batches - 1
        return before * first.gathers + last.gathers, before * first.gathered_bytes + last.gathered_bytes


@lru_cache(maxsize=4096)
def _steps(shape: Shape, states: StateKnobs) -> _Steps:
    steps, after = micro_batches(shape.trained, shape.marks, states)
    return _Steps(steps, after)


@lru_cache(maxsize=1024)
def _shape(module: DescribedModule, policy: str, every: int) -> Shape:
    marks = tuple((moment.mark, moment.index) for moment in composed(module.trace, policy, every))
    return shape_of(module.profile.trained, marks)


def _offloaded(trace: Trace, policy: str, batch: float) -> float:
    by_block = kept_by_block(composed(trace, policy, 1))
    return sum(max(at(value, batch), 0.0) for block, value in by_block.items() if block + 1 < len(by_block))


def kept_bytes(module: DescribedModule, policy: int, every: float, batch: float) -> float:
    """Bytes that a mean block keeps for backward."""
    name = RECOMPUTE[policy] if module.profile.block_names else RECOMPUTE[0]
    by_block = kept_by_block(composed(module.trace, name, int(every)))
    return sum(max(at(value, batch), 0.0) for value in by_block.values()) / max(len(by_block), 1)
