"""What further trials may gain: the expected gain of the next one, and the probability that something much better is left."""

import numpy as np

from autotune.objective.normal import probability_below
from autotune.strategies.guided.acquisition import CONSIDERED, expected_gain
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.feasibility import Feasibility
from autotune.strategies.guided.observations import Flags, Observations
from autotune.strategies.guided.surrogate import Surrogate
from autotune.strategies.guided.trial_cost import with_moves
from autotune.strategies.strategy import Outlook

TOGETHER = 400
"""Number of candidates whose rates are drawn jointly: those most likely to be the best."""
DRAWS = 2_000


def outlook(pool: Described, observations: Observations, available: Flags, margin: float) -> Outlook | None:
    """What the untried candidates may gain; None: no trial that can win was measured.

    1. Expected gain: the largest expected improvement times the probability to run, as a share of the best.
    2. Probability that any candidate is faster than the best by more than `margin`: rates of the `TOGETHER` most promising
       are drawn from their joint distribution, since neighbours are correlated; whether each runs is drawn independently.
       For all others the probabilities are summed.
    """
    surrogate, feasibility = Surrogate(observations), Feasibility(observations)
    free = np.flatnonzero(available)
    if not np.isfinite(surrogate.best):
        return None
    if not len(free):
        return Outlook(expected_gain=0.0, chance_of_more=0.0, margin=margin, trial_seconds=0.0)
    asked = pool.take(free)
    mean, spread = surrogate.mean_and_spread(asked)
    runs = feasibility.probability(asked) if len(free) <= CONSIDERED else feasibility.quick_probability(asked)
    gains = expected_gain(mean, spread, surrogate.best) * runs
    chances = runs * _above(mean, spread, surrogate.best + np.log1p(margin))
    near = np.argsort(-chances, kind="stable")[:TOGETHER]
    rest = float(np.delete(chances, near).sum())
    drawn = _any_above(surrogate, asked.take(near), runs[near], surrogate.best + float(np.log1p(margin)))
    return Outlook(
        expected_gain=float(gains.max()),
        chance_of_more=min(drawn + rest, 1.0),
        margin=margin,
        trial_seconds=float(with_moves(asked, observations.last_mesh)[int(gains.argmax())]),
    )


def _above(mean: Array, spread: Array, bar: float) -> Array:
    return probability_below((mean - bar) / spread)


def _any_above(surrogate: Surrogate, asked: Described, runs: Array, bar: float) -> float:
    mean, covariance = surrogate.joint(asked)
    random = np.random.default_rng(0)
    # Eigenvalues that rounding made negative are set to 0.
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn = mean + random.standard_normal((DRAWS, len(mean))) @ root.T
    fits = random.random((DRAWS, len(mean))) < runs
    return float(((drawn > bar) & fits).any(axis=1).mean())
