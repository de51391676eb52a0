"""What more memory per rank would allow: the best of the job's candidates that would fit."""

import math

import numpy as np

from autotune.explain.explanation.curve import LIKELY
from autotune.explain.explanation.evidence import Outlook
from autotune.explain.explanation.findings import MoreMemory
from autotune.prediction.equations.step import Z90
from autotune.strategies.guided.described import Pool
from search_spaces.trial import Interval

FACTORS = (1.1, 1.25, 2.0)
NO_GAIN = 1.001
"""Gain below which the present configuration is kept."""


def more_memory(outlook: Outlook) -> tuple[MoreMemory, ...]:
    """Compare predictions: the best that would fit with the best that fits now, whether or not either was tried.

    Raises:
        SpaceTooLargeError: there are too many candidates to evaluate.
    """
    now = min(_fastest(outlook, outlook.pool(1.0))[0], 0.0)  # the winner itself is a candidate
    return tuple(_found(outlook, factor, now) for factor in FACTORS)


def _found(outlook: Outlook, factor: float, now: float) -> MoreMemory:
    pool = outlook.pool(factor)
    slower, place = _fastest(outlook, pool)
    gain = math.exp(max(now - slower, 0.0))
    if place is None or gain < NO_GAIN:
        return MoreMemory(factor=factor, gain=Interval(mean=1.0, low=1.0, high=1.0), config=None)
    _, spread = outlook.log_speedups(pool.described.take(np.array([place])))
    wide = math.exp(Z90 * float(spread[0]))
    # The present configuration still fits, so the gain is never below 1.
    return MoreMemory(
        factor=factor, gain=Interval(mean=gain, low=max(gain / wide, 1.0), high=gain * wide), config=pool.config(place)
    )


def _fastest(outlook: Outlook, pool: Pool) -> tuple[float, int | None]:
    """Logarithm of the winner's rate over that of the fastest candidate that fits, and the candidate's index."""
    fits = outlook.feasibility.quick_probability(pool.described) >= LIKELY
    if not fits.any():
        return math.inf, None
    slower = np.where(fits, outlook.slower(pool.described), np.inf)
    place = int(np.argmin(slower))
    return float(slower[place]), place
