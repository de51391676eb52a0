"""What a job is said to cost: controls, confirmations and starts are in it, and its own trials correct it."""

import pytest

from autotune.forecast import expected
from autotune.loop.budget import START_SECONDS, Measurements, job_seconds, most_measurements, seconds_left, trial_seconds_band
from autotune.prediction.planning.scan import Bounds
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from search_spaces.trial import Fidelity
from storage.store import Store

MOST = most_measurements(trials=4, control_every=2, confirm_repeats=3)


def test_controls_and_confirmations_are_measurements() -> None:
    assert Measurements(search=4, control=2, confirm=9) == MOST
    assert most_measurements(trials=4, control_every=0, confirm_repeats=0).total == 4


def test_at_an_even_pace_what_is_announced_is_what_it_takes() -> None:
    """4 trials of 10 s: with two controls and nine confirmations the job takes 150 s, not the 40 s of its search."""
    order = [{"search": 1}] * 2 + [{"control": 1}] + [{"search": 1}] * 2 + [{"control": 1}] + [{"confirm": 1}] * 9
    done = Measurements()
    for number, kind in enumerate(order, 1):
        done = Measurements(**{name: getattr(done, name) + kind.get(name, 0) for name in ("search", "control", "confirm")})
        left = seconds_left(MOST, done, seconds=10.0 * number)
        assert left is not None
        assert 10.0 * number + left == pytest.approx(150.0)


def test_the_pace_is_the_jobs_own_whatever_was_predicted() -> None:
    assert seconds_left(MOST, Measurements(), 3.0) is None
    slow, fast = (seconds_left(MOST, Measurements(search=2), seconds) for seconds in (40.0, 4.0))
    assert (slow, fast) == (20.0 * 13, 2.0 * 13)


def test_of_a_job_that_goes_on_only_its_own_time_counts() -> None:
    """Resumed after two trials, one more has taken 5 s."""
    assert seconds_left(MOST, Measurements(search=3), 5.0, since=2) == pytest.approx(5.0 * 12)


def test_a_search_that_ended_early_leaves_its_confirmations_alone() -> None:
    assert seconds_left(MOST, Measurements(search=2, confirm=3), 50.0) == pytest.approx(10.0 * 6)


def test_a_budget_of_time_ends_the_search_and_not_its_confirmations() -> None:
    left = seconds_left(MOST, Measurements(search=1), 10.0, allowed=5.0)
    assert left == pytest.approx(5.0 + 10.0 + 90.0)  # what runs when the time is up still ends
    request = request_from_fields({"model": "llama-tiny", "trials": 4, "max_seconds": 20, "control_every": 0})
    assert job_seconds(request, 2, (10.0, 10.0)) == pytest.approx((110 + 2 * START_SECONDS,) * 2)


def test_noisy_steps_are_timed_for_as_long_as_a_measurement_may_take() -> None:
    low, high = trial_seconds_band(0.05, Fidelity())
    assert low < 1
    assert 5 < high < 8
    assert trial_seconds_band(10.0, Fidelity())[1] >= trial_seconds_band(10.0, Fidelity())[0]


def test_what_a_form_announces_holds_every_measurement_and_the_start_of_ranks(store: Store) -> None:
    session = resolve(request_from_fields({"model": "llama-tiny", "trials": 4, "runner": "local", "space": "zero"}))
    found = expected(session, store, Bounds())
    assert found.trials == 13
    assert found.seconds is not None and found.trial_seconds is not None
    assert found.seconds == pytest.approx(tuple(13 * seconds + 2 * START_SECONDS for seconds in found.trial_seconds))
