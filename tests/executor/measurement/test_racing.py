"""The bound of a race: who loses is really slower."""

import math
import random

import pytest

from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, step_time
from executor.measurement.trial_report import FEWEST_WARM_UP_STEPS, HOPELESS, Race

TRIALS = 400
STEPS = 15


def race(best: float = 100.0, spread: float = 0.04, freedom: int = 5) -> Race:
    return Race(samples=8, rate_to_beat=best, spread=math.sqrt(2) * spread, degrees_of_freedom=freedom)


def is_pruned(rng: random.Random, ratio: float, spread: float, noise: float, correlation: float, stalls: float) -> bool:
    """Whether a configuration of `ratio` of the best's true rate loses, each of the two rates being one repeat's."""
    held = race(100.0 * math.exp(rng.gauss(0.0, spread)), spread)
    rate = 100.0 * ratio * math.exp(rng.gauss(0.0, spread))
    seconds: list[float] = []
    state = rng.gauss(0.0, 1.0)
    while len(seconds) < STEPS:
        state = correlation * state + math.sqrt(1 - correlation**2) * rng.gauss(0.0, 1.0)
        stall = 1.0 + 2.0 * rng.random() if rng.random() < stalls else 1.0
        seconds.append(8 / rate * stall * math.exp(noise * state - noise**2 / 2))
        if held.is_lost(seconds):
            return True
        if len(seconds) >= 5 and step_time(seconds).relative_half_width <= 0.02:
            return False
    return False


@pytest.mark.prove
@pytest.mark.parametrize(
    ("spread", "noise", "correlation", "stalls"),
    [(0.01, 0.02, 0.0, 0.0), (0.04, 0.1, 0.5, 0.0), (0.01, 0.1, 0.3, 0.05)],
)
def test_what_is_as_fast_as_the_best_is_pruned_in_fewer_than_one_of_a_hundred(
    spread: float, noise: float, correlation: float, stalls: float
) -> None:
    rng = random.Random(0)
    lost = sum(is_pruned(rng, 1.0, spread, noise, correlation, stalls) for _ in range(TRIALS))
    assert lost < 0.01 * TRIALS


def test_what_is_far_slower_is_pruned_at_once() -> None:
    rng = random.Random(0)
    assert sum(is_pruned(rng, 0.5, 0.04, 0.05, 0.3, 0.0) for _ in range(100)) == 100


def test_no_race_is_lost_before_an_interval_is_known() -> None:
    slow = [1.0 + 0.001 * number for number in range(MIN_STEPS_FOR_INTERVAL)]
    assert race().is_lost(slow)
    assert not race().is_lost(slow[:-1])


def test_the_bound_is_above_the_rate_and_falls_with_the_spread() -> None:
    slow = [0.1, 0.11, 0.1, 0.12, 0.1, 0.11]
    wide, narrow = race(spread=0.04).interval(slow), race(spread=0.01).interval(slow)
    assert narrow.mean < narrow.high < wide.high
    assert narrow.low < narrow.mean
    assert narrow.mean == pytest.approx(8 / (sum(slow) / len(slow)))


def test_extrapolated_seconds_that_are_not_positive_lose_no_race() -> None:
    assert not race().is_lost([-1.0, 0.5, -2.0, 0.5, 0.5])


def test_warm_up_ends_a_trial_only_where_every_step_is_hopeless() -> None:
    hopeless = 8 / 100.0 * HOPELESS * 1.01
    assert race().is_hopeless([hopeless] * FEWEST_WARM_UP_STEPS)
    assert not race().is_hopeless([hopeless] * (FEWEST_WARM_UP_STEPS - 1))
    assert not race().is_hopeless([hopeless * 9] * FEWEST_WARM_UP_STEPS + [8 / 100.0 * HOPELESS * 0.99])
