"""Bytes that a rank holds at its peak while it trains a user's module: the module's trace and the engine's states together."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, DescribedModule
from autotune.prediction.equations.module_states import GRADIENTS, Held, Marks, StateKnobs, Step, micro_batches
from search_spaces.models.module_profile import Affine, Mark, ModuleProfile, Moment, Trace, at
from search_spaces.overlap import cut

COLUMNS = (
    "data", "tensor", "context", "shard", "zero_stage", "micro_batch_size", "accumulation", "activation_checkpointing",
    "checkpoint_every_k", "offload_optimizer", "offload_parameters", "parameter_bytes", "reduce_bytes", "accumulation_bytes",
    "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
    "overlap_comm", "defer_gradient_reduction", "reshard_after_forward", "moment_bytes", "other_moment_bytes",
    "offload_activations", "overlap_param_gather",
)  # fmt: skip
"""Fields of `Layouts` on which the memory depends."""
PEAK = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "host", "gathers", "gathered_bytes")
"""The result by column."""
NEAR_BLOCKS = 2
"""Blocks whose activations are on the device if they are offloaded."""


def gathers_of_step(cases: Cases) -> tuple[Array, Array]:
    """Gathers of parameters in a step of stage 3, and the bytes of their messages."""
    found = module_bytes(cases, np.ones(1), np.ones(1))
    return found["gathers"], found["gathered_bytes"]


def module_bytes(cases: Cases, share: Array, in_flight: Array) -> dict[str, Array]:
    """The bytes of `PEAK` for each case, evaluated once for each combination of the values that matter.

    Args:
        cases: the configurations.
        share: part of the module's blocks that the rank holds: 1 without a pipeline.
        in_flight: micro-batches whose activations the rank holds.
    """
    module = cases.module
    assert module is not None
    columns = [getattr(cases.layouts, name) for name in COLUMNS] + [share, in_flight]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    table = np.stack([np.broadcast_to(column, shape).reshape(-1) for column in columns], axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    found = np.array([_peak(module, tuple(row)) for row in unique.tolist()])[inverse.reshape(-1)]
    return {name: found[:, place].reshape(shape) for place, name in enumerate(PEAK)}


@lru_cache(maxsize=1 << 16)
def _peak(module: DescribedModule, row: tuple[float, ...]) -> tuple[float, ...]:
    """One combination.

    1. The fullest moment of the first and the last micro-batch: activations, and what the engine holds beside them.
    2. The update, and the gathers of updated parameters after it, which have no activations.
    """
    knobs, (share, in_flight) = dict(zip(COLUMNS, row, strict=False)), row[len(COLUMNS) :]
    profile, trace, divisor = module.profile, module.trace, knobs["tensor"]
    part = share / divisor
    states = _knobs(module, knobs)
    policy = RECOMPUTE[int(knobs["activation_checkpointing"])] if profile.block_names else RECOMPUTE[0]
    every = int(knobs["checkpoint_every_k"])
    offloads = knobs["offload_activations"] > 0
    standing = _standing(profile, trace, knobs, states)
    steps = _steps(profile, _marks(trace, policy, every), states)
    curve = _curve(trace, policy, every, offloads)
    batch = knobs["micro_batch_size"]
    inputs = knobs["accumulation"] * at(trace.batch_bytes, batch)
    waiting = (in_flight - 1) * share * max(_kept(curve, batch) - inputs, 0.0) / divisor
    peaks, levels = (curve[:, 2 * place] + curve[:, 2 * place + 1] * batch for place in range(2))
    candidates = [
        np.concatenate([np.column_stack([peaks * part, held * part]), np.column_stack([levels * part, acting * part])])
        for held, acting in zip(steps.during, steps.acting, strict=True)
    ]
    moments = np.concatenate(candidates)
    best = moments[int(moments.sum(axis=1).argmax())]
    activations, parameters, gradients, buffers = (float(value) for value in best)
    activations += waiting
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
        _host_bytes(profile, knobs, states) * part + (_offloaded(trace, policy, batch) * share if offloads else 0.0),
        *steps.gathered(knobs["accumulation"]),
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
        shard_on_host=three and knobs["offload_parameters"] > 0,
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


def _standing(profile: ModuleProfile, trace: Trace, knobs: dict[str, float], states: StateKnobs) -> float:
    """Bytes of parameters that are there throughout; what stage 3 gathers is counted with the moments."""
    parameters = float(trace.frozen_bytes)
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


@lru_cache(maxsize=1024)
def _curve(trace: Trace, policy: str, every: int, offloads: bool) -> NDArray[np.float64]:
    """(moments, 4): constant and per-sample part of the peak, and of the level."""
    moments = composed(trace, policy, every)
    curve = np.array([(*moment.peak, *moment.level) for moment in moments])
    return curve - _away(moments) if offloads else curve


def _away(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """What is on the host at each moment if activations of all blocks but the last are offloaded."""
    kept, last = _kept_by_block(moments), max((moment.index for moment in moments), default=0)
    away = np.zeros((len(moments), 4))
    held: set[int] = set()
    for place, moment in enumerate(moments):
        if moment.mark is Mark.FORWARD and moment.index >= NEAR_BLOCKS:
            held.add(moment.index - NEAR_BLOCKS)
        if moment.mark is Mark.BACKWARD:
            held -= {moment.index, moment.index - 1}
        sums = np.sum([kept[block] for block in held if block in kept and block < last] or [(0.0, 0.0)], axis=0)
        away[place] = (*sums, *sums)
    return away


def _kept_by_block(moments: Sequence[Moment]) -> dict[int, Affine]:
    """What each block's forward leaves for backward."""
    found: dict[int, Affine] = {}
    begun: dict[int, Affine] = {}
    for moment in moments:
        if moment.mark is Mark.FORWARD:
            begun[moment.index] = moment.level
        elif moment.mark is Mark.LEFT and moment.index in begun:
            first = begun[moment.index]
            found[moment.index] = (moment.level[0] - first[0], moment.level[1] - first[1])
    return found


