"""The pipeline stages of a user's module: which a rank runs in which order, and the moments of each.

A stage's moments are cut out of the module's: those of its blocks, and at the ends of the pipeline what is outside of them.
Without a pipeline, the module is the only stage of its rank.

torch keeps for every micro-batch a buffer for the hidden state that a stage receives and one for its gradient, and until the
end of the step the gradient that it sends [torch.distributed.pipelining.stage, torch 2.13].

A micro-batch's moments take checkpointing and offloading of activations into account.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np

from autotune.prediction.equations.cases import RECOMPUTE, SCHEDULES, Array
from autotune.prediction.equations.module_states import STEPS, Marks, Shape, shape_of
from executor.parallel.schedule import Action, actions_of
from search_spaces.models.module_profile import OUTER, Affine, ModuleProfile, Moment, MomentKind, Trace, TrainedParameter
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, rank_of_stage, split_blocks, stages_of_rank
from search_spaces.trial_config import TrialConfig


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
    fill = 2 * ranks * virtual_stages + STEPS - 1
    rounds = np.maximum(micro_batches - fill, 0) // ranks
    hold_all = np.isin(schedule, [SCHEDULES.index(name) for name in ("gpipe", "looped_bfs")])
    in_pipeline = np.where(hold_all, micro_batches, micro_batches - rounds * ranks)
    return np.where(ranks == 1, np.minimum(micro_batches, 2), in_pipeline)


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
class ModuleStage:
    """A pipeline stage of a module. Compared by identity."""

    profile: ModuleProfile
    """With the parameters of the stage only."""
    shape: Shape
    curve: Array
    """(moments, 4): constant and per-sample part of the peak, and of the level, from the begin of the micro-batch's forward."""
    turn: int
    """Number of the moments of forward."""
    first: bool
    last: bool


def is_legal(profile: ModuleProfile, layout: PipelineLayout) -> bool:
    """Whether the module has so many stages, and the schedule runs so many of them and of micro-batches."""
    if layout.ranks == 1:
        return True
    schedule, virtual, stages = SCHEDULES[layout.schedule], layout.virtual_stages, layout.ranks * layout.virtual_stages
    most = len(profile.starts or profile.block_names)
    runs = virtual == (1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule in FOLDED_SCHEDULES else virtual)
    return runs and layout.pipeline_rank < layout.ranks and stages <= most and layout.micro_batches >= layout.ranks


@lru_cache(maxsize=1024)
def stages_of(profile: ModuleProfile, layout: PipelineLayout) -> tuple[tuple[int, range], ...]:
    """The stages of a rank, with their blocks."""
    config, blocks = layout.config, len(profile.block_names)
    if layout.ranks == 1:
        return ((0, range(blocks)),)
    cuts = split_blocks(config, blocks, profile.starts or range(blocks))
    return tuple((stage, cuts[stage]) for stage in layout.stages)


@lru_cache(maxsize=1024)
def cut_stage(profile: ModuleProfile, trace: Trace, policy: str, every: int, offloads: bool, blocks: range) -> ModuleStage:
    """The stage of a module that holds these blocks, under checkpointing and offloading."""
    moments, curve = composed(trace, policy, every), curve_of(trace, policy, every, offloads)
    marks = tuple((moment.mark, moment.index) for moment in moments)
    loss = next(position for position, (mark, _) in enumerate(marks) if mark is MomentKind.LOSS)
    if len(blocks) == len(profile.block_names):
        shape = shape_of(profile.trained, marks)
        return ModuleStage(profile=profile, shape=shape, curve=curve, turn=loss + 1, first=True, last=True)
    first, last = blocks[0] == 0, blocks[-1] == len(profile.block_names) - 1
    slots = [slot for slot, parameter in enumerate(profile.trained) if _is_held(parameter, blocks, first, last)]
    cutter = _Cutter(marks, curve, np.array(trace.hidden_bytes), {slot: index for index, slot in enumerate(slots)})
    cutter.forward(loss, blocks, first, last)
    turn = len(cutter.marks)
    cutter.backward(loss, blocks, first, last, _shared_gradients(profile, moments))
    trained = tuple(profile.trained[slot] for slot in slots)
    *frozen_parts, before, after = profile.frozen_parts or (0, 0)
    frozen = sum(frozen_parts[block] for block in blocks if block < len(frozen_parts)) + before * first + after * last
    return ModuleStage(
        profile=dataclasses.replace(profile, trained=trained, frozen=frozen),
        shape=_shape(blocks, trained, cutter.marks),
        curve=np.array(cutter.rows), turn=turn, first=first, last=last,
    )  # fmt: skip


def _is_held(parameter: TrainedParameter, blocks: range, first: bool, last: bool) -> bool:
    if parameter.block != OUTER:
        return parameter.block in blocks
    return (first and (parameter.first or not parameter.last)) or (last and (parameter.last or not parameter.first))


