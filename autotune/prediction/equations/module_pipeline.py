"""Bytes that a rank holds at its peak while it trains its pipeline stages of a user's module.

1. A stage's moments are cut out of the module's: those of its blocks, and at the ends of the pipeline what is outside of them.
2. The engine's states follow them for the stage's own parameters (`module_states`).
3. The rank's actions are replayed in the order of its schedule. A forward leaves the stage's activations, backward frees them.

torch keeps for every micro-batch a buffer for the hidden state that a stage receives and one for its gradient, and until the
end of the step the gradient that it sends [torch.distributed.pipelining.stage, torch 2.13].
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import SCHEDULES
from autotune.prediction.equations.module_moments import composed, curve_of, with_curve
from autotune.prediction.equations.module_states import Held, Marks, StateKnobs, Step, micro_batches
from executor.parallel.schedule import Action, ActionKind, actions_of
from search_spaces.models.module_profile import OUTER, Affine, Mark, ModuleProfile, Moment, Trace, TrainedParameter
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, rank_of_stage, split_blocks, stages_of_rank
from search_spaces.overlap import IN_FLIGHT
from search_spaces.trial_config import TrialConfig

HOLD_ALL = ("gpipe", "looped_bfs")
"""Schedules in which a rank holds all micro-batches."""
NOTHING: Held = (0.0, 0.0, 0.0)
BETWEEN = IN_FLIGHT
"""Micro-batches after which all further ones find the same states: as many as have reductions in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The pipeline of a configuration."""

    ranks: int
    virtual_stages: int
    schedule: int
    """Index in `SCHEDULES`."""
    place: int
    """Of the rank."""
    micro_batches: int

    @property
    def config(self) -> TrialConfig:
        """A configuration with this pipeline."""
        return TrialConfig(
            pipeline_parallel_size=self.ranks, virtual_stages=self.virtual_stages, pipeline_schedule=SCHEDULES[self.schedule]
        )


@lru_cache(maxsize=4096)
def _actions(layout: Layout) -> tuple[Action, ...]:
    return tuple(actions_of(layout.config, layout.micro_batches)[layout.place])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A pipeline stage of a module. Compared by identity."""

    profile: ModuleProfile
    """With the parameters of the stage only."""
    marks: Marks
    curve: NDArray[np.float64]
    """(moments, 4): constant and per-sample part of the peak, and of the level, from the begin of the micro-batch's forward."""
    turn: int
    """Number of the moments of forward."""
    first: bool
    last: bool


def is_legal(profile: ModuleProfile, layout: Layout) -> bool:
    """Whether the module has so many stages, and the schedule runs so many of them and of micro-batches."""
    schedule, virtual, stages = SCHEDULES[layout.schedule], layout.virtual_stages, layout.ranks * layout.virtual_stages
    most = len(profile.starts or profile.block_names)
    runs = virtual == (1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule in FOLDED_SCHEDULES else virtual)
    return runs and layout.place < layout.ranks and stages <= most and layout.micro_batches >= layout.ranks


@lru_cache(maxsize=1024)
def stages_of(profile: ModuleProfile, layout: Layout) -> tuple[tuple[int, range], ...]:
    """The stages of a rank, with their blocks."""
    config, blocks = layout.config, len(profile.block_names)
    cuts = split_blocks(config, blocks, profile.starts or range(blocks))
    return tuple((stage, cuts[stage]) for stage in stages_of_rank(config, layout.place))


