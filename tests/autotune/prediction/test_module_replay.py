"""The peak of all cases at once equals that of one case whose schedule is followed action by action."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from autotune.prediction.equations.cases import SCHEDULES
from autotune.prediction.equations.module_memory import replay
from autotune.prediction.equations.module_pipeline import (
    ModuleStage,
    PipelineLayout,
    actions_of_rank,
    cut_stage,
    is_legal,
    shortened,
    stages_of,
)
from autotune.prediction.equations.module_states import StateBytes, StateKnobs, follow
from executor.dry.module_profile import profile_module
from executor.parallel.schedule import ActionKind
from search_spaces.models.module_profile import ModuleProfile
from search_spaces.models.pipeline import ONE_STAGE_SCHEDULES
from search_spaces.trial import Workload
from tests.sampling import sampled

PLAIN = StateKnobs(
    zero_stage=0, ranks=1, width=4.0, master_width=4.0, reduce_width=4.0, sum_width=4.0, accumulates=True, overlaps=True,
    defers=False, reshards=True, bucket=2000.0, prefetch=0.0, persistence=0.0, max_live=0.0, copies=True, pipelined=True,
)  # fmt: skip
THREE = dataclasses.replace(PLAIN, zero_stage=3, ranks=2, prefetch=3000.0, persistence=64.0, max_live=1e9)
KNOBS = (
    PLAIN,
    dataclasses.replace(PLAIN, zero_stage=1, ranks=4, width=2.0, overlaps=False),
    dataclasses.replace(PLAIN, zero_stage=2, ranks=2, width=2.0, bucket=1e9, copies=False),
    dataclasses.replace(PLAIN, zero_stage=2, ranks=2, reduce_width=2.0, width=2.0, defers=True),
    THREE,
    dataclasses.replace(THREE, width=2.0, bucket=1e9, prefetch=1e9, max_live=4000.0, reshards=False),
)
BATCHES = (1.0, 4.0, 32.0)
SHAPES = {name: ((2, 1), (4, 1)) if name in ONE_STAGE_SCHEDULES else ((2, 2),) for name in SCHEDULES}
CASES = {
    f"{name}, {ranks} x {virtual}, {count} micro-batches, {policy}{', offloaded' * offloads}": (
        PipelineLayout(
            ranks=ranks, virtual_stages=virtual, schedule=SCHEDULES.index(name), pipeline_rank=0, micro_batches=count,
        ),
        policy, offloads,
    )
    for count, policy, offloads in itertools.product((4, 8, 16), ("none", "full"), (False, True))
    for name in SCHEDULES
    for ranks, virtual in SHAPES[name]
}  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> ModuleProfile:
    model = profile_module(
        "benchmarks.prediction.plan_modules:decoder", Workload(global_batch_size=16, sequence_length=64), ("fp32",)
    )
    assert model.profile is not None
    return model.profile


@pytest.mark.prove(every=6)
@pytest.mark.parametrize("case", sampled(CASES, every=7))
def test_all_cases_at_once_equal_the_schedule_followed(profile: ModuleProfile, case: str) -> None:
    start, policy, offloads = CASES[case]
    trace = profile.traces["fp32"]
    assert is_legal(profile, start)
    for place in range(start.ranks):
        layout = dataclasses.replace(start, pipeline_rank=place)
        stages = [cut_stage(profile, trace, policy, 1, offloads, blocks) for _, blocks in stages_of(profile, layout)]
        pairs = [*itertools.product(range(len(KNOBS)), BATCHES)]
        which, batch = np.array([own for own, _ in pairs]), np.array([size for _, size in pairs])
        hidden = trace.hidden_bytes[0] + trace.hidden_bytes[1] * batch
        numbers = (layout.ranks, layout.virtual_stages, layout.schedule, layout.micro_batches)
        fewer = int(shortened(*(np.array(number) for number in numbers)))
        short, skipped = dataclasses.replace(layout, micro_batches=fewer), layout.micro_batches - fewer
        found = replay(short, stages, KNOBS, which, batch, hidden, np.full(len(pairs), float(skipped)))
        for row, (own, size) in enumerate(pairs):
            plain = _replay(short, stages, KNOBS[own], size, float(hidden[row]), skipped)
            values = (found.activations[row], *found.states[row], *found.after[row], found.sent[row], found.in_flight)
            assert values == pytest.approx(plain, rel=1e-12, abs=1e-6), (place, KNOBS[own], size)


def test_stages_of_equal_blocks_share_their_states(profile: ModuleProfile) -> None:
    trace = profile.traces["fp32"]
    first, *inner, last = [cut_stage(profile, trace, "none", 1, False, range(block, block + 1)) for block in range(4)]
    assert inner[0].shape is inner[1].shape
    assert len({first.shape, inner[0].shape, last.shape}) == 3
    assert follow(inner[0].shape, KNOBS[0]) is follow(inner[1].shape, dataclasses.replace(KNOBS[0], prefetch=0.0))


Peak = tuple[float, StateBytes]
"""Activations and states."""


class _Run:
    """A stage's micro-batches with one size and one kind of states."""

    def __init__(self, stage: ModuleStage, knobs: StateKnobs, batch: float) -> None:
        states = follow(stage.shape, knobs)
        self.begun, self.end = [*map(tuple, states.begun.tolist())], tuple(states.end.tolist())
        self.first, turn, curve = stage.first, stage.turn, stage.curve
        self.kept = float(curve[turn - 1, 2] + curve[turn - 1, 3] * batch)
        self.inputs = max(max(float(row[0] + row[1] * batch) for row in curve[turn:]) - self.kept, 0.0)
        levels = [(row[:2], row[2:]) for row in curve.tolist()]
        self.forwards, self.backwards = [], []
        for during, acting in states.moments.tolist():
            rows = [(peak, tuple(held)) for (peak, _), held in zip(levels, during, strict=True)]
            after = [(level, tuple(held)) for (_, level), held in zip(levels, acting, strict=True)]
            self.forwards.append(_fullest(rows[:turn] + after[:turn], batch, 0.0))
            self.backwards.append(_fullest(rows[turn:] + after[turn:], batch, self.kept))

    def which(self, done: int, count: int) -> int:
        most = len(self.begun) - 1
        return most if done >= count - 1 else min(done, most - 1)

    def after(self, done: int, count: int) -> StateBytes:
        return self.end if done >= count else self.begun[self.which(done, count)]

    def peak(self, kind: ActionKind, done: int, count: int) -> Peak:
        if kind is ActionKind.FORWARD:
            return self.forwards[min(done, len(self.begun) - 1)]
        if kind is ActionKind.INPUT_GRADIENT:
            return self.inputs, self.begun[self.which(done, count)]
        return self.backwards[self.which(done, count)]


