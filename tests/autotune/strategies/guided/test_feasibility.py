"""How probable it is that a trial ends well."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.prediction.planning.memory_fit import fit_probability
from autotune.strategies.guided.surrogate import Feasibility
from tests.autotune.strategies.guided.made_up import described, told


def test_before_any_trial_it_is_the_chance_that_memory_suffices() -> None:
    pool = described([1.0] * 3, needed=[50.0, 100.0, 200.0])
    chance = Feasibility(told(pool, [], [])).probability(pool)
    assert np.allclose(chance, fit_probability(pool.needed, pool.room, pool.memory_spread))
    assert chance[0] > 0.99
    assert abs(chance[1] - 0.5) < 1e-6
    assert chance[2] < 0.01


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


def test_a_trial_counts_most_for_those_that_share_its_terms() -> None:
    tags = [[90.0, 10.0], [94.0, 10.0], [10.0, 94.0]]
    pool = described([1.0] * 3, needed=[100.0, 104.0, 104.0], tags=tags, features=[[0.0], [30.0], [30.0]])
    before, lost, ran = (Feasibility(told(pool, tried, rates)).quick_probability(pool) for tried, rates in
                         (([], []), ([0], [None]), ([0], [5.0])))  # fmt: skip
    assert before[1] == before[2]
    assert lost[1] < lost[2] < before[2] - 0.1
    assert ran[1] > ran[2] > before[2] + 0.1


def test_a_failure_of_unknown_cause_counts_as_memory_only_where_memory_is_doubtful() -> None:
    pool = described([1.0] * 3, needed=[104.0, 40.0, 102.0], tags=[[60.0, 44.0], [20.0, 20.0], [62.0, 40.0]])
    before = Feasibility(told(pool, [], [])).quick_probability(pool)[2]
    near = Feasibility(told(pool, [0], [None], out_of_memory=False)).quick_probability(pool)[2]
    far = Feasibility(told(pool, [1], [None], out_of_memory=False)).quick_probability(pool)[2]
    assert near < before - 0.1
    assert abs(far - before) < 0.05


@given(st.lists(st.tuples(st.floats(20, 400), st.sampled_from(["ran", "lost", "failed", "peak"])), min_size=1, max_size=30))
def test_errors_stay_bounded_whatever_the_trials_say(trials: list[tuple[float, str]]) -> None:
    pool = described([1.0] * len(trials), needed=[needed for needed, _ in trials])
    seen = told(pool, list(range(len(trials))), [None if kind in ("lost", "failed") else 1.0 for _, kind in trials])
    for place, (needed, kind) in enumerate(trials):
        seen.out_of_memory[place] = kind == "lost"
        seen.peak[place] = needed * 1.3 if kind == "peak" else np.nan
    chance = Feasibility(seen).quick_probability(described([1.0] * 20, needed=np.linspace(5.0, 400.0, 20)))
    assert np.all(np.isfinite(chance))
    assert np.all((chance >= 0) & (chance <= 1))
