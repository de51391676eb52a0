"""Which candidates are tried next."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.strategies.guided import strategy as module
from autotune.strategies.guided.strategy import choose, expected_gain
from tests.autotune.strategies.guided.made_up import described, everything, told


def test_first_the_fastest_that_fits() -> None:
    pool = described([30.0, 20.0, 10.0], needed=[150.0, 50.0, 10.0], tags=[[75.0], [25.0], [5.0]])
    assert choose(pool, told(pool, [], []), everything(pool), 3) == [1, 2, 0]


def test_what_is_closed_is_not_chosen() -> None:
    pool = described([30.0, 20.0, 10.0])
    open_ = np.array([False, True, True])
    assert choose(pool, told(pool, [0], [30.0]), open_, 5) == [1, 2]


def test_after_a_disappointment_something_unlike_it_is_tried() -> None:
    pool = described([30.0, 29.0, 28.0], features=[[0.0], [0.1], [30.0]])
    assert choose(pool, told(pool, [0], [15.0]), np.array([False, True, True]), 1) == [2]


def test_a_batch_spreads_out() -> None:
    pool = described([30.0, 29.9, 29.8], features=[[0.0], [0.01], [40.0]])
    assert choose(pool, told(pool, [], []), everything(pool), 2) == [0, 2]


def test_what_runs_is_not_waited_for() -> None:
    pool = described([30.0, 29.9, 29.8], features=[[0.0], [0.01], [40.0]])
    running = pool.take(np.array([0]))
    assert choose(pool, told(pool, [], []), np.array([False, True, True]), 1, running=running) == [2]


def test_of_equal_gains_the_cheaper_trial_comes_first() -> None:
    pool = described([10.0, 30.0, 30.0], features=[[0.0], [50.0], [-50.0]], cost=[1.0, 9.0, 1.0])
    assert choose(pool, told(pool, [0], [10.0]), np.array([False, True, True]), 1) == [2]


def test_process_groups_that_are_there_are_cheaper() -> None:
    pool = described([10.0, 30.0, 30.0], features=[[0.0], [50.0], [-50.0]], cost=[0.5] * 3, mesh=[7, 8, 7])
    assert choose(pool, told(pool, [0], [10.0]), np.array([False, True, True]), 1) == [2]


def test_candidates_besides_are_chosen_too() -> None:
    pool, extra = described([10.0, 11.0]), described([90.0], features=[[60.0]])
    assert choose(pool, told(pool, [0], [10.0]), np.array([False, True, True]), 1, extra=extra) == [2]


@pytest.mark.parametrize(
    ("trials", "noise", "unlike"), [(11, 0.05, True), (12, 0.05, False), (13, 0.05, True), (13, 0.0, False)]
)
def test_every_second_time_what_could_be_told_from_the_best_is_tried(trials: int, noise: float, unlike: bool) -> None:
    """The last one is expected to be slower, by what is less than sure; the others are the best's close neighbours."""
    pool = described([30.0] * 15 + [22.0], features=[*([0.01 * place] for place in range(15)), [40.0]])
    tried, open_ = list(range(trials)), everything(pool)
    open_[tried] = False
    (chosen,) = choose(pool, told(pool, tried, [30.0] * trials, noise=noise), open_, 1)
    assert (chosen == 15) is unlike


def test_a_large_pool_gives_what_all_of_it_would_give() -> None:
    random = np.random.default_rng(0)
    rates = np.exp(random.normal(0, 0.4, 3000))
    pool = described(list(rates), features=[list(row) for row in random.normal(0, 4, (3000, 3))])
    places = [int(place) for place in random.choice(3000, 30, replace=False)]
    known = told(pool, places, [float(rates[place] * np.exp(random.normal(0, 0.1))) for place in places])
    open_ = everything(pool)
    open_[places] = False
    whole = choose(pool, known, open_, 3)
    considered, reached = module.CONSIDERED, module.PRESELECTED
    try:
        module.CONSIDERED, module.PRESELECTED = 300, 1500
        assert choose(pool, known, open_, 3) == whole
    finally:
        module.CONSIDERED, module.PRESELECTED = considered, reached


@given(st.floats(-3, 3), st.floats(0.01, 2), st.floats(0.0, 0.5))
def test_expected_gain_is_positive_and_grows_with_the_mean(mean: float, spread: float, more: float) -> None:
    gains = expected_gain(np.array([mean, mean + more]), np.array([spread, spread]), 0.0)
    assert gains[0] >= -1e-6
    assert gains[1] >= gains[0] - 1e-6
    assert gains[1] >= mean + more - 1e-6