def _offloaded(trace: Trace, policy: str, batch: float) -> float:
    kept = _kept_by_block(composed(trace, policy, 1))
    return sum(max(at(value, batch), 0.0) for block, value in kept.items() if block + 1 < len(kept))


def kept_bytes(module: DescribedModule, policy: int, every: float, batch: float) -> float:
    """Bytes that a mean block keeps for backward."""
    name = RECOMPUTE[policy] if module.profile.block_names else RECOMPUTE[0]
    kept = _kept_by_block(composed(module.trace, name, int(every)))
    return sum(max(at(value, batch), 0.0) for value in kept.values()) / max(len(kept), 1)


def _kept(curve: NDArray[np.float64], batch: float) -> float:
    """Most bytes that a forward leaves for backward."""
    return float((curve[:, 2] + curve[:, 3] * batch).max())


@lru_cache(maxsize=1024)
def composed(trace: Trace, policy: str, every: int) -> tuple[Moment, ...]:
    """The moments if the first of every `every` blocks is checkpointed.

    The traces of both policies are cut at their marks. What runs in a checkpointed block comes from the one, everything else
    from the other; levels continue where the last piece ended.
    """
    if policy == RECOMPUTE[0] or every == 1 or policy not in trace.moments:
        return trace.moments.get(policy, trace.moments[RECOMPUTE[0]])
    pieces = {name: _pieces(trace.moments[name]) for name in (RECOMPUTE[0], policy)}
    found: list[Moment] = []
    level: Affine = (0.0, 0.0)
    running = -1
    for place, (plain, other) in enumerate(zip(*pieces.values(), strict=True)):
        chosen = policy if running >= 0 and running % every == 0 else RECOMPUTE[0]
        piece = other if chosen == policy else plain
        start = (0.0, 0.0) if not place else pieces[chosen][place - 1][-1].level
        shift = (level[0] - start[0], level[1] - start[1])
        for moment in piece:
            found.append(
                Moment(mark=moment.mark, index=moment.index, peak=_sum(moment.peak, shift), level=_sum(moment.level, shift))
            )
        level, mark = found[-1].level, found[-1].mark
        running = found[-1].index if mark in (Mark.FORWARD, Mark.BACKWARD) else -1
    return tuple(found)


def _pieces(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Cut after every mark but those of gradients."""
    ends = 0
    keys = []
    for moment in moments:
        keys.append(ends)
        ends += moment.mark is not Mark.GRADIENT
    return [[moment for _, moment in group] for _, group in groupby(zip(keys, moments, strict=True), key=lambda pair: pair[0])]


def _sum(one: Affine, other: Affine) -> Affine:
    return one[0] + other[0], one[1] + other[1]
