"""What trials teach of rates."""

import numpy as np
import pytest

from autotune.strategies.guided.surrogate import Surrogate, prior
from tests.autotune.strategies.guided.made_up import described, told


def test_before_any_trial_the_prediction_is_believed() -> None:
    pool = described([10.0, 20.0, 40.0])
    belief = Surrogate(told(pool, [], []))
    assert np.array_equal(belief.mean(pool), prior(pool))
    assert belief.best == -np.inf
    assert belief.agreement == 1.0


def test_one_trial_that_is_slower_than_predicted_moves_all_and_orders_none_anew() -> None:
    pool = described([10.0, 20.0, 40.0], features=[[0.0], [40.0], [80.0]])
    mean = Surrogate(told(pool, [0], [5.0])).mean(pool)
    assert mean[0] < prior(pool)[0] - 0.5
    assert np.all(np.diff(mean) > 0)
    assert np.all(mean < prior(pool) - 0.3)


def test_what_is_near_a_trial_is_as_it_and_surer() -> None:
    pool = described([10.0, 10.0, 10.0], features=[[0.0], [0.5], [30.0]])
    mean, spread = Surrogate(told(pool, [0, 2], [8.0, 12.0])).mean_and_spread(pool)
    assert mean[1] - np.log(8.0) < 0.15
    assert spread[0] < spread[1] < 0.2


def test_of_what_the_best_and_its_neighbour_share_neither_is_ahead() -> None:
    """As the covariance of all of them says; the best is the one that is expected to be, not the one that was lucky."""
    pool = described([10.0, 10.0, 10.0, 10.0, 9.0], features=[[0.0], [0.1], [0.2], [0.3], [40.0]])
    belief = Surrogate(told(pool, [0, 1, 2], [10.0, 10.5, 10.2]))
    ahead, spread = belief.ahead(pool, *belief.mean_and_spread(pool))
    mean, covariance = belief.joint(pool)
    best = int(mean[:3].argmax())
    own = np.diag(covariance)
    assert ahead == pytest.approx(mean - mean[best], abs=1e-6)
    assert spread**2 == pytest.approx(own + own[best] - 2 * covariance[best], abs=1e-6)
    assert spread[best] < 1e-3
    assert spread[3] < 0.3 * np.sqrt(own[3]) < spread[4]


def test_ahead_of_nothing_is_refused() -> None:
    pool = described([10.0])
    belief = Surrogate(told(pool, [0], [None]))
    with pytest.raises(ValueError, match="no trial that may win"):
        belief.ahead(pool, *belief.mean_and_spread(pool))


def test_an_outlier_teaches_less_than_it_would_were_it_true() -> None:
    count = 9
    pool = described([10.0] * count, features=[[place / 2] for place in range(count)])
    usual = [10.0] * (count - 1)
    mean = Surrogate(told(pool, list(range(count)), [*usual[:4], 2.0, *usual[4:]])).mean(pool)
    assert mean[3] > np.log(8.0)


def test_a_prediction_that_orders_trials_the_wrong_way_is_overruled() -> None:
    rates = [2.0**place for place in range(6)]
    pool = described(rates, features=[[float(place % 2), 5.0 * (place % 3)] for place in range(6)])
    belief = Surrogate(told(pool, [0, 1, 2, 3, 4], [32.0, 16.0, 8.0, 4.0, 2.0]))
    assert belief.agreement < 1.0
    mean = belief.mean(pool)
    assert mean[5] < mean[0]


def test_a_right_prediction_stays_believed() -> None:
    rates = [2.0**place for place in range(8)]
    pool = described(rates)
    assert Surrogate(told(pool, list(range(6)), [0.7 * rate for rate in rates[:6]])).agreement == 1.0


def test_the_trend_orders_as_the_mean_does_where_nothing_is_near() -> None:
    pool = described([3.0, 9.0, 27.0], features=[[0.0], [100.0], [200.0]])
    far = described([5.0, 7.0, 11.0], features=[[1000.0], [2000.0], [3000.0]])
    belief = Surrogate(told(pool, [0, 1, 2], [3.0, 8.0, 20.0]))
    assert np.array_equal(np.argsort(belief.trend(far)), np.argsort(belief.mean(far)))
