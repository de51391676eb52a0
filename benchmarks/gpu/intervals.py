"""Statistics of predictions against measurements, each with its 95 % interval."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from search_spaces.trial import Interval

RESAMPLES = 2000
FEWEST = 4
"""Below this number of pairs no interval is computed."""

Array = NDArray[np.float64]


def rank_correlation(ones: Sequence[float], others: Sequence[float]) -> Interval:
    """Spearman's rank correlation, with a percentile interval of bootstrap samples of the pairs."""
    pairs = np.array([ones, others], dtype=float).T
    found = _spearman(pairs)
    return _interval(pairs, _spearman, found, -1.0, 1.0)


def median_of(values: Sequence[float]) -> Interval:
    """The median, with a percentile interval of bootstrap samples."""
    column = np.array(values, dtype=float)[:, None]
    return _interval(column, _median, _median(column), 0.0, math.inf)


def share(hits: int, of: int) -> Interval:
    """A share with the Clopper-Pearson interval.

    Raises:
        ValueError: `of` is less than 1.
    """
    if of < 1:
        raise ValueError("of: a share needs at least one case; give at least one")
    low = float(stats.beta.ppf(0.025, hits, of - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(0.975, hits + 1, of - hits)) if hits < of else 1.0
    return Interval(mean=hits / of, low=low, high=high)


def _interval(rows: Array, statistic: Callable[[Array], float], found: float, low: float, high: float) -> Interval:
    """`low` and `high`: range of possible values, which is the interval if there are too few rows."""
    if len(rows) < FEWEST:
        return Interval(mean=found, low=low, high=high)
    draws = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    sampled = np.array([statistic(rows[draw]) for draw in draws])
    lowest, highest = np.nanpercentile(sampled, [2.5, 97.5])
    return Interval(mean=found, low=float(lowest), high=float(highest))


def _median(column: Array) -> float:
    return float(np.median(column))


def _spearman(pairs: Array) -> float:
    """NaN if one column is constant."""
    if len(pairs) < 2:
        return math.nan
    ranks = np.array([stats.rankdata(column) for column in pairs.T])
    spread = ranks.std(axis=1)
    if not spread.all():
        return math.nan
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    return float((centred[0] * centred[1]).mean() / spread.prod())
