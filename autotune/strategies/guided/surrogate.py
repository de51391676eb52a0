"""What trials teach of the candidates' rates: predictions times a residual, learned as a Gaussian process."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.prediction.fitting.likeness import LENGTH, NOISE, Single, matern, product
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.observations import Observations

COMMON = 0.6
"""Standard deviation of what all residuals of a job share: it orders nothing, and is learned by the first trial."""
ROUNDS = 4
"""Times that outliers are weighed down anew."""
SIZES = (0.1, 0.2, 0.4, 0.8)
"""Standard deviations of the residual that are compared by how well they tell each trial from the others."""
USUAL_SIZE = 0.2
SLOPES = (0.05, 0.5)
"""Of the share of the prediction's differences that is wrong: little, or half. The second lets the data overrule it."""
UNUSUAL = 2.0
"""Logarithm of how much less probable a doubling of the residual is, or a wrong slope, before any trial."""
MOST = 300
"""Trials that are learned from: the newest."""
ENTRIES = 2**16
"""Pairs of a candidate and a trial that are looked at in one go, so that matrices stay in a processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    size: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    kernel: _Kernel
    inverse: Array
    weights: Array
    likelihood: float
    """Logarithm of how well each trial is told by all others."""


class Surrogate:
    """The rates of candidates, after trials.

    1. Before any trial log rate = equations + what earlier measurements add.
    2. The residual is a Gaussian process over the features, Matérn 3/2 [Rasmussen and Williams 2006, 4.2.1], with a part
       that all share, and one along the prediction itself: its slope may be wrong, so that a prediction that does not order
       the trials is believed less, in the end next to nothing.
    3. Sizes of the residual and of the slope's error are those that tell each trial best from all others [Rasmussen and
       Williams 2006, 5.4.2], the usual ones being more probable.
    4. Trials far off are weighed down by their own leave-one-out errors, as a Student t with three degrees of freedom would.
    """

    def __init__(self, told: Observations) -> None:
        timed = np.flatnonzero(np.isfinite(told.log_rate))
        self.best = float(told.log_rate[timed][told.wins[timed]].max(initial=-np.inf))
        """Logarithm of the highest rate of those that may win."""
        known = told.take(timed[-MOST:])
        self._seen = known.described
        self._noise = np.hypot(known.noise, NOISE)
        self.trial_noise = float(np.median(known.noise)) if len(known) else 0.0
        """Standard deviation of a trial's logarithm that trials tell of themselves; 0: they tell none."""
        self._wins = known.wins
        self._centre = float(prior(self._seen).mean()) if len(known) else 0.0
        self._fit = self._learn(known.log_rate - prior(self._seen)) if len(known) else None

    @property
    def agreement(self) -> float:
        """Share of the prediction's differences that is believed, from 1 (as before any trial) down to 0."""
        return 1.0 if self._fit is None or self._fit.kernel.slope == SLOPES[0] else 1.0 - self._fit.kernel.slope

    def trend(self, asked: Described) -> Array:
        """(n,) Expected logarithm of each one's rate but for what trials nearby tell, and for what all share."""
        expected = prior(asked)
        if self._fit is None:
            return expected
        along = prior(self._seen) - self._centre
        told: Array = expected + self._fit.kernel.slope**2 * (expected - self._centre) * float(along @ self._fit.weights)
        return told

    def mean(self, asked: Described) -> Array:
        """Expected logarithm of each one's rate."""
        return self.mean_and_spread(asked, spread=False)[0]

    def mean_and_spread(self, asked: Described, *, spread: bool = True) -> tuple[Array, Array]:
        """Expected logarithm of each one's rate and its standard deviation (not computed: that before any trial)."""
        parts = [self._part(asked.part(block), spread) for block in blocks(len(asked), len(self._seen))]
        return np.concatenate([mean for mean, _ in parts]), np.concatenate([wide for _, wide in parts])

    @property
    def has_best(self) -> bool:
        """Whether any of the trials that are learned from may win."""
        return bool(self._wins.any())

    def ahead(self, asked: Described, mean: Array, spread: Array) -> tuple[Array, Array]:
        """By how much each one's logarithm is expected to be above that of the best trial, and the standard deviation of that.

        The best: of those that may win, the one that is expected to be fastest, which need not be the one that was measured so.
        What both share is uncertain of neither: of a close neighbour little is left to be found out.

        Args:
            asked: candidates.
            mean, spread: what `mean_and_spread` says of them.

        Raises:
            ValueError: there is none that may win.
        """
        if self._fit is None or not self.has_best:
            raise ValueError("no trial that may win was timed")
        expected = np.where(self._wins, self.mean(self._seen), -np.inf)
        best = self._seen.take(np.array([expected.argmax()]))
        its_mean, its_own = self.joint(best)
        told = self._fit.inverse @ self._between(self._fit.kernel, best, prior(best) - self._centre)[0]
        parts = [self._shared(asked.part(block), best, told) for block in blocks(len(asked), len(self._seen))]
        variance = spread**2 + its_own[0, 0] - 2 * np.concatenate(parts)
        return mean - its_mean[0], np.sqrt(np.maximum(variance, 0.0))

    def _shared(self, asked: Described, best: Described, told: Array) -> Array:
        """Covariance of each one with the best, of which the trials told so much."""
        assert self._fit is not None
        kernel, along = self._fit.kernel, prior(asked) - self._centre
        alike = _covariance(kernel, matern(asked.features, best.features, LENGTH), along, prior(best) - self._centre)
        shared: Array = alike[:, 0] - self._between(kernel, asked, along) @ told
        return shared

    def joint(self, asked: Described) -> tuple[Array, Array]:
        """Expected logarithms of the rates and their covariance, for few candidates."""
        expected = prior(asked)
        along = expected - self._centre
        kernel = self._fit.kernel if self._fit is not None else _Kernel(size=USUAL_SIZE, slope=SLOPES[0])
        own = _covariance(kernel, matern(asked.features, asked.features, LENGTH), along, along)
        if self._fit is None:
            return expected, own
        between = self._between(kernel, asked, along)
        return expected + between @ self._fit.weights, own - between @ self._fit.inverse @ between.T

    def _between(self, kernel: _Kernel, asked: Described, along: Array) -> Array:
        alike = matern(asked.features, self._seen.features, LENGTH)
        return _covariance(kernel, alike, along, prior(self._seen) - self._centre)

    def _part(self, asked: Described, spread: bool) -> tuple[Array, Array]:
        expected = prior(asked)
        if self._fit is None:
            return expected, np.full(len(asked), np.hypot(USUAL_SIZE, COMMON))
        kernel = self._fit.kernel
        along = expected - self._centre
        between = self._between(kernel, asked, along)
        own = kernel.size**2 + COMMON**2 + (kernel.slope * along) ** 2
        if spread:
            own = np.maximum(own - np.einsum("ij,ij->i", product(between, self._fit.inverse), between), 1e-9)
        return expected + between @ self._fit.weights, np.sqrt(own)

    def _learn(self, errors: Array) -> _Fit:
        alike = matern(self._seen.features, self._seen.features, LENGTH)
        along = prior(self._seen) - self._centre
        fits = [self._fitted(kernel, _covariance(kernel, alike, along, along), errors) for kernel in _kernels()]
        return max(fits, key=lambda fit: fit.likelihood)

    def _fitted(self, kernel: _Kernel, covariance: Array, errors: Array) -> _Fit:
        wider = np.ones(len(errors))
        for _ in range(ROUNDS):
            inverse = np.asarray(np.linalg.inv(covariance + np.diag(self._noise**2 * wider)), dtype=np.float64)
            weights = inverse @ errors
            left_out = weights / np.diag(inverse)
            before, wider = wider, np.maximum((left_out**2 / self._noise**2 + 3) / 4, 1.0)
            if np.array_equal(before, wider):
                break
        return _Fit(kernel=kernel, inverse=inverse, weights=weights, likelihood=_likelihood(left_out, inverse) - _cost(kernel))


