"""What is known before a job's first trial: coefficients, and what earlier jobs' trials left over of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.calibrated import calibrated
from autotune.prediction.coefficients import Coefficients
from autotune.prediction.question import SHIPPED
from autotune.prediction.rates import rates_for
from autotune.prediction.step import seconds_of
from autotune.prediction.trial_history import Runs, jobs_elsewhere
from autotune.strategies.guided.belief import LENGTH, NOISE, matern
from autotune.strategies.guided.described import Array
from autotune.strategies.guided.knob_features import config_features
from search_spaces.cluster import ClusterSpec
from storage.store import Store

SIZE = 0.3
"""Standard deviation of what one job's trials leave over."""
SHARED = 1.0
"""Standard deviation of what all trials of one model and workload share: it is learned, and says nothing of another."""
MOST_LESSONS = 150
"""Of the newest jobs; a job's row holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What one configuration of an earlier job taught."""

    features: tuple[float, ...]
    error: float
    """Logarithm of predicted / measured step seconds, by the coefficients of the same prior: what to add to a rate's."""
    noise: float
    """Standard deviation of it."""
    setting: int
    """Lessons of one model and workload have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Frozen when a job begins, so that it decides the same whenever it is resumed."""

    rates: Coefficients
    lessons: tuple[Lesson, ...] = ()
    source: str = SHIPPED
    """In words, what it rests on."""
    left_out: int = 0
    """Jobs of the database that ran on other hardware: nothing of them is carried over."""

    @property
    def note(self) -> str:
        """In words, for people who begin a job."""
        told = f"predictions rest on {self.source}"
        if self.lessons:
            told += f", and on what {len(self.lessons)} of them taught"
        if self.left_out:
            told += f"; left out, because they ran on other hardware: {self.left_out} job{'s' * (self.left_out > 1)}"
        return told


def learn_prior(store: Store, cluster: ClusterSpec, engine: str, earlier: Sequence[Runs] = ()) -> Prior:
    """What the database knows of the cluster: its micro-benchmark, and trials of the same hardware and engine.

    Args:
        store: the database.
        cluster: where the job runs.
        engine: what runs it.
        earlier: trials from elsewhere; they count before those of the database.
    """
    known = calibrated(store, cluster, engine, rates_for(cluster, engine), earlier)
    lessons: list[Lesson] = []
    for setting, runs in enumerate(known.history):
        lessons += _lessons(runs, setting, known.rates)
    return Prior(
        rates=known.rates,
        lessons=tuple(lessons[:MOST_LESSONS]),
        source=known.source,
        left_out=jobs_elsewhere(store, cluster, engine),
    )


def shipped_prior(cluster: ClusterSpec, engine: str) -> Prior:
    """What is known without a database."""
    return Prior(rates=rates_for(cluster, engine))


class Lessons:
    """Gaussian process over the lessons: what they add to predictions of other configurations."""

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
        """(n,) What they add to the logarithm of a rate. Nothing far from all of them."""
        if not len(self._features):
            return np.zeros(len(features))
        told: Array = SIZE**2 * matern(features, self._features, LENGTH) @ self._weights
        return told


def _lessons(runs: Runs, setting: int, rates: Coefficients) -> list[Lesson]:
    errors = np.log(seconds_of(runs.cases, rates) / runs.seconds)
    described = config_features(runs.cases, runs.configs)
    return [
        Lesson(features=tuple(float(value) for value in row), error=float(error), noise=float(noise), setting=setting)
        for row, error, noise in zip(described, errors, runs.noise, strict=True)
    ]