def _shape(blocks: range, trained: Sequence[TrainedParameter], marks: Sequence[tuple[MomentKind, int]]) -> Shape:
    """Blocks are counted from the stage's first one; others, at whose marks nothing happens, have one number."""

    def from_first(index: int) -> int:
        return index if index == OUTER else index - blocks[0] if index in blocks else len(blocks)

    return shape_of(
        tuple(TrainedParameter(elements=parameter.elements, block=from_first(parameter.block)) for parameter in trained),
        tuple((mark, index if mark is MomentKind.GRADIENT else from_first(index)) for mark, index in marks),
    )


def _shared_gradients(profile: ModuleProfile, moments: Sequence[Moment]) -> dict[int, Array]:
    """Slot of each parameter that the first and the last block's surroundings share -> bytes of its gradient, as in a curve.

    The module holds what the last use contributes until backward reaches the first use. Stages with one use each do not.
    """
    return {
        moment.index: np.array([before.level[0] - moment.level[0], 0.0])
        for before, moment in pairwise(moments)
        if moment.mark is MomentKind.GRADIENT and profile.trained[moment.index].first and profile.trained[moment.index].last
    }


class _Cutter:
    """Appends moments of the module, each relative to the one before it, to those of a stage.

    `hidden`: bytes of a hidden state, constant and per sample. `renamed`: slot of each trained parameter of the stage -> its
    index there.
    """

    def __init__(self, module_marks: Marks, curve: Array, hidden: Array, renamed: dict[int, int]) -> None:
        self.module_marks, self.curve, self.hidden, self.renamed = module_marks, curve, hidden, renamed
        self.marks: list[tuple[MomentKind, int]] = []
        self.rows: list[Array] = []
        self.level = np.zeros(2)

    def add(self, mark: MomentKind, index: int, row: Array, before: Array, more: Array | float = 0.0) -> None:
        """Append a moment; `before`: the module's level at the previous one; `more`: what the stage holds besides from here."""
        if mark is MomentKind.GRADIENT:
            if index not in self.renamed:
                return
            index = self.renamed[index]
        peak = self.level + row[:2] - before
        self.level = self.level + row[2:] - before + more
        self.marks.append((mark, index))
        self.rows.append(np.concatenate([peak, self.level]))

    def stay(self, mark: MomentKind, index: int) -> None:
        """Append a moment at which the stage's level does not change."""
        self.marks.append((mark, index))
        self.rows.append(np.concatenate([self.level, self.level]))

    def forward(self, loss: int, blocks: range, first: bool, last: bool) -> None:
        """Up to the end of the last block, or to the loss; before its blocks a later stage makes everything but the first
        block's input."""
        before = np.zeros(2)
        for (mark, index), row in zip(self.module_marks[:loss], self.curve, strict=False):
            begins = mark is MomentKind.FORWARD
            if begins and index == 0 and not first:
                self.add(mark, index, row, before, -self.hidden)
            elif begins and index == blocks[0] and not first:
                self.stay(mark, index)
            # A further block drops the last block's input.
            elif index == OUTER or index in blocks or (begins and index == blocks[-1] + 1 and len(blocks) > 1):
                self.add(mark, index, row, before)
            before = row[2:]
        if last:
            self.add(*self.module_marks[loss], self.curve[loss], before)

    def backward(self, loss: int, blocks: range, first: bool, last: bool, shared: dict[int, Array]) -> None:
        """From the loss, or from the last block; the received gradient is no activation, and the output stays.

        `shared`: gradients to which the module's other end contributes, if that is on another stage; the last stage has them
        as soon as blocks begin.
        """
        shared = shared if first != last else {}
        before, running, received = self.curve[loss, 2:], last, not last
        for position in range(loss + 1, len(self.module_marks)):
            (mark, index), row = self.module_marks[position], self.curve[position]
            if last and position == loss + 1:
                for slot, size in shared.items():
                    self.add(MomentKind.GRADIENT, slot, row, before, -size)
                    before, row = row[2:], np.concatenate([row[2:], row[2:]])
            if mark is MomentKind.BACKWARD and index == blocks[-1] and not last:
                running = True
                self.stay(mark, index)
            elif running and mark is MomentKind.BACKWARD and index < blocks[0]:
                self.add(MomentKind.END, -1, row, before)
                return
            elif running:
                # The block that got the gradient has not freed it.
                more: Array | float = 0.0
                if mark is MomentKind.GRADIENT:
                    more = shared.get(index, more)
                elif received:
                    more, received = self.hidden, False
                self.add(mark, index, row, before, more)
            before = row[2:]


NEAR_BLOCKS = 2
"""Blocks whose activations are on the device if they are offloaded."""


@lru_cache(maxsize=1024)
def curve_of(trace: Trace, policy: str, every: int, offloads: bool) -> Array:
    """(moments, 4): constant and per-sample part of the peak, and of the level."""
    moments = composed(trace, policy, every)
    curve = np.array([(*moment.peak, *moment.level) for moment in moments])
    return curve - _away(moments) if offloads else curve


def _away(moments: Sequence[Moment]) -> Array:
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
