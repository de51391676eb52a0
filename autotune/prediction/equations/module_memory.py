"""Bytes that a rank holds at its peak while it trains a user's module: the module's trace and the engine's states together."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, DescribedModule
from autotune.prediction.equations.module_moments import composed, curve_of, kept_by_block
from autotune.prediction.equations.module_pipeline import Layout, cut_stage, is_legal, replay, stages_of
from autotune.prediction.equations.module_states import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    Held,
    Marks,
    StateKnobs,
    Step,
    micro_batches,
)
from search_spaces.models.module_profile import ModuleProfile, Trace, at
from search_spaces.overlap import cut

COLUMNS = (
    "data", "tensor", "context", "shard", "zero_stage", "micro_batch_size", "accumulation", "activation_checkpointing",
    "checkpoint_every_k", "offload_optimizer", "offload_parameters", "parameter_bytes", "reduce_bytes", "accumulation_bytes",
    "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
    "overlap_comm", "defer_gradient_reduction", "reshard_after_forward", "moment_bytes", "other_moment_bytes",
    "offload_activations", "overlap_param_gather", "pipeline", "virtual_stages", "pipeline_schedule",
)  # fmt: skip
"""Fields of `Layouts` on which the memory depends."""
PEAK = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "host", "gathers", "gathered_bytes")
"""The result by column."""


def gathers_of_step(cases: Cases) -> tuple[Array, Array]:
    """Gathers of parameters in a step of stage 3, and the bytes of their messages: of the first rank of a pipeline."""
    found = module_bytes(cases, np.zeros(1))
    return found["gathers"], found["gathered_bytes"]


def module_bytes(cases: Cases, place: Array) -> dict[str, Array]:
    """The bytes of `PEAK` for each case, evaluated once for each combination of the values that matter.

    `place`: the rank's position in the pipeline.
    """
    module = cases.module
    assert module is not None
    columns = [getattr(cases.layouts, name) for name in COLUMNS] + [place]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    table = np.stack([np.broadcast_to(column, shape).reshape(-1) for column in columns], axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    found = np.array([_peak(module, tuple(row)) for row in unique.tolist()])[inverse.reshape(-1)]
    return {name: found[:, place].reshape(shape) for place, name in enumerate(PEAK)}


@lru_cache(maxsize=1 << 16)
def _peak(module: DescribedModule, row: tuple[float, ...]) -> tuple[float, ...]:
    """One combination, without a pipeline.

    1. The fullest moment of the first and the last micro-batch: activations, and what the engine holds beside them.
    2. The update, and the gathers of updated parameters after it, which have no activations.
    """
    knobs = dict(zip(COLUMNS, row, strict=False))
    if knobs["pipeline"] > 1:
        return _pipeline_peak(module, knobs, int(row[-1]))
    profile, trace, divisor = module.profile, module.trace, knobs["tensor"]
    part = 1 / divisor
    states = _knobs(module, knobs)
    policy = RECOMPUTE[int(knobs["activation_checkpointing"])] if profile.block_names else RECOMPUTE[0]
    every = int(knobs["checkpoint_every_k"])
    offloads = knobs["offload_activations"] > 0
    standing = _standing(profile, trace.frozen_bytes, knobs, states)
    steps = _steps(profile, _marks(trace, policy, every), states)
    curve = curve_of(trace, policy, every, offloads)
    batch = knobs["micro_batch_size"]
    inputs = knobs["accumulation"] * at(trace.batch_bytes, batch)
    peaks, levels = (curve[:, 2 * place] + curve[:, 2 * place + 1] * batch for place in range(2))
    candidates = [
        np.concatenate([np.column_stack([peaks * part, held * part]), np.column_stack([levels * part, acting * part])])
        for held, acting in zip(steps.during, steps.acting, strict=True)
    ]
    moments = np.concatenate(candidates)
    best = moments[int(moments.sum(axis=1).argmax())]
    activations, parameters, gradients, buffers = (float(value) for value in best)
    update = _update(profile, states, knobs["allgather_bucket_size"], knobs["offload_optimizer"] > 0)
    after = np.array([0.0, 0.0, steps.after[GRADIENTS], update.stepping]) * part
    refill = np.array([0.0, 0.0, 0.0, update.refilling]) * part
    for other in (after, refill):
        if other.sum() > activations + parameters + gradients + buffers:
            activations, parameters, gradients, buffers = (float(value) for value in other)
    return (
        parameters + standing * part,
        gradients,
        _state_bytes(profile, knobs, states) * part,
        activations + inputs,
        buffers + trace.buffer_bytes,
        _host_bytes(profile, knobs, states) * part + (_offloaded(trace, policy, batch) if offloads else 0.0),
        *steps.gathered(knobs["accumulation"]),
    )


def _pipeline_peak(module: DescribedModule, knobs: dict[str, float], place: int) -> tuple[float, ...]:
    """One combination on a rank of a pipeline: the same for its stages together."""
    profile, trace, part = module.profile, module.trace, 1 / knobs["tensor"]
    layout = Layout(
        ranks=int(knobs["pipeline"]), virtual_stages=int(knobs["virtual_stages"]), schedule=int(knobs["pipeline_schedule"]),
        place=place, micro_batches=int(knobs["accumulation"]),
    )  # fmt: skip
    if not is_legal(profile, layout):  # rules refuse it, but grids evaluate it
        return (0.0,) * len(PEAK)
    states, batch, offloads = _knobs(module, knobs), knobs["micro_batch_size"], knobs["offload_activations"] > 0
    policy = RECOMPUTE[int(knobs["activation_checkpointing"])]
    held = {number: cut_stage(profile, trace, policy, int(knobs["checkpoint_every_k"]), offloads, blocks)
            for number, blocks in stages_of(profile, layout)}  # fmt: skip
    found = replay(layout, held, states, batch, at(trace.hidden_bytes, batch))
    profiles = [stage.profile for stage in held.values()]
    updates = [_update(own, states, knobs["allgather_bucket_size"], knobs["offload_optimizer"] > 0) for own in profiles]
    frozen = trace.frozen_bytes / max(profile.frozen, 1)
    standing = sum(_standing(own, frozen * own.frozen, knobs, states) for own in profiles)
    inputs = knobs["accumulation"] * at(trace.batch_bytes, batch)
    candidates = [
        (found.activations, found.held[PARAMETERS], found.held[GRADIENTS], found.held[BUFFERS]),
        (found.sent, 0.0, found.after[GRADIENTS], sum(update.stepping for update in updates)),
        (found.sent, 0.0, 0.0, max(update.refilling for update in updates)),
    ]
    activations, parameters, gradients, buffers = max(candidates, key=sum)
    on_host = sum(_host_bytes(own, knobs, states) for own in profiles)
    blocks_held = sum(len(blocks) for _, blocks in stages_of(profile, layout)) / max(len(profile.block_names), 1)
    kept_on_host = _offloaded(trace, policy, batch) * blocks_held * found.in_flight if offloads else 0.0
    return (
        (parameters + standing) * part,
        gradients * part,
        sum(_state_bytes(own, knobs, states) for own in profiles) * part,
        activations * part + inputs,
        buffers * part + found.received + trace.buffer_bytes,
        on_host * part + kept_on_host,
        *found.gathered,
    )


def _knobs(module: DescribedModule, knobs: dict[str, float]) -> StateKnobs:
    """The knobs that matter at the stage; others, and sizes beyond the module's, have one value."""
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