@lru_cache(maxsize=1024)
def cut_stage(profile: ModuleProfile, trace: Trace, policy: str, every: int, offloads: bool, blocks: range) -> Stage:
    """The stage of a module that holds these blocks, under checkpointing and offloading."""
    moments, hidden = with_curve(composed(trace, policy, every), curve_of(trace, policy, every, offloads)), trace.hidden_bytes
    first, last = blocks[0] == 0, blocks[-1] == len(profile.block_names) - 1
    slots = [slot for slot, parameter in enumerate(profile.trained) if _holds(parameter, blocks, first, last)]
    renamed = {slot: place for place, slot in enumerate(slots)}
    cutter = _Cutter(hidden, renamed)
    forward = next(place for place, moment in enumerate(moments) if moment.mark is Mark.LOSS)
    cutter.forward(moments[:forward], blocks, first, last)
    if last:
        cutter.add(moments[forward], moments[forward - 1].level)
    turn = len(cutter.marks)
    cutter.backward(moments[forward:], blocks, last)
    trained = tuple(profile.trained[slot] for slot in slots)
    return Stage(
        profile=dataclasses.replace(profile, trained=trained, frozen=_frozen(profile, blocks, first, last)),
        marks=tuple(cutter.marks), curve=np.array(cutter.rows), turn=turn, first=first, last=last,
    )  # fmt: skip


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
        self.marks: list[tuple[Mark, int]] = []
        self.rows: list[tuple[float, ...]] = []
        self.level = np.zeros(2)

    def add(self, moment: Moment, before: Affine, more: NDArray[np.float64] | None = None) -> None:
        """Append a moment; `before`: the module's level at the previous one; `more`: what the stage holds besides from here."""
        index = moment.index
        if moment.mark is Mark.GRADIENT:
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
            begins = moment.mark is Mark.FORWARD
            if begins and moment.index == 0 and not first:
                self.add(moment, level, -self.hidden)
            elif begins and moment.index == blocks[0] and not first:
                self.add(dataclasses.replace(moment, peak=level, level=level), level)
            elif moment.index == OUTER or moment.index in blocks:
                self.add(moment, level)
            elif begins and moment.index == blocks[-1] + 1 and not last and len(blocks) > 1:
                self.add(moment, level)  # the last block's input is dropped
            level = moment.level

    def backward(self, moments: Sequence[Moment], blocks: range, last: bool) -> None:
        """From the loss, or from the last block; the received gradient is no activation, and the output stays."""
        level = moments[0].level
        running = last
        received = not last
        for moment in moments[1:]:
            if moment.mark is Mark.BACKWARD and moment.index == blocks[-1] and not last:
                running = True
                self.marks.append((Mark.BACKWARD, moment.index))
                self.rows.append((*self.level, *self.level))
            elif running and moment.mark is Mark.BACKWARD and moment.index < blocks[0]:
                self.add(Moment(mark=Mark.END, peak=moment.peak, level=moment.level), level)
                return
            elif running:
                # The block that got the gradient has not freed it.
                more = self.hidden if received and moment.mark is not Mark.GRADIENT else None
                received = received and more is None
                self.add(moment, level, more)
            level = moment.level


@dataclass(frozen=True, slots=True)
class _Peak:
    """The fullest moment of a part of a micro-batch: activations and the stage's states."""

    activations: float
    held: Held

    @property
    def total(self) -> float:
        return self.activations + sum(self.held)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rank's step, in bytes."""

    activations: float
    """At the fullest moment."""
    held: Held
    """At the fullest moment, of the states that follow the moments."""
    after: Held
    """After all backwards."""
    sent: float
    """Gradients of hidden states that are kept until the end of the step."""
    received: float
    """Buffers of hidden states and of their gradients."""
    in_flight: float
    """Most micro-batches whose activations are held, of a mean stage."""
    gathered: tuple[float, float]
    """Gathers of parameters, and their bytes."""


def replay(layout: Layout, stages: Mapping[int, Stage], knobs: StateKnobs, batch: float, hidden: float) -> Replayed:
    """Follow the rank through a step of its schedule.

    Args:
        layout: the pipeline.
        stages: the rank's stages, by number.
        knobs: how states are sharded and sent.
        batch: samples of a micro-batch.
        hidden: bytes of a micro-batch's hidden state.
    """
    runs = {number: _Run(stage, knobs, batch) for number, stage in stages.items()}
    standing = {number: run.begin for number, run in runs.items()}
    done = dict.fromkeys(runs, 0)
    shorter = _shortened(layout)
    kept = highest = 0.0
    # What the micro-batches that are not replayed have sent.
    sent = (layout.micro_batches - shorter.micro_batches) * hidden * sum(not run.stage.first for run in runs.values())
    count = shorter.micro_batches
    running = most = 0
    best = _Peak(0.0, NOTHING)
    for action in _actions(shorter):
        run, number = runs[action.stage], action.stage
        others = _sum(state for other, state in standing.items() if other != number) if len(runs) > 1 else NOTHING
        if action.kind is ActionKind.FORWARD:
            peak = run.forward(done[number])
        else:
            peak = run.backward(done[number], count, action.kind)
        total = kept + sent + peak.total + sum(others)
        if total > highest:
            highest, best = total, _Peak(kept + sent + peak.activations, _sum((peak.held, others)))
        if action.kind is ActionKind.FORWARD:
            kept, running = kept + run.kept, running + 1
            most = max(most, running)
        elif action.kind is not ActionKind.INPUT_GRADIENT:
            kept, running = kept - run.kept, running - 1
            done[number] += 1
            standing[number] = run.after(done[number], count)
        if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) and not run.stage.first:
            sent += hidden
    gathered = [run.gathered(layout.micro_batches) for run in runs.values()]
    return Replayed(
        activations=best.activations, held=best.held, after=_sum(standing.values()), sent=sent,
        received=_received(layout) * hidden, in_flight=most / len(runs),
        gathered=(sum(count for count, _ in gathered), sum(size for _, size in gathered)),
    )  # fmt: skip


