"""Which steps of a script are timed."""

import random

import pytest
import torch

from executor.engine import RankContext
from executor.engines.command.readings import ReportedStep
from executor.engines.command.steps import ReportedSteps, slow_steps
from executor.measurement.timing import step_time
from executor.measurement.trial_report import Trial
from search_spaces.models.command import CommandModel
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig


def steps_of(
    seconds: list[float], rate_to_beat: float | None = None, start: int | None = 0, budget: float = 1.0
) -> ReportedSteps:
    """A step has 8 samples."""
    request = TrialRequest(
        attempt="", model=CommandModel(arguments=("train.py",)), config=TrialConfig(), world_size=2,
        workload=Workload(global_batch_size=8, sequence_length=16), fidelity=Fidelity(max_seconds=budget, max_steps=200),
        rate_to_beat=rate_to_beat, race_spread=0.02, race_warmup_steps=start,
    )  # fmt: skip
    context = RankContext(rank=0, world_size=2, device=torch.device("cpu"), control_group=None)
    steps = ReportedSteps(Trial(context=context, request=request, progress=lambda _: None))
    for value in seconds:
        steps.add(ReportedStep(seconds=value, waited=None))
    return steps


def noisy(seconds: list[float]) -> list[float]:
    rng = random.Random(0)
    return [value * rng.uniform(0.95, 1.05) for value in seconds]


def every(period: int, ordinary: float, slow: float, count: int = 300) -> list[float]:
    return [slow if index % period == period - 1 else ordinary for index in range(count)]


@pytest.mark.parametrize(
    ("seconds", "start", "regular", "explained"),
    [
        ([0.1] * 12, 0, (), True),
        ([1.0] * 7 + [0.1] * 8, 7, (), True),
        ([1.0] * 7 + [0.1] * 2, 0, (), False),
        # Each new length compiles: at first often, then rarely.
        ([1.0, 0.1, 1.0, 0.1, 0.1, 1.0, *[0.1] * 5, 1.0, *[0.1] * 12], 12, (), True),
        ([1.0, 0.1, 1.0, 0.1, 0.1, 1.0, *[0.1] * 5, 1.0, *[0.1] * 11], 0, (), False),
        (every(10, 0.1, 1.0, 22), 0, (9, 19), True),
        (every(10, 0.1, 1.0, 15), 0, (), False),
        (every(3, 0.1, 1.0, 9), 0, (2, 5, 8), True),
        ([2.0, *every(10, 0.1, 1.0, 32)], 0, (0, 10, 20, 30), True),
    ],
)
def test_slow_steps_are_explained_by_their_positions(
    seconds: list[float], start: int, regular: tuple[int, ...], explained: bool
) -> None:
    slow = slow_steps(noisy(seconds))
    assert (slow.start, slow.regular, slow.explained) == (start, regular, explained)


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3])
def test_steps_that_another_program_interrupts_are_neither_regular_nor_a_start_for_ever(share: float) -> None:
    explained, regular = 0, 0
    for seed in range(100):
        rng = random.Random(seed)
        seconds = [rng.uniform(0.95, 1.05) + rng.uniform(1, 5) * (rng.random() < share) for _ in range(200)]
        ends = (slow_steps(seconds[:count]) for count in range(20, len(seconds)))
        slow = next((slow for slow in ends if slow.explained), None)
        explained += slow is not None
        regular += slow is not None and bool(slow.regular)
    assert explained >= 98
    assert regular <= 15  # by chance


@pytest.mark.parametrize("slow_start", [3, 7, 12, 18])
def test_a_slow_start_is_not_timed_however_long(slow_start: int) -> None:
    steps = steps_of(noisy([1.0] * slow_start + [0.01] * 300), budget=4.0)
    assert steps.enough
    assert steps.settled
    assert steps.slow.start == slow_start
    assert step_time([step.seconds for step in steps.timed()]).mean == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("start", [0, None])
def test_a_regular_evaluation_counts_with_its_share_and_leaves_a_narrow_interval(start: int | None) -> None:
    steps = steps_of(noisy(every(10, 0.03, 1.03)), rate_to_beat=1.0, start=start)
    timing = step_time([step.seconds for step in steps.timed()])
    assert steps.enough
    assert not steps.lost
    assert timing.mean == pytest.approx(0.13, rel=0.05)
    assert timing.relative_half_width < 0.1


def test_no_race_is_lost_in_a_slow_start_that_may_be_as_long_as_the_baselines() -> None:
    slow = noisy([1.0] * 40)
    assert steps_of(slow, rate_to_beat=80.0, budget=4.0).lost
    assert not steps_of(slow[:29], rate_to_beat=80.0, budget=4.0, start=30).enough
    assert steps_of(slow[:30], rate_to_beat=80.0, budget=4.0, start=30).lost
    # One that takes too long is measured, and lost no race.
    late = steps_of(slow, rate_to_beat=80.0, budget=1.0, start=30)
    assert (late.enough, late.lost) == (True, False)
    assert (steps_of(slow, rate_to_beat=80.0, start=None).enough, steps_of(slow, rate_to_beat=80.0, start=None).lost) == (
        True,
        False,
    )