def _share_elements(profile: ModuleProfile, states: StateKnobs) -> int:
    return sum(_shared_elements(profile, states.ranks))


def _standing(profile: ModuleProfile, frozen_bytes: float, knobs: dict[str, float], states: StateKnobs) -> float:
    """Bytes of parameters that are there throughout; what stage 3 gathers is counted with the moments."""
    parameters = float(frozen_bytes)
    if states.zero_stage < 3:
        parameters += sum(_shared_elements(profile, 1)) * states.width
    elif states.shard_beside_master:
        parameters += _share_elements(profile, states) * states.width
    late = knobs["overlap_param_gather"] > 0 and states.zero_stage in (1, 2) and states.ranks > 1
    if late and knobs["offload_optimizer"] > 0:
        parameters += _share_elements(profile, states) * states.width
    return parameters


def _state_bytes(profile: ModuleProfile, knobs: dict[str, float], states: StateKnobs) -> float:
    """The device's part of the optimizer's state: the master, unless parameters are views of it, and moments."""
    views = states.zero_stage == 0 and states.width == states.master_width
    master = 0.0 if views else states.master_width
    scale = states.master_width / 4
    inside, outside = _shared_elements(profile, states.ranks)
    moments = inside * knobs["moment_bytes"] + outside * knobs["other_moment_bytes"]
    return ((inside + outside) * master + moments * scale) * (1 - knobs["offload_optimizer"])