def _fullest(rows: Sequence[tuple[Sequence[float], StateBytes]], batch: float, kept: float) -> Peak:
    return max(((line[0] + line[1] * batch - kept, held) for line, held in rows), key=lambda peak: peak[0] + sum(peak[1]))


def _replay(
    layout: PipelineLayout, stages: Sequence[ModuleStage], knobs: StateKnobs, batch: float, hidden: float, skipped: int
) -> tuple[float, ...]:
    """What `Replayed` holds, for one case: the schedule is followed action by action."""
    runs = {number: _Run(stage, knobs, batch) for number, stage in zip(layout.stages, stages, strict=True)}
    done, count = dict.fromkeys(runs, 0), layout.micro_batches
    sent = skipped * hidden * sum(not run.first for run in runs.values())
    waiting = highest = 0.0
    running = most = 0
    best: Peak = 0.0, (0.0, 0.0, 0.0)
    for action in actions_of_rank(layout):
        run, number = runs[action.stage], action.stage
        others = _sum(other.after(done[place], count) for place, other in runs.items() if place != number)
        activations, held = run.peak(action.kind, done[number], count)
        total = waiting + sent + activations + sum(held) + sum(others)
        if total > highest:
            highest, best = total, (waiting + sent + activations, _sum((held, others)))
        if action.kind is ActionKind.FORWARD:
            waiting, running = waiting + run.kept, running + 1
            most = max(most, running)
        elif action.kind is not ActionKind.INPUT_GRADIENT:
            waiting, running = waiting - run.kept, running - 1
            done[number] += 1
        if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT) and not run.first:
            sent += hidden
    after = _sum(run.after(done[place], count) for place, run in runs.items())
    return best[0], *best[1], *after, sent, most / len(runs)


def _sum(states: Iterable[StateBytes]) -> StateBytes:
    found = [0.0, 0.0, 0.0]
    for state in states:
        found = [own + size for own, size in zip(found, state, strict=True)]
    return found[0], found[1], found[2]
