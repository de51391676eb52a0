"""Intervals: quantiles against published tables, coverage by simulation."""

import random

import pytest

from autotune.objective.intervals import Repeat, Spread, pooled_spread, t_quantile


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (6, 2.4469), (10, 2.2281), (29, 2.0452), (120, 1.9799)]
)
def test_t_quantile_is_that_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-5)


def test_t_quantile_of_many_degrees_is_the_normal_one() -> None:
    assert t_quantile(0.975, 10_000) == pytest.approx(1.95996, abs=1e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.5, 5), (1.0, 5), (0.975, 0)])
def test_t_quantile_refuses_what_has_none(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="t quantile"):
        t_quantile(probability, freedom)


def test_interval_of_a_trial_has_both_terms() -> None:
    interval = Spread(relative=0.04, degrees_of_freedom=5).interval(100.0, 0.03)
    assert interval.mean == 100.0
    assert interval.high - 100.0 == pytest.approx(100.0 * 2.5706 * 0.05, rel=1e-4)
    assert 100.0 - interval.low == pytest.approx(interval.high - 100.0)


def test_spread_without_repeats_is_the_prior() -> None:
    assert pooled_spread([[Repeat(rate=100.0, within=0.01)]]) == Spread()


def test_spread_learns_from_repeats() -> None:
    generator = random.Random(0)
    groups = [[Repeat(rate=generator.gauss(100.0, 1.0), within=0.0) for _ in range(30)] for _ in range(5)]
    spread = pooled_spread(groups)
    assert spread.degrees_of_freedom == 5 + 5 * 29
    assert spread.relative == pytest.approx(0.0125, abs=0.002)  # 1 % of the repeats, 4 % of the prior worth 5 of 150


def test_spread_does_not_count_the_error_within_trials_twice() -> None:
    generator = random.Random(1)
    groups = [[Repeat(rate=generator.gauss(100.0, 3.0), within=0.03) for _ in range(50)] for _ in range(20)]
    assert pooled_spread(groups).relative < 0.015


def test_ninety_five_percent_of_intervals_hold_the_truth() -> None:
    generator = random.Random(2)
    spread = Spread(relative=0.04)
    held = 0
    for _ in range(2_000):
        between, within = generator.gauss(0.0, 0.04), generator.gauss(0.0, 0.01)
        interval = spread.interval(100.0 * (1.0 + between + within), 0.01)
        held += interval.low <= 100.0 <= interval.high
    assert held / 2_000 >= 0.95


def test_more_repeats_narrow_the_estimate() -> None:
    spread = Spread()
    one = spread.combined([Repeat(rate=100.0, within=0.01)])
    four = spread.combined([Repeat(rate=100.0, within=0.01)] * 4)
    assert four.high - four.low == pytest.approx((one.high - one.low) / 2)


def test_pairs_cancel_the_drift_that_both_share() -> None:
    drift = [1.0, 0.8, 1.2, 0.9, 1.1]
    slow = [Repeat(rate=100.0 * factor, within=0.002) for factor in drift]
    fast = [Repeat(rate=110.0 * factor, within=0.002) for factor in drift]
    groups = pooled_spread([slow, fast])
    paired = Spread(relative=0.02).ratio(fast, slow)
    free = groups.ratio(fast, slow[:4])
    assert paired.mean == pytest.approx(1.1)
    assert 1.0 < paired.low < paired.high < 1.2
    assert free.low < 1.0 < free.high


def test_ratio_is_the_inverse_the_other_way_round() -> None:
    first, second = [Repeat(rate=120.0, within=0.01)], [Repeat(rate=100.0, within=0.02)]
    forth, back = Spread().ratio(first, second), Spread().ratio(second, first)
    assert forth.mean == pytest.approx(1.0 / back.mean)
    assert forth.low == pytest.approx(1.0 / back.high)


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="repeat"):
        Spread().combined([])
    with pytest.raises(ValueError, match="repeat"):
        Spread().ratio([], [Repeat(rate=1.0, within=0.0)])
