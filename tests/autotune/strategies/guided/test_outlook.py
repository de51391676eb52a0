"""What further trials may bring."""

import numpy as np

from autotune.strategies.guided.strategy import outlook
from tests.autotune.strategies.guided.made_up import described, everything, told


def test_without_a_measured_rate_there_is_none() -> None:
    pool = described([10.0, 20.0])
    assert outlook(pool, told(pool, [], []), everything(pool), 0.02) is None


def test_where_all_was_tried_nothing_is_left() -> None:
    pool = described([10.0, 20.0])
    found = outlook(pool, told(pool, [0, 1], [10.0, 20.0]), np.array([False, False]), 0.02)
    assert found is not None
    assert (found.expected_gain, found.chance_of_more) == (0.0, 0.0)


def test_slow_ones_that_are_left_leave_no_doubt_and_fast_ones_do() -> None:
    pool = described([100.0, 10.0, 9.0], features=[[0.0], [4.0], [8.0]])
    sure = outlook(pool, told(pool, [0], [100.0]), np.array([False, True, True]), 0.02)
    other = described([100.0, 130.0, 9.0], features=[[0.0], [4.0], [8.0]])
    unsure = outlook(other, told(other, [0], [100.0]), np.array([False, True, True]), 0.02)
    assert sure is not None
    assert unsure is not None
    assert sure.chance_of_more < 0.01
    assert unsure.chance_of_more > 0.5
    assert unsure.expected_gain > 0.1 > sure.expected_gain


def test_what_does_not_fit_is_no_hope() -> None:
    pool = described([100.0, 130.0], needed=[50.0, 300.0], tags=[[50.0], [300.0]])
    found = outlook(pool, told(pool, [0], [100.0]), np.array([False, True]), 0.02)
    assert found is not None
    assert found.chance_of_more < 0.01


def test_the_chance_is_kept_when_it_is_told_again() -> None:
    pool = described([100.0, 105.0, 104.0, 90.0])
    known = told(pool, [0], [100.0])
    open_ = np.array([False, True, True, True])
    assert outlook(pool, known, open_, 0.02) == outlook(pool, known, open_, 0.02)