def _shortened(layout: Layout) -> Layout:
    """The layout with fewer micro-batches, if its schedule repeats itself after as many as fill the pipeline."""
    if SCHEDULES[layout.schedule] in HOLD_ALL:
        return layout
    fill = 2 * layout.ranks * layout.virtual_stages + BETWEEN + 1
    rounds = max(layout.micro_batches - fill, 0) // layout.ranks
    return dataclasses.replace(layout, micro_batches=layout.micro_batches - rounds * layout.ranks)


def _received(layout: Layout) -> float:
    """Buffers of hidden states and of their gradients, from stages on other ranks."""
    config = layout.config
    stages = layout.ranks * layout.virtual_stages
    found = 0
    for stage in stages_of_rank(config, layout.place):
        for other in (stage - 1, stage + 1):
            found += 0 <= other < stages and rank_of_stage(config, other) != layout.place
    return float(found * layout.micro_batches)


def _sum(states: Iterable[Held]) -> Held:
    found = [0.0, 0.0, 0.0]
    for state in states:
        for tag, size in enumerate(state):
            found[tag] += size
    return found[0], found[1], found[2]


Lines = tuple[tuple[float, float, Held], ...]
"""Moments that can be the fullest: constant and per-sample part of the activations, and the states."""
SIZES = tuple(2**power for power in range(13))
"""Micro-batches for which the fullest moments are kept; between two of them the fullest is one of the two's."""


@dataclass(frozen=True, slots=True)
class _States:
    """The states of a stage in the micro-batches that differ: the first ones, and the last."""

    forwards: Sequence[Lines]
    backwards: Sequence[Lines]
    begun: Sequence[Held]
    """As each begins."""
    end: Held
    """After the last micro-batch."""
    gathers: Sequence[tuple[int, float]]


@lru_cache(maxsize=4096)
def _states(stage: Stage, knobs: StateKnobs) -> _States:
    steps, end = micro_batches(stage.profile, stage.marks, knobs, BETWEEN)
    return _States(
        forwards=[_lines(stage, step, slice(0, stage.turn), np.zeros(2)) for step in steps],
        backwards=[_lines(stage, step, slice(stage.turn, None), stage.curve[stage.turn - 1, 2:]) for step in steps],
        begun=[step.during[0] for step in steps],
        end=end,
        gathers=[(step.gathers, step.gathered_bytes) for step in steps],
    )


def _lines(stage: Stage, step: Step, part: slice, kept: NDArray[np.float64]) -> Lines:
    curve, during, acting = stage.curve[part], np.array(step.during)[part], np.array(step.acting)[part]
    rows = np.concatenate([np.column_stack([curve[:, :2] - kept, during]), np.column_stack([curve[:, 2:] - kept, acting])])
    totals = np.add.outer(rows[:, 0] + rows[:, 2:].sum(axis=1), np.zeros(len(SIZES))) + np.outer(rows[:, 1], SIZES)
    chosen = [rows[place].tolist() for place in dict.fromkeys(totals.argmax(axis=0).tolist())]
    return tuple(
        (constant, slope, (parameters, gradients, buffers)) for constant, slope, parameters, gradients, buffers in chosen
    )


class _Run:
    """A stage's micro-batches."""

    def __init__(self, stage: Stage, knobs: StateKnobs, batch: float) -> None:
        self.stage, self.states, self.batch = stage, _states(stage, knobs), batch
        kept = stage.curve[stage.turn - 1]
        self.kept = float(kept[2] + kept[3] * batch)
        highest = stage.curve[stage.turn :, :2]
        self._inputs = max(float((highest[:, 0] + highest[:, 1] * batch).max()) - self.kept, 0.0)
        self._forwards = [_fullest(lines, batch) for lines in self.states.forwards]
        self._backwards = [_fullest(lines, batch) for lines in self.states.backwards]

    @property
    def begin(self) -> Held:
        return self.states.begun[0]

    def _which(self, done: int, count: int) -> int:
        """The step of the micro-batch after `done` ones: one of the first, or the last."""
        most = len(self._backwards) - 1
        return most if done >= count - 1 else min(done, max(most - 1, 0))

    def after(self, done: int, count: int) -> Held:
        return self.states.end if done >= count else self.states.begun[self._which(done, count)]

    def forward(self, done: int) -> _Peak:
        return self._forwards[min(done, len(self._forwards) - 1)]

    def backward(self, done: int, count: int, kind: ActionKind) -> _Peak:
        """The fullest moment, relative to what the rank holds with this micro-batch's activations."""
        step = self._which(done, count)
        if kind is ActionKind.INPUT_GRADIENT:
            return _Peak(self._inputs, self.states.begun[step])
        return self._backwards[step]

    def gathered(self, count: int) -> tuple[float, float]:
        (times, size), (last_times, last_size) = self.states.gathers[0], self.states.gathers[-1]
        return (count - 1) * times + last_times, (count - 1) * size + last_size


def _fullest(lines: Lines, batch: float) -> _Peak:
    return max((_Peak(constant + slope * batch, held) for constant, slope, held in lines), key=lambda peak: peak.total)
