"""Residuals of predictions as Gaussian processes: the Matérn kernel, the fit to measurements, and what earlier jobs' residuals
add to every prediction for the same hardware and engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.features import config_features
from autotune.prediction.fitting.trial_fit import Runs

Single = NDArray[np.float32]
LENGTH = 6.0
"""Distance in features over which residuals are correlated."""
NOISE = 0.1
"""Standard deviation of one trial's logarithm, including effects that the features do not describe."""


def matern(first: Array, second: Array, length: float) -> Single:
    """Matérn 3/2 of the distances between rows: 1 if they are equal.

    Distances are differences of large numbers and need double precision; the result does not.
    """
    scale = np.sqrt(3) / length
    centre = second.mean(axis=0) if len(second) else 0.0
    ours, theirs = scale * (first - centre), scale * (second - centre)
    # |a|^2 - 2 a b + |b|^2 as one product: each further pass over the pairs would take as long as the product itself.
    left_factor = np.column_stack([ours, np.einsum("ij,ij->i", ours, ours), np.ones(len(ours))])
    right_factor = np.column_stack([-2 * theirs, np.ones(len(theirs)), np.einsum("ij,ij->i", theirs, theirs)])
    distance = np.empty((len(first), len(second)), dtype=np.float32)
    np.maximum(product(left_factor, right_factor.T), 0.0, out=distance, casting="same_kind")
    np.sqrt(distance, out=distance)
    alike = np.exp(-distance)
    distance += 1
    alike *= distance
    return alike


def product(matrix: Array, second: Array) -> Array:
    """`matrix @ other` in parts small enough for OpenBLAS to use only this thread: others would wait for busy cores."""
    # OpenBLAS uses one thread up to so many multiplications.
    rows = max(2**18 // max(second.size, 1), 16)
    result = np.empty((len(matrix), second.shape[1]))
    for first in range(0, len(matrix), rows):
        np.matmul(matrix[first : first + rows], second, out=result[first : first + rows])
    return result


def fit_process(covariance: Array, noise: Array | float, errors: Array, rounds: int) -> tuple[Array, Array, Array]:
    """Fit a Gaussian process to errors, in rounds that down-weight outliers.

    An outlier's weight follows from its leave-one-out error [Rasmussen and Williams 2006, 5.4.2], as in a Student t with three
    degrees of freedom.

    Args:
        covariance: (n, n) of the errors before any measurement.
        noise: standard deviation of a measurement, or (n,) of each.
        errors: (n,) the measurements.
        rounds: the first has no weights.

    Returns:
        The inverse of the covariance with noise, its product with the errors (the weights of predictions), and the
        leave-one-out errors.
    """
    widened, inverse, weights, left_out = np.ones(len(errors)), covariance, errors, errors
    for _ in range(rounds):
        inverse = np.asarray(np.linalg.inv(covariance + np.diag(noise**2 * widened)), dtype=np.float64)
        weights = inverse @ errors
        left_out = weights / np.diag(inverse)
        before, widened = widened, np.maximum((left_out**2 / noise**2 + 3) / 4, 1.0)
        if np.array_equal(before, widened):
            break
    return inverse, weights, left_out


SIZE = 0.3
"""Standard deviation of one job's residuals."""
SHARED = 1.0
"""Standard deviation of the part common to all trials of one model and workload: learned, but not transferred to others."""
MOST_RESIDUALS = 150
"""Maximum number, from the newest jobs; a job's row stores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierResidual:
    """The residual of one configuration of an earlier job."""

    features: tuple[float, ...]
    error: float
    """Logarithm of predicted / measured step seconds, by the prior's coefficients: the correction of a log rate."""
    noise: float
    """Its standard deviation."""
    setting: int
    """Equal for residuals of the same model and workload."""


class ResidualProcess:
    """A Gaussian process over the residuals: predicts the residuals of other configurations."""

    def __init__(self, residuals: Sequence[EarlierResidual]) -> None:
        self._features = np.array([residual.features for residual in residuals], dtype=np.float64)
        if not residuals:
            return
        errors = np.array([residual.error for residual in residuals])
        noise = np.hypot(np.array([residual.noise for residual in residuals]), NOISE)
        settings = np.array([residual.setting for residual in residuals])
        covariance = SIZE**2 * matern(self._features, self._features, LENGTH)
        covariance += SHARED**2 * (settings[:, None] == settings[None]) + np.diag(noise**2)
        self._weights: Array = np.linalg.solve(covariance, errors)

    def added(self, features: Array) -> Array:
        """(n,) The correction of the logarithm of a rate; 0 far from all residuals."""
        if not len(self._features):
            return np.zeros(len(features))
        correction: Array = SIZE**2 * matern(features, self._features, LENGTH) @ self._weights
        return correction


def earlier_residuals(history: Sequence[Runs], rates: Coefficients) -> tuple[EarlierResidual, ...]:
    """The residuals of these trials relative to `rates`, newest first."""
    residuals: list[EarlierResidual] = []
    for setting, runs in enumerate(history):
        residuals += _of_runs(runs, setting, rates)
    return tuple(residuals[:MOST_RESIDUALS])


def _of_runs(runs: Runs, setting: int, rates: Coefficients) -> list[EarlierResidual]:
    errors = np.log(seconds_of(runs.cases, rates) / runs.seconds)
    described = config_features(runs.cases, runs.configs)
    return [
        EarlierResidual(features=tuple(float(value) for value in row), error=float(error), noise=float(noise), setting=setting)
        for row, error, noise in zip(described, errors, runs.noise, strict=True)
    ]


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
