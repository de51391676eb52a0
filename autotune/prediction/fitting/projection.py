"""Projection: a step that was measured on a few devices says how long the same layout takes on many."""

from collections.abc import Mapping

import numpy as np

from autotune.prediction.equations.cases import Array

PART_SPREADS = {"compute": 0.15, "tensor": 0.3, "pipeline": 0.5, "data": 1.0, "optimizer": 0.5, "offload": 0.5}
"""Part of a step -> standard deviation of the logarithm of its real over its predicted seconds. A common cause moves the same
part of both steps."""
REPEATED = 0.05
"""The same of a step's seconds where a part's error is known: of another run on other nodes [docs/results/projection.md]."""


def projected(measured: float, small: Mapping[str, float], large: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of the large step, and the standard deviation of their logarithm.

    The logarithm of measured / predicted seconds of the small step is divided over its parts, by the posterior mean of their
    errors: in proportion to a part's share of the step times its variance. The large step's parts get the same factors. What
    is left of their variance is the band, wide where a part is large only there.

    Args:
        measured: seconds of the small step.
        small: predicted seconds of its parts.
        large: predicted seconds of the large step's parts.
    """
    before, after = (np.array([parts[name] for name in PART_SPREADS]) for parts in (small, large))
    variances = np.array([*PART_SPREADS.values()]) ** 2
    shares = before / before.sum()
    gain = variances * shares / (shares**2 @ variances + REPEATED**2)
    parts: Array = after * np.exp(gain * np.log(measured / before.sum()))
    weights = parts / parts.sum()
    left = weights**2 @ variances - (weights @ gain) * (weights * shares) @ variances
    return float(parts.sum()), float(np.sqrt(max(left, 0.0) + REPEATED**2))
