"""Uncertainty of predictions, given observed errors."""

import numpy as np

from autotune.prediction.equations.cases import Array

WORTH = 4.0
"""Number of errors to which the prior spread is equivalent: a few lucky errors do not narrow the band."""
LEAST_SPREAD = 0.02


def spread_after(before: float, errors: Array) -> float:
    """The standard deviation of log(measured / predicted): the root mean square, with `before` counting as `WORTH` errors.

    An outlier counts as at most three typical errors.
    """
    if not len(errors):
        return before
    bound = 3 * max(1.4826 * float(np.median(np.abs(errors))), before)
    kept = np.clip(errors, -bound, bound)
    return max(float(np.sqrt((WORTH * before**2 + np.sum(kept**2)) / (WORTH + len(kept)))), LEAST_SPREAD)
