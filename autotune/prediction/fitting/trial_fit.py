"""Fits coefficients to measurements: maximum a posteriori, and those that only trials can determine."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients, names, spread
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.trial_history import Runs

TIME_NOISE = 0.08
"""Standard deviation of the logarithm of a step's seconds that the equations cannot explain."""
MEMORY_NOISE = 0.04
ALLOCATED = ("workspace_bytes", "activation_scale", "working_layers")
"""The memory coefficients that affect the allocator's peak; the others are outside of it."""


def fit_runs(history: Sequence[Runs], before: Coefficients) -> tuple[Coefficients, int]:
    """Return the most probable coefficients given trials on the same hardware, and the number of those trials.

    `before` (shipped, or from a micro-benchmark) is the prior, so that a few trials change little.

    1. Fit the time coefficients to step times, with lower weight for noisy ones, and those of memory to the allocator's peaks.
    2. Spreads are computed from leave-one-out errors of the configurations, with the prior spread counting as a number of
       errors.
    """
    seconds = [(runs, runs.seconds, runs.noise) for runs in history]
    peaks = [(runs, runs.peaks, np.zeros(len(runs.keys))) for runs in history]
    time_figures = _Figures(seconds, lambda runs, rates: seconds_of(runs.cases, rates))
    memory_figures = _Figures(peaks, lambda runs, rates: memory(runs.cases, rates).allocated)
    rates, time_errors = _fit(time_figures, names("time"), before, TIME_NOISE)
    rates, memory_errors = _fit(memory_figures, ALLOCATED, rates, MEMORY_NOISE)
    spreads = {
        "time_spread": spread_after(before.time_spread, time_errors),
        "memory_spread": spread_after(before.memory_spread, memory_errors),
        "time_tail": tail_after(before.time_tail, time_errors),
        "memory_tail": tail_after(before.memory_tail, memory_errors),
    }
    return dataclasses.replace(rates, **spreads), int(sum(np.sum(runs.repeats) for runs in history))


def fit_time(history: Sequence[Runs], before: Coefficients) -> Coefficients:
    """The most probable time coefficients given trials on the same hardware; `before` is the prior."""
    timed = _Figures([(runs, runs.seconds, runs.noise) for runs in history], lambda runs, rates: seconds_of(runs.cases, rates))
    return _fit(timed, names("time"), before, TIME_NOISE)[0]


class _Figures:
    """One measured quantity of all configurations that have it, and its equation."""

    def __init__(self, figures: Sequence[tuple[Runs, Array, Array]], equation: Callable[[Runs, Coefficients], Array]) -> None:
        """`figures`: runs, the value of each configuration (NaN: not measured), and the noise of its logarithm."""
        rows = [(runs, figure, noise, np.flatnonzero(np.isfinite(figure))) for runs, figure, noise in figures]
        # Equations are evaluated only for the configurations that have the value.
        self._runs = [(dataclasses.replace(runs, cases=runs.cases.take(at)), len(at)) for runs, _, _, at in rows if len(at)]
        self._equation = equation
        self.measured = np.concatenate([np.empty(0), *(figure[at] for _, figure, _, at in rows)])
        self.noise = np.concatenate([np.empty(0), *(noise[at] for _, _, noise, at in rows)])

    def predicted(self, rates: Coefficients) -> Array:
        return np.concatenate([np.broadcast_to(self._equation(runs, rates), count) for runs, count in self._runs])

    def slopes(self, names: Sequence[str], rates: Coefficients, factor: float) -> Array:
        """Derivatives of the logarithm of each prediction (rows) by the logarithm of each coefficient (columns)."""
        base = self.predicted(rates)
        more = [dataclasses.replace(rates, **{name: getattr(rates, name) * factor}) for name in names]
        changes: Array = np.stack([np.log(self.predicted(changed) / base) for changed in more], axis=1)
        return changes / float(np.log(factor))


def _fit(figures: _Figures, candidates: Sequence[str], before: Coefficients, noise: float) -> tuple[Coefficients, Array]:
    """The fitted coefficients, and the leave-one-out log(measured / predicted) of each configuration.

    The latter is e / (1 - h), h being the diagonal of J (J' J + S)^-1 J' with the derivatives J, in units of the noise, and the
    prior's precisions S: exact if the equations are linear in the logarithms [Allen 1974, PRESS].
    """
    if not len(figures.measured):
        return before, np.empty(0)
    effects = np.max(np.abs(figures.slopes(candidates, before, 10.0)), axis=0)
    # A log-log slope up to ten times the value: below it the measurements do not depend on the coefficient, which stays.
    fitted_names = [name for name, effect in zip(candidates, effects, strict=True) if effect > 0.01]
    weights = noise**2 / (noise**2 + figures.noise**2)
    after = fitted(fitted_names, before, figures.predicted, figures.measured, noise, weights)
    slopes = figures.slopes(fitted_names, after, 1.001) * np.sqrt(weights)[:, None] / noise
    prior_precisions = np.diag([spread(name) ** -2 for name in fitted_names])
    leverage = np.sum(slopes * np.linalg.solve(slopes.T @ slopes + prior_precisions, slopes.T).T, axis=1)
    return after, np.log(figures.measured / figures.predicted(after)) / (1 - leverage)


WORTH = 4.0
"""Number of errors to which the prior spread is equivalent: a few lucky errors do not narrow the band."""


def tail_after(before: float, errors: Array) -> float:
    """What of a band's tail is left once these errors are known: it counts as `WORTH` errors too, and none of them has one."""
    return 1.0 + (before - 1.0) * WORTH / (WORTH + len(errors))


def spread_after(before: float, errors: Array) -> float:
    """The standard deviation of log(measured / predicted): the root mean square, with `before` counting as `WORTH` errors.

    An outlier counts as at most three typical errors.
    """
    if not len(errors):
        return before
    bound = 3 * max(1.4826 * float(np.median(np.abs(errors))), before)
    clipped = np.clip(errors, -bound, bound)
    return max(float(np.sqrt((WORTH * before**2 + np.sum(clipped**2)) / (WORTH + len(clipped)))), 0.02)


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
    prior_spreads = np.array([spread(name) for name in names])
    target = np.log(measured)

    def at(logs: NDArray[np.float64]) -> Coefficients:
        return replace(before, **{name: float(value) for name, value in zip(names, np.exp(logs), strict=True)})

    def residuals(logs: NDArray[np.float64]) -> Array:
        return (target - np.log(predicted(at(logs)))) / noise

    def cost(logs: NDArray[np.float64], errors: Array) -> float:
        size = np.abs(errors)
        huber = np.where(size <= _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
        return float(np.sum(weights * huber) + np.sum(((logs - centre) / prior_spreads) ** 2))

    logs, damping = centre.copy(), 1e-2
    errors = residuals(logs)
    best = cost(logs, errors)
    for _ in range(15):
        slopes = np.stack(
            [(residuals(logs + _DIFFERENCE * unit) - errors) / _DIFFERENCE for unit in np.eye(len(names))], axis=1
        )
        robust = weights * np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), 1e-12))
        gradient = slopes.T @ (robust * errors) + (logs - centre) / prior_spreads**2
        curvature = slopes.T @ (robust[:, None] * slopes) + np.diag(1 / prior_spreads**2)
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
