"""Residuals of earlier jobs' trials: a correction of every prediction for the same hardware and engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.likeness import LENGTH, NOISE, config_features, matern
from autotune.prediction.fitting.trial_history import Runs

SIZE = 0.3
"""Standard deviation of one job's residuals."""
SHARED = 1.0
"""Standard deviation of the part common to all trials of one model and workload: learned, but not transferred to others."""
MOST_LESSONS = 150
"""Maximum number, from the newest jobs; a job's row stores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The residual of one configuration of an earlier job."""

    features: tuple[float, ...]
    error: float
    """Logarithm of predicted / measured step seconds, by the prior's coefficients: the correction of a log rate."""
    noise: float
    """Its standard deviation."""
    setting: int
    """Equal for lessons of the same model and workload."""


class Lessons:
    """A Gaussian process over the lessons: predicts the residuals of other configurations."""

    def __init__(self, lessons: Sequence[Lesson]) -> None:
        self._features = np.array([lesson.features for lesson in lessons], dtype=np.float64)
        if not lessons:
            return
        errors = np.array([lesson.error for lesson in lessons])
        noise = np.hypot(np.array([lesson.noise for lesson in lessons]), NOISE)
        settings = np.array([lesson.setting for lesson in lessons])
        covariance = SIZE**2 * matern(self._features, self._features, LENGTH)
        covariance += SHARED**2 * (settings[:, None] == settings[None]) + np.diag(noise**2)
        self._weights: Array = np.linalg.solve(covariance, errors)

    def added(self, features: Array) -> Array:
        """(n,) The correction of the logarithm of a rate; 0 far from all lessons."""
        if not len(self._features):
            return np.zeros(len(features))
        correction: Array = SIZE**2 * matern(features, self._features, LENGTH) @ self._weights
        return correction


def lessons_of(history: Sequence[Runs], rates: Coefficients) -> tuple[Lesson, ...]:
    """The residuals of these trials relative to `rates`, newest first."""
    lessons: list[Lesson] = []
    for setting, runs in enumerate(history):
        lessons += _of_runs(runs, setting, rates)
    return tuple(lessons[:MOST_LESSONS])


def _of_runs(runs: Runs, setting: int, rates: Coefficients) -> list[Lesson]:
    errors = np.log(seconds_of(runs.cases, rates) / runs.seconds)
    described = config_features(runs.cases, runs.configs)
    return [
        Lesson(features=tuple(float(value) for value in row), error=float(error), noise=float(noise), setting=setting)
        for row, error, noise in zip(described, errors, runs.noise, strict=True)
    ]
