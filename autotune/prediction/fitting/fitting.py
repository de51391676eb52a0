"""Fits coefficients to measurements: maximum a posteriori, given a prior for each."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients, spread

_STEPS = 15
_DIFFERENCE = 1e-4
_OUTLIER = 2.5
"""Standard deviations beyond which a residual is down-weighted."""


def fitted(
    names: Sequence[str],
    before: Coefficients,
    predicted: Callable[[Coefficients], Array],
    measured: Array,
    noise: float,
    weights: Array | None = None,
) -> Coefficients:
    """Return the most probable coefficients given `measured`.

    Minimises sum(w rho(log(measured / predicted) / noise)) + sum((log c - log before) / spread)^2 over log c, with Huber's
    rho, by Levenberg-Marquardt with finite differences. Coefficients are positive, so their logarithms are fitted.

    1. Down-weight residuals beyond `_OUTLIER`, so that a broken run does not distort the fit.
    2. Solve the damped normal equations, including the prior's rows.
    3. Accept the step if the cost decreases, else increase the damping.
    """
    weights = np.ones(len(measured)) if weights is None else weights
    centre = np.log([getattr(before, name) for name in names])
    known = np.array([spread(name) for name in names])
    target = np.log(measured)

    def at(logs: NDArray[np.float64]) -> Coefficients:
        return replace(before, **{name: float(value) for name, value in zip(names, np.exp(logs), strict=True)})

    def residuals(logs: NDArray[np.float64]) -> Array:
        return (target - np.log(predicted(at(logs)))) / noise

    def cost(logs: NDArray[np.float64], errors: Array) -> float:
        size = np.abs(errors)
        huber = np.where(size <= _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
        return float(np.sum(weights * huber) + np.sum(((logs - centre) / known) ** 2))

    logs, damping = centre.copy(), 1e-2
    errors = residuals(logs)
    best = cost(logs, errors)
    for _ in range(_STEPS):
        slopes = np.stack(
            [(residuals(logs + _DIFFERENCE * unit) - errors) / _DIFFERENCE for unit in np.eye(len(names))], axis=1
        )
        robust = weights * np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), 1e-12))
        gradient = slopes.T @ (robust * errors) + (logs - centre) / known**2
        curvature = slopes.T @ (robust[:, None] * slopes) + np.diag(1 / known**2)
        before_step = best
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            step = np.clip(step, -1.0, 1.0)
            tried = residuals(logs + step)
            reached = cost(logs + step, tried)
            if reached < best:
                logs, errors, best, damping = logs + step, tried, reached, damping / 4
                break
            damping *= 4
        if before_step - best < 1e-4 * best:
            break
    return at(logs)