def _likelihood(left_out: Array, inverse: Array) -> float:
    """Logarithm of the probability of each trial by all others, Student t with three degrees of freedom, summed."""
    variance = 1 / np.diag(inverse)
    return float((-2 * np.log1p(left_out**2 / (3 * variance)) - 0.5 * np.log(variance)).sum())


def _cost(kernel: _Kernel) -> float:
    """Minus the logarithm of how probable sizes are before any trial: a few trials overrule the usual ones, one does not."""
    return UNUSUAL * (abs(math.log2(kernel.size / USUAL_SIZE)) + (kernel.slope != SLOPES[0]))


def _kernels() -> list[_Kernel]:
    return [_Kernel(size=size, slope=slope) for size in SIZES for slope in SLOPES]


def _covariance(kernel: _Kernel, alike: Single, along: Array, across: Array) -> Array:
    """Of candidates and trials: how alike their features are, and how far each one's prediction is from the middle."""
    total = np.multiply(alike, kernel.size**2, dtype=np.float64)
    total += along[:, None] * (kernel.slope**2 * across)
    total += COMMON**2
    return total


def prior(asked: Described) -> Array:
    """Logarithm of each one's rate before any trial."""
    told: Array = asked.log_rate + asked.learned - asked.doubt
    return told


def blocks(count: int, others: int) -> Iterator[slice]:
    """Candidates in parts, to be held against so many trials."""
    size = max(ENTRIES // max(others, 1), 1)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))
