"""The schedule finds fast settings within its budget, starts again on drift, and says why."""

import math
import random
import statistics

import pytest

from autotune.inside.schedule import Schedule, StepRecord
from autotune.inside.space import RunKnob, RunSpace, Setting
from benchmarks.inside.simulated import SimulatedRun

SIZES = RunKnob(name="micro_batch_size", values=(1, 2, 4, 8), ordered=True, effect=0.2, grows=True)
RECOMPUTATION = RunKnob(name="activation_checkpointing", values=("none", "full"), effect=0.2, saving_value="full")


def seconds_of(setting: Setting) -> float:
    return (1.0 + 0.8 / int(setting[0])) * (1.5 if setting[1] == "full" else 1.0)  # type: ignore[call-overload]


def play(schedule: Schedule, steps: int, limit: int = 8, factor: float = 1.0) -> None:
    """Train without noise; settings above the limit without recomputation are out of memory."""
    for _ in range(steps):
        while int(schedule.setting[0]) > limit and schedule.setting[1] == "none":  # type: ignore[call-overload]
            schedule.record(StepRecord(None, 0.1))
        schedule.record(StepRecord(factor * seconds_of(schedule.setting)))


def make(steps: int | None = 5_000, start: Setting = (1, "full"), remembered: float | None = None) -> Schedule:
    return Schedule(RunSpace((SIZES, RECOMPUTATION)), start, share=0.01, steps=steps, remembered_seconds=remembered)


def test_the_fastest_setting_is_found_and_the_search_ends() -> None:
    schedule = make()
    play(schedule, 200)
    assert schedule.incumbent == schedule.setting == (8, "none")
    assert schedule.is_over
    assert schedule.spent_seconds <= schedule.budget_seconds
    assert "over" in schedule.journal[-1].text


@pytest.mark.parametrize("seed", range(20))
def test_one_setting_alone_is_never_searched(seed: int) -> None:
    draws, alone = random.Random(seed), RunKnob(name="micro_batch_size", values=(4,), ordered=True, effect=0.2, grows=True)
    schedule = Schedule(RunSpace((alone,)), (4,), share=0.01, steps=60)
    for number in range(500):
        level = 0.01 if number < 250 else 0.03
        schedule.record(StepRecord(level * math.exp(draws.gauss(0, 0.3)) * (1 if draws.random() < 0.8 else 5)))
        assert schedule.is_over or number < 10
    assert [decision.text.split(" (")[0] for decision in schedule.journal] == ["there is no other setting"]


def test_what_is_expected_to_be_faster_is_tried_first_and_measurements_overrule_it() -> None:
    knob = RunKnob(name="micro_batch_size", values=(2, 4, 8), ordered=True, effect=0.2, trend=-0.1, grows=True)
    space = RunSpace((knob, RunKnob(name="activation_checkpointing", values=("none", "full"), effect=0.15, trend=0.25)))
    for is_faster, answer in ((True, (8, "none")), (False, (2, "none"))):
        schedule, tried = Schedule(space, (2, "none"), share=0.01, steps=2000), []
        for _ in range(200):
            rows, recomputation = schedule.setting
            if schedule.setting not in tried:
                tried.append(schedule.setting)
            ratio = int(rows) / 2  # type: ignore[call-overload]
            schedule.record(
                StepRecord(0.03 * ratio ** (-0.3 if is_faster else 0.3) * (1.4 if recomputation == "full" else 1.0))
            )
        assert tried[1][1] == "none", tried
        assert int(tried[1][0]) > 2, tried
        assert schedule.incumbent == answer


def test_a_setting_that_runs_out_of_memory_is_left_out_with_all_that_are_larger() -> None:
    schedule = make()
    play(schedule, 200, limit=2)
    assert schedule.incumbent == (2, "none")
    assert not schedule.space.fits((8, "none"))
    assert schedule.space.fits((8, "full"))
    assert any("out of memory" in decision.text for decision in schedule.journal)


def test_a_search_starts_again_when_the_time_of_a_step_drifts() -> None:
    schedule = make()
    play(schedule, 200)
    assert schedule.is_over
    play(schedule, 100, factor=1.5)
    assert any("starts again" in decision.text for decision in schedule.journal)


def test_an_earlier_answer_is_checked_in_a_few_steps() -> None:
    schedule = make(start=(8, "none"), remembered=seconds_of((8, "none")))
    play(schedule, 12)
    assert schedule.is_over
    assert "as in the earlier run" in schedule.journal[0].text


def test_a_run_too_short_for_a_trial_tries_nothing() -> None:
    schedule = make(steps=20)
    play(schedule, 20)
    assert schedule.incumbent == (1, "full")


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("seed", range(6))
def test_the_cost_of_simulated_runs_is_bounded(seed: int) -> None:
    outcome = SimulatedRun(seed).play()
    assert outcome.cost <= 1.1 * outcome.run.share


@pytest.mark.prove
def test_of_simulated_runs_most_keep_the_budget() -> None:
    outcomes = [SimulatedRun(seed).play() for seed in range(100, 160)]
    assert sum(outcome.cost <= outcome.run.share for outcome in outcomes) >= 57
    assert statistics.median(outcome.behind for outcome in outcomes) <= 0.03
