"""Residuals of the equations' step times, learned from measurements of the same software and hardware."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.kernels import eager_norm_extra
from autotune.prediction.fitting.features import features
from autotune.prediction.fitting.residuals import fit_process

Matrix = NDArray[np.float64]
FEWEST = 12
"""Minimum number of times to learn a residual; fewer only fit the coefficients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """Hyperparameters of a Gaussian process: correlation length, size of the residuals, and noise."""

    length: float
    """Distance, in features, over which residuals are correlated."""
    size: float
    slope: float
    """Standard deviation of a linear part, per feature."""
    noise: float
    rounds: int
    """Iterations that down-weight outliers; 1: none."""


_STEADY = _Kernel(length=8.0, size=0.7, slope=0.02, noise=0.05, rounds=6)
"""For runs without problems."""
_WARY = _Kernel(length=5.0, size=1.2, slope=0.0, noise=0.25, rounds=1)
"""For average runs, including those with problems: a plan should avoid regions where these are frequent."""
_TRUST = 0.7
"""Weight of the steady process in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A fitted Gaussian process."""

    kernel: _Kernel
    features: Matrix
    weights: Array

    def __call__(self, queries: Matrix) -> Array:
        between = self.kernel.size**2 * _matern(queries, self.features, self.kernel.length)
        residuals: Array = (between + self.kernel.slope**2 * queries @ self.features.T) @ self.weights
        return residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Logarithm of measured / predicted time, for any case of the software that it was learned from."""

    centre: Array
    processes: tuple[tuple[float, _Process], ...]

    def __call__(self, cases: Cases) -> Array:
        queries = features(cases) - self.centre
        total: Array = sum((share * process(queries) for share, process in self.processes), np.zeros(len(queries)))
        return total


def learned(cases: Cases, errors: Array) -> Residual:
    """Learn from `errors`, the logarithms of measured / predicted time of `cases`.

    Two Gaussian processes with a Matérn 3/2 kernel [Rasmussen and Williams 2006, 4.2.1] over the features, each with an
    effect common to the runs of one model on one cluster, which does not transfer to others. One down-weights outliers by
    its leave-one-out errors, as a Student t with three degrees of freedom would; the other does not.
    """
    described = features(cases)
    centre = described.mean(axis=0)
    groups = _groups(cases)
    fitted = [(share, _fit(described - centre, errors, groups, kernel)) for share, kernel in _PARTS]
    return Residual(centre=centre, processes=tuple(fitted))


_PARTS = ((_TRUST, _STEADY), (1 - _TRUST, _WARY))


def _fit(described: Matrix, errors: Array, groups: NDArray[np.int64], kernel: _Kernel) -> _Process:
    covariance = kernel.size**2 * _matern(described, described, kernel.length) + kernel.slope**2 * described @ described.T
    covariance += 0.05**2 * (groups[:, None] == groups[None])  # an effect common to all runs of one model on one cluster
    _, weights, _ = fit_process(covariance, kernel.noise, errors, kernel.rounds)
    return _Process(kernel=kernel, features=described, weights=weights)


def _matern(first: Matrix, second: Matrix, length: float) -> Matrix:
    squared = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None] - 2 * first @ second.T
    distance = np.sqrt(np.maximum(squared, 1e-12)) * np.sqrt(3) / length
    alike: Matrix = (1 + distance) * np.exp(-distance)
    return alike


def _groups(cases: Cases) -> NDArray[np.int64]:
    """Group numbers: equal for cases of one model with one software on one cluster."""
    layouts, shapes, software = cases.layouts, cases.shapes, cases.software
    world = layouts.world
    columns = (
        shapes.hidden, shapes.layers, shapes.ffn, shapes.sequence, world, cases.hardware.peak,
        software.elementwise, software.attention_speed, software.scores, eager_norm_extra(cases),
    )  # fmt: skip
    rows = np.stack([np.broadcast_to(column, len(cases)) for column in columns], axis=1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
