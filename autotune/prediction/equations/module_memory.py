"""Bytes that a rank holds at its peak while it trains a user's module: the module's trace and the engine's states together.

What a rank holds while it acts follows from the action, from the number of micro-batches of each of its stages that wait for
their backward, and from the gradients sent. A schedule visits few such situations, which do not depend on sizes: they are
listed once per layout, and the fullest is found for all cases together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE, SCHEDULES, Array, Cases, DescribedModule
from autotune.prediction.equations.module_pipeline import (
    ModuleStage,
    PipelineLayout,
    actions_of_rank,
    composed,
    cut_stage,
    is_legal,
    kept_by_block,
    received_buffers,
    shortened,
    stages_of,
)
from autotune.prediction.equations.module_states import GRADIENTS, STEPS, StageStates, StateKnobs, follow
from executor.parallel.schedule import ActionKind
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
    "master_bytes", "moment_bytes", "other_moment_bytes", "overlap_param_gather",
)  # fmt: skip
"""Fields of `Layouts` on which the memory depends."""
PEAK = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "host")
"""The result by column."""


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """Distinct combinations of values."""

    columns: dict[str, Array]
    """Name -> (rows)."""
    inverse: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The row of each case."""
    shape: tuple[int, ...] = ()
    """Of the cases."""

    @staticmethod
    def of(columns: Mapping[str, Array]) -> "DistinctRows":
        """The distinct rows of columns that broadcast against each other."""
        shape = np.broadcast_shapes(*(values.shape for values in columns.values()))
        codes = np.broadcast_to(_codes([*columns.values()]), shape).reshape(-1)
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        distinct_columns = {name: np.broadcast_to(values, shape).reshape(-1)[first] for name, values in columns.items()}
        return DistinctRows(distinct_columns, inverse.reshape(-1), shape)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def spread(self, values: Array) -> Array:
        """Values by row as an array over the cases."""
        return values[self.inverse].reshape(self.shape)

    def alike(self, names: Sequence[str]) -> Iterator[NDArray[np.int64]]:
        """Places of rows with equal values in these columns."""
        codes = np.broadcast_to(_codes([self.columns[name] for name in names]), (self.count,))
        order = codes.argsort(kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)


def _codes(columns: Sequence[Array]) -> NDArray[np.int64]:
    """Equal numbers for equal combinations, of the columns' common shape."""
    codes, count = np.zeros(1, dtype=np.int64), 1
    for values in columns:
        distinct_values, value_codes = np.unique(values, return_inverse=True)
        if len(distinct_values) == 1:
            continue
        if count * len(distinct_values) > 1 << 62:  # an int64 cannot number more
            distinct_codes, renumbered = np.unique(codes, return_inverse=True)
            codes, count = renumbered.reshape(codes.shape), len(distinct_codes)
        codes = codes * len(distinct_values) + value_codes.reshape(values.shape)
        count *= len(distinct_values)
    return codes


def gathers_of_step(cases: Cases) -> tuple[Array, Array]:
    """Gathers of parameters in a step of stage 3, and the bytes of their messages: of the first rank of a pipeline."""
    module = cases.described
    rows = DistinctRows.of({name: getattr(cases.layouts, name) for name in (*STATES, *PIPELINE[1:], *MOMENTS[:2])})
    traffic = np.zeros((rows.count, 2))
    for row in np.flatnonzero(rows.columns["zero_stage"] == 3).tolist():
        traffic[row] = _gathered(module, {name: float(values[row]) for name, values in rows.columns.items()})
    return rows.spread(traffic[:, 0]), rows.spread(traffic[:, 1])


def _gathered(module: DescribedModule, values: dict[str, float]) -> tuple[float, float]:
    states, count = _knobs(module, tuple(values[name] for name in STATES)), values["accumulation"]
    layout = _layout({**values, "pipeline_rank": 0.0}, int(count))
    if not is_legal(module.profile, layout):
        return 0.0, 0.0
    policy, every, _ = _moments(module, {**values, "offload_activations": 0.0})
    traffic = [follow(stage.shape, states).gathered(count) for stage in _stages(module, layout, policy, every, offloads=False)]
    return sum(times for times, _ in traffic), sum(sizes for _, sizes in traffic)


