"""The peak of a rank that runs its pipeline stages of a user's module in the order of a schedule, for many cases at once.

What a rank holds while it acts follows from the action, from the number of micro-batches of each stage that wait for their
backward, and from the gradients sent. A schedule visits few such situations, which do not depend on sizes: they are listed once
per layout, and the fullest is found for all cases together.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.module_pipeline import BETWEEN, ModuleStage, PipelineLayout, Shape, actions_of_rank
from autotune.prediction.equations.module_states import Held, StateKnobs, micro_batches
from executor.parallel.schedule import ActionKind

STEPS = BETWEEN + 2
"""Micro-batches whose states differ: the first ones, and the last."""
KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
"""What has a peak of its own; gradients of weights have that of a whole backward."""
SIZES = np.array([2.0**power for power in range(13)])
"""Micro-batches for which the fullest moments are kept; between two of them the fullest is one of the two's."""


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
    state_bytes = np.concatenate([run.held for run in runs])
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
        cases = np.arange(len(batch))
        kept_line = stage.curve[stage.turn - 1, 2:]
        self.kept = kept_line[0] + kept_line[1] * batch
        highest = stage.curve[stage.turn :, :2]
        inputs = np.maximum((highest[:, :1] + np.outer(highest[:, 1], batch)).max(axis=0) - self.kept, 0.0)
        lines = _lines(stage, followed)[knob_index]  # (cases, kinds, steps, sizes, 5)
        sizes = lines[..., 0] + lines[..., 1] * batch[:, None, None, None]
        best = (sizes + lines[..., 2:].sum(axis=-1)).argmax(axis=-1)[..., None]
        fullest = np.take_along_axis(sizes, best, axis=-1)[..., 0]
        states = np.take_along_axis(lines[..., 2:], best[..., None], axis=-2)[..., 0, :]
        begun = np.stack([run.begun for run in followed])[knob_index]
        actions = np.concatenate([fullest.reshape(len(cases), -1), np.repeat(inputs[:, None], STEPS, axis=1)], axis=1)
        self.activations: Array = actions.T
        """(kinds x steps, cases)"""
        of_actions = np.concatenate([states.reshape(len(cases), -1, 3), begun], axis=1)
        self.held: Array = of_actions.transpose(1, 0, 2)
        """(kinds x steps, cases, 3)"""
        end = np.array([run.end for run in followed])[knob_index]
        self.standing: Array = np.stack([*begun.transpose(1, 0, 2), end, np.zeros_like(end)])
        """(steps + 2, cases, 3): as each step begins; after the last one; nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """The states of stages of one shape in the micro-batches that differ."""

    during: Array
    """(steps, moments, 3)"""
    acting: Array
    begun: Array
    """(steps, 3): as each begins."""
    end: Held
    """After the last micro-batch."""
    gathers: Sequence[tuple[int, float]]

    def gathered(self, count: float) -> tuple[float, float]:
        """Gathers of a step of `count` micro-batches and the bytes of their messages."""
        (times, size), (last_times, last_size) = self.gathers[0], self.gathers[-1]
        return (count - 1) * times + last_times, (count - 1) * size + last_size


def follow(shape: Shape, knobs: StateKnobs) -> Followed:
    """The states; sizes beyond the shape's count as one."""
    return _followed(shape, _within(knobs, float(shape.elements)))


@lru_cache(maxsize=1 << 14)
def _within(knobs: StateKnobs, elements: float) -> StateKnobs:
    names = ("bucket", "prefetch", "max_live")
    return dataclasses.replace(knobs, **{name: min(getattr(knobs, name), elements) for name in names})


@lru_cache(maxsize=4096)
def _followed(shape: Shape, knobs: StateKnobs) -> Followed:
    steps, end = micro_batches(shape.trained, shape.marks, knobs, BETWEEN)
    return Followed(
        during=_arrays(step.during for step in steps), acting=_arrays(step.acting for step in steps),
        begun=np.array([step.during[0] for step in steps]), end=end,
        gathers=[(step.gathers, step.gathered_bytes) for step in steps],
    )  # fmt: skip


def _arrays(states: Iterable[Sequence[Held]]) -> Array:
    return np.array([*states])


def _lines(stage: ModuleStage, followed: Sequence[Followed]) -> Array:
    """(knobs, 2, steps, sizes, 5): the moment of forward and of backward that is the fullest for each of `SIZES`: constant and
    per-sample part of the activations, less (backward) those that wait, and the states."""
    lines = stage.lines
    missing = [run for run in dict.fromkeys(followed) if run not in lines]
    for start in range(0, len(missing), 16):
        some = missing[start : start + 16]
        turn, kept_line = stage.turn, stage.curve[stage.turn - 1, 2:]
        forward = _fullest(stage.curve[:turn], some, slice(0, turn))
        backward = _fullest(stage.curve[turn:] - np.concatenate([kept_line, kept_line]), some, slice(turn, None))
        lines.update(zip(some, np.stack([forward, backward], axis=1), strict=True))
    return np.stack([lines[run] for run in followed])


def _fullest(curve: Array, followed: Sequence[Followed], part: slice) -> Array:
    """(knobs, steps, sizes, 5)"""
    states = np.stack([np.concatenate([run.during[:, part], run.acting[:, part]], axis=1) for run in followed])
    lines = np.concatenate([curve[:, :2], curve[:, 2:]])  # (2 x moments, 2)
    constant = lines[:, 0] + states.sum(axis=-1)
    best = np.stack([(constant + lines[:, 1] * size).argmax(axis=-1) for size in SIZES], axis=-1)
    chosen = np.take_along_axis(states, best[..., None], axis=-2)
    return np.concatenate([lines[best], chosen], axis=-1)
