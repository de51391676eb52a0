"""How far predictions can be trusted, after errors were seen."""

import numpy as np

from autotune.prediction.equations.cases import Array

WORTH = 4.0
"""Errors that the spread of before is worth: a lucky handful makes no band narrow."""
LEAST_SPREAD = 0.02


def spread_after(before: float, errors: Array) -> float:
    """The standard deviation of log(measured / predicted): the root of the mean square, `before` counting as `WORTH` errors.

    An error that is far out counts as three of the others.
    """
    if not len(errors):
        return before
    bound = 3 * max(1.4826 * float(np.median(np.abs(errors))), before)
    kept = np.clip(errors, -bound, bound)
    return max(float(np.sqrt((WORTH * before**2 + np.sum(kept**2)) / (WORTH + len(kept)))), LEAST_SPREAD)