def module_bytes(cases: Cases, pipeline_rank: Array) -> dict[str, Array]:
    """The bytes of `PEAK` for each case, evaluated once for each combination of the values that matter.

    `pipeline_rank`: the rank's position in the pipeline.
    """
    module = cases.described
    rows = DistinctRows.of({**{name: getattr(cases.layouts, name) for name in COLUMNS}, "pipeline_rank": pipeline_rank})
    columns = rows.columns
    ranks, virtual_stages, schedule = (columns[name] for name in PIPELINE)
    columns["short"] = shortened(ranks, virtual_stages, schedule, columns["accumulation"])
    peak_bytes = np.zeros((rows.count, len(PEAK)))
    for places in rows.alike((*PIPELINE, *MOMENTS, "pipeline_rank", "short")):
        peak_bytes[places] = _group_bytes(module, DistinctRows({name: values[places] for name, values in columns.items()}))
    return {name: rows.spread(peak_bytes[:, column]) for column, name in enumerate(PEAK)}


def _group_bytes(module: DescribedModule, rows: DistinctRows) -> Array:
    """(cases, columns of `PEAK`) of cases with one pipeline and one kind of checkpointing.

    The fullest moment of a rank's stages together: while they run, while the optimizer steps, or while updated parameters are
    gathered. Tensor-parallel ranks divide all but inputs and received hidden states.
    """
    columns, profile, trace = rows.columns, module.profile, module.trace
    first = {name: float(values[0]) for name, values in columns.items()}
    layout = _layout(first, int(first["short"]))
    if not is_legal(profile, layout):  # rules refuse it, but grids evaluate it
        return np.zeros((rows.count, len(PEAK)))
    knobs, knob_index = _distinct_knobs(module, rows)
    policy, every, offloads = _moments(module, first)
    stages = _stages(module, layout, policy, every, offloads)
    profiles = [stage.profile for stage in stages]
    batch, part = columns["micro_batch_size"], 1 / columns["tensor"]
    hidden = _at(trace.hidden_bytes, batch)
    replayed = replay(layout, stages, knobs, knob_index, batch, hidden, columns["accumulation"] - columns["short"])
    stepping, refilling = _updates(profiles, rows, knobs, knob_index)
    nothing = np.zeros(rows.count)
    moments = np.stack([
        np.column_stack([replayed.activations, replayed.states]),
        np.column_stack([replayed.sent, nothing, replayed.after[:, GRADIENTS], stepping.sum(axis=0)]),
        np.column_stack([replayed.sent, nothing, nothing, refilling.max(axis=0)]),
    ])  # fmt: skip
    fullest = moments[moments.sum(axis=2).argmax(axis=0), np.arange(rows.count)]
    activations, parameters, gradients, buffers = (part * column for column in fullest.T)
    activations_on_host = nothing
    if offloads:
        share = sum(len(blocks) for _, blocks in stages_of(profile, layout)) / max(len(profile.block_names), 1)
        activations_on_host = share * replayed.in_flight * _offloaded(trace, policy, batch)
    standing, state, host = _state_bytes(module, profiles, rows, knobs, knob_index)
    inputs = columns["accumulation"] * _at(trace.batch_bytes, batch)
    received = received_buffers(layout) * columns["accumulation"] * hidden
    peak_columns = (
        parameters + standing * part, gradients, state * part, activations + inputs, buffers + received + trace.buffer_bytes,
        host * part + activations_on_host,
    )  # fmt: skip
    return np.stack(peak_columns, axis=1)


KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
"""What has a peak of its own; gradients of weights have that of a whole backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situations:
    """What a rank comes through in a step of a layout: one row for each that can be the fullest. S stages, n rows."""

    peaks: NDArray[np.int64]
    """(n): which peak: (stage x kinds + kind) x steps + step."""
    waiting: Array
    """(n, S): micro-batches of each stage that wait for their backward."""
    other_states: NDArray[np.int64]
    """(n, S): in which states each stage stands: as a step begins, after the last one, or (the acting stage) none."""
    sent: Array
    """(n): gradients of hidden states that were sent."""
    sent_at_end: float
    in_flight: float
    """Most micro-batches that wait, of a mean stage."""


@lru_cache(maxsize=4096)
def situations_of(layout: PipelineLayout, first: int) -> Situations:
    """The situations of a rank; `first`: the position of its stage that sends no gradients, or -1."""
    actions, count = actions_of_rank(layout), layout.micro_batches
    stages = {stage: position for position, stage in enumerate(layout.stages)}
    done, waiting, standing = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    sent = most = 0
    situations: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    for action in actions:
        position = stages[action.stage]
        forward, inputs = action.kind is ActionKind.FORWARD, action.kind is ActionKind.INPUT_GRADIENT
        step = min(done[position], STEPS - 1) if forward else _step_after(done[position], count)
        kind = KINDS.index(action.kind) if action.kind in KINDS else 1
        other_states = tuple(STEPS + 1 if other == position else state for other, state in enumerate(standing))
        # What was sent only grows.
        situations[(position * len(KINDS) + kind) * STEPS + step, tuple(waiting), other_states] = sent
        if forward:
            waiting[position] += 1
            most = max(most, sum(waiting))
        elif not inputs:
            waiting[position] -= 1
            done[position] += 1
            standing[position] = STEPS if done[position] >= count else _step_after(done[position], count)
        sent += action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) and position != first
    return Situations(
        peaks=np.array([peak for peak, _, _ in situations]),
        waiting=np.array([waits for _, waits, _ in situations], dtype=np.float64),
        other_states=np.array([other_states for _, _, other_states in situations]),
        sent=np.array([*situations.values()], dtype=np.float64), sent_at_end=sent, in_flight=most / len(stages),
    )  # fmt: skip


def _step_after(done: int, count: int) -> int:
    """The step of the micro-batch after `done` ones: one of the first, or the last."""
    return STEPS - 1 if done >= count - 1 else min(done, STEPS - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A rank's steps, in bytes: arrays over the cases."""

    activations: Array
    """At the fullest moment."""
    states: Array
    """(cases, 3): at the fullest moment, of the states that follow the moments."""
    after: Array
    """(cases, 3): after all backwards."""
    sent: Array
    """Gradients of hidden states that are kept until the end of the step."""
    in_flight: float
    """Most micro-batches whose activations are held, of a mean stage."""


def replay(
    layout: PipelineLayout, stages: Sequence[ModuleStage], knobs: Sequence[StateKnobs], knob_index: NDArray[np.int64],
    batch: Array, hidden: Array, skipped: Array,
) -> Replayed:  # fmt: skip
    """Find the fullest moment of a rank in steps of its schedule.

    1. For each stage, the peak of each kind of action in each step that differs, relative to the activations that wait.
    2. For each situation, that peak, what waits, what was sent and what the other stages hold.

    Args:
        layout: the pipeline, `shortened`.
        stages: the rank's stages.
        knobs: how states are sharded and sent, each once.
        knob_index: (cases) the knobs of each case.
        batch: (cases) samples of a micro-batch.
        hidden: (cases) bytes of a micro-batch's hidden state.
        skipped: (cases) micro-batches that the shortened layout leaves out.
    """
    first = next((position for position, stage in enumerate(stages) if stage.first), -1)
    visited = situations_of(layout, first)
    runs = [_StageRuns(stage, knobs, knob_index, batch) for stage in stages]
    activations = np.concatenate([run.activations for run in runs])
    state_bytes = np.concatenate([run.states for run in runs])
    totals = activations + state_bytes.sum(axis=2)
    waits = visited.waiting @ np.stack([run.kept for run in runs])
    waits = waits + visited.sent[:, None] * hidden + skipped * hidden * sum(not stage.first for stage in stages)
    full = waits + totals[visited.peaks]
    if len(runs) > 1:
        for position, run in enumerate(runs):
            full = full + run.standing.sum(axis=2)[visited.other_states[:, position]]
    best, cases = full.argmax(axis=0), np.arange(len(batch))
    states = state_bytes[visited.peaks[best], cases]
    if len(runs) > 1:
        for position, run in enumerate(runs):
            states = states + run.standing[visited.other_states[best, position], cases]
    return Replayed(
        activations=waits[best, cases] + activations[visited.peaks[best], cases],
        states=states,
        after=np.sum([run.standing[STEPS] for run in runs], axis=0),
        sent=(visited.sent_at_end + skipped * sum(not stage.first for stage in stages)) * hidden,
        in_flight=visited.in_flight,
    )


