"""Step times: intervals, trend, quantiles."""

import random
import statistics

import pytest

from executor.measurement.timing import has_trend, steady_steps, step_time, student_t_975


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)],
)
def test_student_quantiles_equal_the_printed_table(degrees: int, quantile: float) -> None:
    assert student_t_975(degrees) == pytest.approx(quantile, rel=2e-3)


def test_no_degree_of_freedom_means_no_bound() -> None:
    assert student_t_975(0) == float("inf")
    assert step_time([1.0]).relative_half_width == float("inf")


def test_the_interval_of_independent_steps_holds_the_true_mean() -> None:
    generator = random.Random(0)
    held = 0
    for _ in range(400):
        timing = step_time([generator.gauss(1.0, 0.1) for _ in range(12)])
        held += abs(timing.mean - 1.0) <= timing.relative_half_width * timing.mean
    assert held / 400 >= 0.93


def test_correlated_steps_get_a_wider_interval_that_still_holds() -> None:
    generator = random.Random(1)
    held = 0
    for _ in range(400):
        level, steps = 0.0, []
        for _ in range(40):
            level = 0.6 * level + generator.gauss(0.0, 0.05)
            steps.append(1.0 + level)
        timing = step_time(steps)
        held += abs(timing.mean - 1.0) <= timing.relative_half_width * timing.mean
    naive = 2 * statistics.stdev(steps) / len(steps) ** 0.5
    assert timing.relative_half_width * timing.mean > naive
    assert held / 400 >= 0.85


def test_warm_up_ends_where_nothing_drifts() -> None:
    assert has_trend([])
    assert has_trend([1.0, 0.5, 0.5])
    assert has_trend([2.0, 1.9, 1.0, 1.0])
    assert not has_trend([1.0, 1.02, 0.99, 1.01])


def test_noise_as_large_as_the_change_is_no_trend() -> None:
    assert not has_trend([1.0, 1.6, 1.0, 1.2])


def test_the_later_half_of_a_steady_window_counts_as_timed() -> None:
    assert steady_steps([9.0, 1.0, 1.02, 0.99, 1.01]) == 2
    assert steady_steps([1.0, 1.6, 1.0, 1.2]) == 2  # the change is noise


def test_of_a_window_with_a_small_but_visible_drift_nothing_is_timed() -> None:
    assert not has_trend([1.08, 1.081, 1.0, 1.001])
    assert steady_steps([1.08, 1.081, 1.0, 1.001]) == 0
    assert steady_steps([1.0, 1.0]) == 0
