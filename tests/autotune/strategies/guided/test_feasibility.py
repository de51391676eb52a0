"""How probable it is that a trial ends well."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.strategies.guided.feasibility import Feasibility
from tests.autotune.strategies.guided.made_up import described, told


def test_before_any_trial_it_is_the_chance_that_memory_suffices() -> None:
    pool = described([1.0] * 3, needed=[50.0, 100.0, 200.0])
    chance = Feasibility(told(pool, [], [])).probability(pool)
    assert chance[0] > 0.999
    assert abs(chance[1] - 0.5) < 1e-6
    assert chance[2] < 0.001


def test_what_holds_as_much_in_every_tag_does_not_fit_either() -> None:
    tags = [[30.0, 20.0], [31.0, 20.0], [29.0, 40.0], [31.0, 20.0]]
    pool = described([1.0] * 4, needed=[50.0, 51.0, 69.0, 51.0], tags=tags, kind=[0, 0, 0, 1])
    chance = Feasibility(told(pool, [0], [None])).probability(pool)
    assert chance[1] == 0.0
    assert chance[2] > 0.0  # less in one tag
    assert chance[3] > 0.0  # another kind: bytes are not compared


def test_a_failure_of_another_cause_says_nothing_of_memory() -> None:
    pool = described([1.0] * 2, tags=[[20.0, 20.0], [30.0, 30.0]], features=[[0.0], [1000.0]])
    chance = Feasibility(told(pool, [0], [None], out_of_memory=False)).probability(pool)
    assert chance[1] > 0.99


def test_failures_are_expected_near_failures() -> None:
    pool = described([1.0] * 3, features=[[0.0], [0.5], [50.0]])
    chance = Feasibility(told(pool, [0], [None], out_of_memory=False)).probability(pool)
    assert chance[1] < 0.5
    assert chance[2] > 0.95


def test_what_holds_no_more_than_one_that_ran_fits() -> None:
    pool = described([1.0] * 2, needed=[120.0, 110.0], tags=[[60.0, 60.0], [50.0, 60.0]])
    before = Feasibility(told(pool, [], [])).probability(pool)
    after = Feasibility(told(pool, [0], [5.0])).probability(pool)
    assert before[1] < 0.2
    assert after[1] >= 0.99


def test_a_prediction_that_was_too_high_is_taken_to_be_too_high_elsewhere() -> None:
    pool = described([1.0] * 2, needed=[110.0, 112.0], tags=[[50.0, 60.0], [62.0, 50.0]], features=[[0.0], [30.0]])
    before = Feasibility(told(pool, [], [])).probability(pool)[1]
    ran = told(pool, [0], [5.0])
    ran.peak[0] = 80.0
    assert Feasibility(ran).probability(pool)[1] > before + 0.5


@given(st.lists(st.tuples(st.floats(10, 300), st.booleans()), min_size=1, max_size=12), st.floats(0.02, 0.5))
def test_less_memory_is_never_less_probable_to_fit(trials: list[tuple[float, bool]], spread: float) -> None:
    pool = described([1.0] * len(trials), needed=[needed for needed, _ in trials], memory_spread=[spread] * len(trials))
    feasibility = Feasibility(told(pool, list(range(len(trials))), [1.0 if ran else None for _, ran in trials]))
    asked = described([1.0] * 50, needed=np.linspace(5.0, 400.0, 50), memory_spread=[spread] * 50)
    chance = feasibility.quick_probability(asked)
    assert np.all(np.diff(chance) <= 1e-12)
    assert np.all((chance >= 0) & (chance <= 1))