class _StageRuns:
    """A stage's micro-batches, for many cases."""

    def __init__(self, stage: ModuleStage, knobs: Sequence[StateKnobs], knob_index: NDArray[np.int64], batch: Array) -> None:
        followed = [follow(stage.shape, knob) for knob in knobs]
        self.kept: Array = stage.curve[stage.turn - 1, 2] + stage.curve[stage.turn - 1, 3] * batch
        highest = stage.curve[stage.turn :, :2]
        inputs = np.maximum((highest[:, :1] + np.outer(highest[:, 1], batch)).max(axis=0) - self.kept, 0.0)
        pairs = [*zip(knob_index.tolist(), batch.tolist(), strict=True)]
        distinct = {pair: index for index, pair in enumerate(dict.fromkeys(pairs))}
        parts = [_fullest(stage, followed[index], size) for index, size in distinct]
        # (cases, kinds x steps, 4): activations and states.
        moments = np.array(parts)[[distinct[pair] for pair in pairs]]
        begun = np.array([states.begun for states in followed])[knob_index]
        of_inputs = np.concatenate([np.repeat(inputs[:, None, None], STEPS, axis=1), begun], axis=2)
        moments = np.concatenate([moments, of_inputs], axis=1).transpose(1, 0, 2)
        self.activations: Array = moments[..., 0]
        """(kinds x steps, cases)"""
        self.states: Array = moments[..., 1:]
        """(kinds x steps, cases, 3)"""
        end = np.array([states.end for states in followed])[knob_index]
        self.standing: Array = np.stack([*begun.transpose(1, 0, 2), end, np.zeros_like(end)])
        """(steps + 2, cases, 3): as each step begins; after the last one; nothing."""


def _fullest(stage: ModuleStage, followed: StageStates, batch: float) -> Array:
    """(2 x steps, 4): activations and states at the fullest moment of forward, and of backward, less what waits for it."""
    curve = stage.curve[:, ::2] + stage.curve[:, 1::2] * batch  # (moments, 2)
    fullest = []
    for part, waiting in ((slice(stage.turn), 0.0), (slice(stage.turn, None), curve[stage.turn - 1, 1])):
        activations = (curve[part] - waiting).T.reshape(-1)
        states = followed.moments[:, :, part].reshape(STEPS, -1, 3)
        best = (activations + states.sum(axis=2)).argmax(axis=1)
        fullest.append(np.column_stack([activations[best], states[np.arange(STEPS), best]]))
    return np.concatenate(fullest)


def _at(value: Affine, samples: Array) -> Array:
    return value[0] + value[1] * samples


def _moments(module: DescribedModule, values: dict[str, float]) -> tuple[str, int, bool]:
    """Checkpointing, its distance, and whether activations are offloaded."""
    policy = RECOMPUTE[int(values["activation_checkpointing"])] if module.profile.block_names else RECOMPUTE[0]
    return policy, int(values["checkpoint_every_k"]), values["offload_activations"] > 0


def _layout(values: dict[str, float], micro_batches: int) -> PipelineLayout:
    if values["pipeline"] == 1:  # other knobs of pipelines have no effect
        schedule = SCHEDULES.index("1f1b")
        return PipelineLayout(ranks=1, virtual_stages=1, schedule=schedule, pipeline_rank=0, micro_batches=micro_batches)
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
    state_width = np.minimum(columns["master_bytes"], master)
    views = (stage == 0) & (width == state_width)
    moments = inside * columns["moment_bytes"] + outside * columns["other_moment_bytes"]
    on_device = (elements * np.where(views, 0.0, state_width) + moments * master / 4) * (1 - offloaded)
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


def _offloaded(trace: Trace, policy: str, batch: Array) -> Array:
    by_block = kept_by_block(composed(trace, policy, 1))
    offloaded = [np.maximum(_at(kept, batch), 0.0) for block, kept in by_block.items() if block + 1 < len(by_block)]
    return reduce(np.add, offloaded, np.zeros(len(batch)))


def kept_bytes(module: DescribedModule, policy: int, every: float, batch: float) -> float:
    """Bytes that a mean block keeps for backward."""
    name = RECOMPUTE[policy] if module.profile.block_names else RECOMPUTE[0]
    by_block = kept_by_block(composed(module.trace, name, int(every)))
    return sum(max(at(value, batch), 0.0) for value in by_block.values()) / max(len(by_block), 1)
