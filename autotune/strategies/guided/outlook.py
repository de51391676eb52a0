"""What further trials may bring: how much is expected of the next one, and how sure it is that nothing much better is left."""

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
"""Candidates whose rates are drawn together: those that are most probably the best."""
DRAWS = 2_000


def outlook(pool: Described, told: Observations, open_: Flags, margin: float) -> Outlook | None:
    """What the candidates that were not tried may bring; None: nothing that may win was measured.

    1. Expected gain: the largest expected improvement times the chance to run, as a share of the best.
    2. Chance that any is faster than the best by more than `margin`: rates of the `TOGETHER` most promising are drawn from
       their joint distribution, since what one lacks its neighbours lack too; whether each runs is drawn beside.
       Of all others the chances are summed.
    """
    belief, feasibility = Surrogate(told), Feasibility(told)
    free = np.flatnonzero(open_)
    if not np.isfinite(belief.best):
        return None
    if not len(free):
        return Outlook(expected_gain=0.0, chance_of_more=0.0, margin=margin, trial_seconds=0.0)
    asked = pool.take(free)
    mean, spread = belief.mean_and_spread(asked)
    runs = feasibility.probability(asked) if len(free) <= CONSIDERED else feasibility.quick_probability(asked)
    gains = expected_gain(mean, spread, belief.best) * runs
    chances = runs * _above(mean, spread, belief.best + np.log1p(margin))
    near = np.argsort(-chances, kind="stable")[:TOGETHER]
    rest = float(np.delete(chances, near).sum())
    drawn = _any_above(belief, asked.take(near), runs[near], belief.best + float(np.log1p(margin)))
    return Outlook(
        expected_gain=float(gains.max()),
        chance_of_more=min(drawn + rest, 1.0),
        margin=margin,
        trial_seconds=float(with_moves(asked, told.last_mesh)[int(gains.argmax())]),
    )


def _above(mean: Array, spread: Array, bar: float) -> Array:
    return probability_below((mean - bar) / spread)


def _any_above(belief: Surrogate, asked: Described, runs: Array, bar: float) -> float:
    mean, covariance = belief.joint(asked)
    random = np.random.default_rng(0)
    # Eigenvalues that rounding made negative are none.
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    drawn = mean + random.standard_normal((DRAWS, len(mean))) @ root.T
    fits = random.random((DRAWS, len(mean))) < runs
    return float(((drawn > bar) & fits).any(axis=1).mean())