def _host_bytes(profile: ModuleProfile, knobs: dict[str, float], states: StateKnobs) -> float:
    """State and parameters in the main memory."""
    elements = _share_elements(profile, states)
    moments = states.master_width + knobs["moment_bytes"] * states.master_width / 4
    parameters = elements * states.width * knobs["offload_parameters"]
    return elements * knobs["offload_optimizer"] * moments + parameters


class _Update:
    """Bytes of buffers in the update."""

    def __init__(self, stepping: float, refilling: float) -> None:
        self.stepping, self.refilling = stepping, refilling


@lru_cache(maxsize=4096)
def _update(profile: ModuleProfile, states: StateKnobs, bucket: float, offloaded: bool) -> _Update:
    """While the optimizer steps, beside the gradients; and while updated parameters are gathered (stages 1 and 2)."""
    own = _share_elements(profile, states) * states.width
    offloads = offloaded and states.zero_stage < 3
    stepping = own if offloads else 0.0
    if states.zero_stage not in (1, 2) or states.ranks == 1:
        return _Update(stepping, stepping)
    sizes = [parameter.elements for parameter in reversed(profile.trained)]
    groups = cut(range(len(sizes)), sizes.__getitem__, bucket)
    casts = states.width < states.master_width and not offloads
    rows = []
    for group in groups:
        columns = sum(-(-sizes[place] // states.ranks) for place in group)
        padded = sum(-(-sizes[place] // states.ranks) * states.ranks for place in group if sizes[place] % states.ranks)
        held = columns * states.width * (states.ranks + (1 if casts else 0))
        rows.append((held + (columns * states.width * states.ranks if states.copies else 0.0), held + padded * states.width))
    at_once = 2 if states.overlaps else 1
    refilling = max(
        max(sum(first for first, _ in rows[place : place + at_once]),
            rows[place][1] + sum(first for first, _ in rows[place + 1 : place + at_once]))
        for place in range(len(rows))
    )  # fmt: skip
    return _Update(stepping, stepping + refilling)


class _Steps:
    """The states as arrays of shape (moments, 3), for each micro-batch."""

    def __init__(self, steps: Sequence[Step], after: Held) -> None:
        self.during = [np.array(step.during) for step in steps]
        self.acting = [np.array(step.acting) for step in steps]
        self.after, self._steps = after, steps

    def gathered(self, micro_batches: float) -> tuple[float, float]:
        """Gathers of a step and the bytes of their messages: every micro-batch but the last is like the first."""
        first, last = self._steps[0], self._steps[-1]
        before = micro_batches - 1
        return before * first.gathers + last.gathers, before * first.gathered_bytes + last.gathered_bytes


@lru_cache(maxsize=4096)
def _steps(profile: ModuleProfile, marks: Marks, states: StateKnobs) -> _Steps:
    steps, after = micro_batches(profile, marks, states)
    return _Steps(steps, after)


@lru_cache(maxsize=1024)
def _marks(trace: Trace, policy: str, every: int) -> Marks:
    return tuple((moment.mark, moment.index) for moment in composed(trace, policy, every))


def _offloaded(trace: Trace, policy: str, batch: float) -> float:
    kept = kept_by_block(composed(trace, policy, 1))
    return sum(max(at(value, batch), 0.0) for block, value in kept.items() if block + 1 < len(kept))


def kept_bytes(module: DescribedModule, policy: int, every: float, batch: float) -> float:
    """Bytes that a mean block keeps for backward."""
    name = RECOMPUTE[policy] if module.profile.block_names else RECOMPUTE[0]
    kept = kept_by_block(composed(module.trace, name, int(every)))
    return sum(max(at(value, batch), 0.0) for value in kept.values()) / max(len(kept), 1)
