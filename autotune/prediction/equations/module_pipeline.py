"""The pipeline stages of a user's module: which a rank runs in which order, and the moments of each.

1. A stage's moments are cut out of the module's: those of its blocks, and at the ends of the pipeline what is outside of them.
2. The engine's states follow them for the stage's own parameters (`module_states`).
3. The rank's actions are replayed in the order of its schedule (`module_replay`). A forward leaves the stage's activations,
   backward frees them.

torch keeps for every micro-batch a buffer for the hidden state that a stage receives and one for its gradient, and until the
end of the step the gradient that it sends [torch.distributed.pipelining.stage, torch 2.13].

A micro-batch's moments take checkpointing and offloading of activations into account.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE, SCHEDULES, Array
from autotune.prediction.equations.module_states import Marks
from executor.parallel.schedule import Action, actions_of
from search_spaces.communication import IN_FLIGHT
from search_spaces.models.module_profile import OUTER, Affine, ModuleProfile, Moment, MomentKind, Trace, TrainedParameter
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, rank_of_stage, split_blocks, stages_of_rank
from search_spaces.trial_config import TrialConfig

BETWEEN = IN_FLIGHT
"""Micro-batches after which all further ones find the same states: as many as have reductions in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """The pipeline of a configuration."""

    ranks: int
    virtual_stages: int
    schedule: int
    """Index in `SCHEDULES`."""
    pipeline_rank: int
    """Of the rank."""
    micro_batches: int

    @property
    def config(self) -> TrialConfig:
        """A configuration with this pipeline."""
        return TrialConfig(
            pipeline_parallel_size=self.ranks, virtual_stages=self.virtual_stages, pipeline_schedule=SCHEDULES[self.schedule]
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the rank's stages."""
        return tuple(stages_of_rank(self.config, self.pipeline_rank))


def shortened(ranks: Array, virtual_stages: Array, schedule: Array, micro_batches: Array) -> Array:
    """Fewer micro-batches, if the schedule repeats itself after as many as fill the pipeline."""
    fill = 2 * ranks * virtual_stages + BETWEEN + 1
    rounds = np.maximum(micro_batches - fill, 0) // ranks
    hold_all = np.isin(schedule, [SCHEDULES.index(name) for name in ("gpipe", "looped_bfs")])
    return np.where(hold_all, micro_batches, micro_batches - rounds * ranks)


@lru_cache(maxsize=1024)
def received_buffers(layout: PipelineLayout) -> int:
    """Buffers of hidden states and of their gradients for each micro-batch, from stages on other ranks."""
    stages, buffers = layout.ranks * layout.virtual_stages, 0
    for stage in layout.stages:
        for other in (stage - 1, stage + 1):
            buffers += 0 <= other < stages and rank_of_stage(layout.config, other) != layout.pipeline_rank
    return buffers


def actions_of_rank(layout: PipelineLayout) -> tuple[Action, ...]:
    """In the order of the schedule."""
    return tuple(actions_of(layout.config, layout.micro_batches)[layout.pipeline_rank])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shape:
    """What the states of a stage depend on: equal stages share one. Compared by identity."""

    trained: tuple[TrainedParameter, ...]
    """Elements and blocks, counted from the stage's first one."""
    marks: Marks
    elements: int
    """Of all parameters."""


@lru_cache(maxsize=1024)
def shape_of(trained: tuple[TrainedParameter, ...], marks: Marks) -> Shape:
    """The one shape with these values."""
    return Shape(trained=trained, marks=marks, elements=sum(parameter.elements for parameter in trained))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleStage:
    """A pipeline stage of a module. Compared by identity."""

    profile: ModuleProfile
    """With the parameters of the stage only."""
    shape: Shape
    curve: NDArray[np.float64]
    """(moments, 4): constant and per-sample part of the peak, and of the level, from the begin of the micro-batch's forward."""
    turn: int
    """Number of the moments of forward."""
    first: bool
    last: bool
    lines: dict[Any, NDArray[np.float64]] = field(default_factory=dict)
    """States -> its moments that can be the fullest, once they were looked for (`module_replay`)."""


def is_legal(profile: ModuleProfile, layout: PipelineLayout) -> bool:
    """Whether the module has so many stages, and the schedule runs so many of them and of micro-batches."""
    schedule, virtual, stages = SCHEDULES[layout.schedule], layout.virtual_stages, layout.ranks * layout.virtual_stages
    most = len(profile.starts or profile.block_names)
    runs = virtual == (1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule in FOLDED_SCHEDULES else virtual)
    return runs and layout.pipeline_rank < layout.ranks and stages <= most and layout.micro_batches >= layout.ranks


@lru_cache(maxsize=1024)
def stages_of(profile: ModuleProfile, layout: PipelineLayout) -> tuple[tuple[int, range], ...]:
    """The stages of a rank, with their blocks."""
    config, blocks = layout.config, len(profile.block_names)
    cuts = split_blocks(config, blocks, profile.starts or range(blocks))
    return tuple((stage, cuts[stage]) for stage in layout.stages)


@lru_cache(maxsize=1024)
def cut_stage(profile: ModuleProfile, trace: Trace, policy: str, every: int, offloads: bool, blocks: range) -> ModuleStage:
    """The stage of a module that holds these blocks, under checkpointing and offloading."""
    moments, hidden = with_curve(composed(trace, policy, every), curve_of(trace, policy, every, offloads)), trace.hidden_bytes
    first, last = blocks[0] == 0, blocks[-1] == len(profile.block_names) - 1
    slots = [slot for slot, parameter in enumerate(profile.trained) if _holds(parameter, blocks, first, last)]
    renamed = {slot: index for index, slot in enumerate(slots)}
    cutter = _Cutter(hidden, renamed)
    forward = next(index for index, moment in enumerate(moments) if moment.mark is MomentKind.LOSS)
    cutter.forward(moments[:forward], blocks, first, last)
    if last:
        cutter.add(moments[forward], moments[forward - 1].level)
    turn = len(cutter.marks)
    shared = _shared_gradients(profile, moments) if first != last else {}
    cutter.backward(moments[forward:], blocks, last, shared)
    trained = tuple(profile.trained[slot] for slot in slots)
    return ModuleStage(
        profile=dataclasses.replace(profile, trained=trained, frozen=_frozen(profile, blocks, first, last)),
        shape=shape_of(_counted_from(blocks, trained), _marks_from(blocks, cutter.marks)),
        curve=np.array(cutter.rows), turn=turn, first=first, last=last,
    )  # fmt: skip


def _shared_gradients(profile: ModuleProfile, moments: Sequence[Moment]) -> dict[int, NDArray[np.float64]]:
    """Slot of each parameter that the first and the last block's surroundings share -> bytes of its gradient, as in a curve.

    The module holds what the last use contributes until backward reaches the first use. Stages with one use each do not.
    """
    return {
        moment.index: np.array([before.level[0] - moment.level[0], 0.0])
        for before, moment in pairwise(moments)
        if moment.mark is MomentKind.GRADIENT and profile.trained[moment.index].first and profile.trained[moment.index].last
    }


def _counted_from(blocks: range, trained: Sequence[TrainedParameter]) -> tuple[TrainedParameter, ...]:
    return tuple(
        TrainedParameter(
            elements=parameter.elements, block=parameter.block if parameter.block == OUTER else parameter.block - blocks[0]
        )
        for parameter in trained
    )


def _marks_from(blocks: range, marks: Sequence[tuple[MomentKind, int]]) -> Marks:
    """The blocks counted from the stage's first one; others, at whose marks nothing happens, have one number."""
    return tuple(
        (
            mark,
            index if mark is MomentKind.GRADIENT or index == OUTER else index - blocks[0] if index in blocks else len(blocks),
        )
        for mark, index in marks
    )


def _holds(parameter: TrainedParameter, blocks: range, first: bool, last: bool) -> bool:
    if parameter.block != OUTER:
        return parameter.block in blocks
    neither = not (parameter.first or parameter.last)
    return (first and (parameter.first or neither)) or (last and (parameter.last or neither))


def _frozen(profile: ModuleProfile, blocks: range, first: bool, last: bool) -> int:
    *parts, before, after = profile.frozen_parts or (0, 0)
    return sum(parts[block] for block in blocks if block < len(parts)) + before * first + after * last


class _Cutter:
    """Appends moments of the module, each relative to the one before it, to those of a stage."""

    def __init__(self, hidden: Affine, renamed: dict[int, int]) -> None:
        self.hidden, self.renamed = np.array(hidden), renamed
        self.marks: list[tuple[MomentKind, int]] = []
        self.rows: list[tuple[float, ...]] = []
        self.level = np.zeros(2)

    def add(self, moment: Moment, before: Affine, more: NDArray[np.float64] | None = None) -> None:
        """Append a moment; `before`: the module's level at the previous one; `more`: what the stage holds besides from here."""
        index = moment.index
        if moment.mark is MomentKind.GRADIENT:
            if index not in self.renamed:
                return
            index = self.renamed[index]
        peak = self.level + moment.peak - before
        self.level = self.level + moment.level - before + (0.0 if more is None else more)
        self.marks.append((moment.mark, index))
        self.rows.append((*peak, *self.level))

    def forward(self, moments: Sequence[Moment], blocks: range, first: bool, last: bool) -> None:
        """Up to the end of the last block; before its blocks a later stage makes everything but the first block's input."""
        level: Affine = (0.0, 0.0)
        for moment in moments:
            begins = moment.mark is MomentKind.FORWARD
            if begins and moment.index == 0 and not first:
                self.add(moment, level, -self.hidden)
            elif begins and moment.index == blocks[0] and not first:
                self.add(dataclasses.replace(moment, peak=level, level=level), level)
            elif moment.index == OUTER or moment.index in blocks:
                self.add(moment, level)
            elif begins and moment.index == blocks[-1] + 1 and not last and len(blocks) > 1:
                self.add(moment, level)  # the last block's input is dropped
            level = moment.level

    def backward(self, moments: Sequence[Moment], blocks: range, last: bool, shared: dict[int, NDArray[np.float64]]) -> None:
        """From the loss, or from the last block; the received gradient is no activation, and the output stays.

        `shared`: gradients to which the module's other end contributes; the last stage has them as soon as blocks begin.
        """
        level, following = moments[0].level, [*moments[1:]]
        running = last
        received = not last
        if last:
            for slot, size in shared.items():
                begin = following[0]
                self.add(dataclasses.replace(begin, mark=MomentKind.GRADIENT, index=slot), level, -size)
                following[0], level = dataclasses.replace(begin, peak=begin.level), begin.level
        for moment in following:
            if moment.mark is MomentKind.BACKWARD and moment.index == blocks[-1] and not last:
                running = True
                self.marks.append((MomentKind.BACKWARD, moment.index))
                self.rows.append((*self.level, *self.level))
            elif running and moment.mark is MomentKind.BACKWARD and moment.index < blocks[0]:
                self.add(Moment(mark=MomentKind.END, peak=moment.peak, level=moment.level), level)
                return
            elif running:
                # The block that got the gradient has not freed it.
                more = self.hidden if received and moment.mark is not MomentKind.GRADIENT else None
                received = received and more is None
                if moment.mark is MomentKind.GRADIENT:
                    more = shared.get(moment.index, more)
                self.add(moment, level, more)
            level = moment.level


NEAR_BLOCKS = 2
"""Blocks whose activations are on the device if they are offloaded."""


@lru_cache(maxsize=1024)
def curve_of(trace: Trace, policy: str, every: int, offloads: bool) -> NDArray[np.float64]:
    """(moments, 4): constant and per-sample part of the peak, and of the level."""
    moments = composed(trace, policy, every)
    curve = np.array([(*moment.peak, *moment.level) for moment in moments])
    return curve - _away(moments) if offloads else curve


def with_curve(moments: Sequence[Moment], curve: NDArray[np.float64]) -> list[Moment]:
    """The moments with the values of a curve."""
    return [
        dataclasses.replace(moment, peak=(float(row[0]), float(row[1])), level=(float(row[2]), float(row[3])))
        for moment, row in zip(moments, curve, strict=True)
    ]


def _away(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """What is on the host at each moment if activations of all blocks but the last are offloaded."""
    by_block, last = kept_by_block(moments), max((moment.index for moment in moments), default=0)
    away = np.zeros((len(moments), 4))
    offloaded_blocks: set[int] = set()
    for index, moment in enumerate(moments):
        if moment.mark is MomentKind.FORWARD and moment.index >= NEAR_BLOCKS:
            offloaded_blocks.add(moment.index - NEAR_BLOCKS)
        if moment.mark is MomentKind.BACKWARD:
            offloaded_blocks -= {moment.index, moment.index - 1}
        sums = np.sum(
            [by_block[block] for block in offloaded_blocks if block in by_block and block < last] or [(0.0, 0.0)], axis=0
        )
        away[index] = (*sums, *sums)
    return away


def kept_by_block(moments: Sequence[Moment]) -> dict[int, Affine]:
    """What each block's forward leaves for backward."""
    by_block: dict[int, Affine] = {}
    begun: dict[int, Affine] = {}
    for moment in moments:
        if moment.mark is MomentKind.FORWARD:
            begun[moment.index] = moment.level
        elif moment.mark is MomentKind.LEFT and moment.index in begun:
            first = begun[moment.index]
            by_block[moment.index] = (moment.level[0] - first[0], moment.level[1] - first[1])
    return by_block


@lru_cache(maxsize=1024)
def composed(trace: Trace, policy: str, every: int) -> tuple[Moment, ...]:
    """The moments if the first of every `every` blocks is checkpointed.

    The traces of both policies are cut at their marks. What runs in a checkpointed block comes from the one, everything else
    from the other; levels continue where the last piece ended.
    """
    if policy == RECOMPUTE[0] or every == 1 or policy not in trace.moments:
        return trace.moments.get(policy, trace.moments[RECOMPUTE[0]])
    pieces = {name: _pieces(trace.moments[name]) for name in (RECOMPUTE[0], policy)}
    moments: list[Moment] = []
    level: Affine = (0.0, 0.0)
    running = -1
    for index, (plain, other) in enumerate(zip(*pieces.values(), strict=True)):
        chosen = policy if running >= 0 and running % every == 0 else RECOMPUTE[0]
        piece = other if chosen == policy else plain
        start = (0.0, 0.0) if not index else pieces[chosen][index - 1][-1].level
        shift = (level[0] - start[0], level[1] - start[1])
        for moment in piece:
            moments.append(
                Moment(mark=moment.mark, index=moment.index, peak=_sum(moment.peak, shift), level=_sum(moment.level, shift))
            )
        level, mark = moments[-1].level, moments[-1].mark
        running = moments[-1].index if mark in (MomentKind.FORWARD, MomentKind.BACKWARD) else -1
    return tuple(moments)


def _pieces(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Cut after every mark but those of gradients."""
    ends = 0
    keys = []
    for moment in moments:
        keys.append(ends)
        ends += moment.mark is not MomentKind.GRADIENT
    return [[moment for _, moment in group] for _, group in groupby(zip(keys, moments, strict=True), key=lambda pair: pair[0])]


def _sum(first: Affine, second: Affine) -> Affine:
    return first[0] + second[0], first[1] + second[1]
