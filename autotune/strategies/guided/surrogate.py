"""What trials show of other candidates: their rates, and the probability that a trial succeeds.

A rate is the prediction times a residual, which a Gaussian process models. A trial succeeds with sufficient memory and without
an unpredicted failure.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from autotune.objective.posterior import hazard
from autotune.prediction.fitting.residuals import LENGTH, NOISE, Single, fit_process, matern, product
from autotune.prediction.planning.memory_fit import probability_within
from autotune.strategies.guided.described import Array, Described, Flags, Observations

COMMON = 0.6
"""Standard deviation of the part common to all residuals of a job: irrelevant to the order, learned from the first trial."""
SLOPES = (0.05, 0.5)
"""Candidate errors of the prediction's slope: small, or half. The second lets the data overrule the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SurrogateKernel:
    size: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    kernel: _SurrogateKernel
    inverse: Array
    weights: Array
    likelihood: float
    """Log-probability of each trial given all others."""


class Surrogate:
    """The rates of candidates, given the trials so far.

    1. Before any trial, log rate = equations + correction learned from earlier measurements.
    2. The residual is a Gaussian process over the features, Matérn 3/2 [Rasmussen and Williams 2006, 4.2.1], plus a part
       common to all, and one along the prediction itself: its slope may be wrong, so a prediction that does not order the
       trials loses weight, down to almost none.
    3. The sizes of the residual and of the slope's error maximise the leave-one-out likelihood [Rasmussen and Williams 2006,
       5.4.2], with a prior in favour of the usual ones.
    4. Outliers are down-weighted by their leave-one-out errors, as a Student t with three degrees of freedom would.
    """

    _USUAL_SIZE = 0.2

    def __init__(self, observations: Observations) -> None:
        timed = np.flatnonzero(np.isfinite(observations.log_rate))
        self.best = float(observations.log_rate[timed][observations.wins[timed]].max(initial=-np.inf))
        """Logarithm of the highest rate among trials that can win."""
        # Maximum number of trials used: the newest.
        timed_trials = observations.take(timed[-300:])
        self._seen = timed_trials.described
        self._noise = np.hypot(timed_trials.noise, NOISE)
        self.trial_noise = float(np.median(timed_trials.noise)) if len(timed_trials) else 0.0
        """Median standard deviation of a trial's log rate, as measured within the trials; 0: unknown."""
        self._wins = timed_trials.wins
        self._centre = float(prior(self._seen).mean()) if len(timed_trials) else 0.0
        self._fit = self._learn(timed_trials.log_rate - prior(self._seen)) if len(timed_trials) else None

    @property
    def agreement(self) -> float:
        """Weight of the prediction's differences, from 1 (as before any trial) down to 0."""
        return 1.0 if self._fit is None or self._fit.kernel.slope == SLOPES[0] else 1.0 - self._fit.kernel.slope

    def trend(self, candidates: Described) -> Array:
        """(n,) Expected logarithm of each rate, without the effect of nearby trials and without the common part."""
        expected = prior(candidates)
        if self._fit is None:
            return expected
        along = prior(self._seen) - self._centre
        corrected: Array = expected + self._fit.kernel.slope**2 * (expected - self._centre) * float(along @ self._fit.weights)
        return corrected

    def mean(self, candidates: Described) -> Array:
        """Expected logarithm of each rate."""
        return self.mean_and_spread(candidates, spread=False)[0]

    def mean_and_spread(self, candidates: Described, *, spread: bool = True) -> tuple[Array, Array]:
        """Expected logarithm of each rate and its standard deviation (`spread=False`: the prior one)."""
        parts = [self._part(candidates.part(block), spread) for block in blocks(len(candidates), len(self._seen))]
        return np.concatenate([mean for mean, _ in parts]), np.concatenate([wide for _, wide in parts])

    @property
    def has_best(self) -> bool:
        """Whether any of the trials used can win."""
        return bool(self._wins.any())

    def ahead(self, candidates: Described, mean: Array, spread: Array) -> tuple[Array, Array]:
        """Expected lead of each log rate over that of the best trial, and its standard deviation.

        The best is the trial with the highest expected rate among those that can win, not necessarily the highest measured one.
        The common uncertainty cancels: little uncertainty remains about the difference to a close neighbour.

        Args:
            candidates: described by their predictions.
            mean, spread: results of `mean_and_spread` for them.

        Raises:
            ValueError: no timed trial can win.
        """
        if self._fit is None or not self.has_best:
            raise ValueError("no trial that may win was timed")
        expected = np.where(self._wins, self.mean(self._seen), -np.inf)
        best = self._seen.take(np.array([expected.argmax()]))
        its_mean, its_own = self.joint(best)
        projection = self._fit.inverse @ self._between(self._fit.kernel, best, prior(best) - self._centre)[0]
        parts = [self._shared(candidates.part(block), best, projection) for block in blocks(len(candidates), len(self._seen))]
        variance = spread**2 + its_own[0, 0] - 2 * np.concatenate(parts)
        return mean - its_mean[0], np.sqrt(np.maximum(variance, 0.0))

    def _shared(self, candidates: Described, best: Described, projection: Array) -> Array:
        """Covariance of each candidate with the best, given the trials; `projection`: of the best on the trials."""
        assert self._fit is not None
        kernel, along = self._fit.kernel, prior(candidates) - self._centre
        alike = _covariance(kernel, matern(candidates.features, best.features, LENGTH), along, prior(best) - self._centre)
        shared: Array = alike[:, 0] - self._between(kernel, candidates, along) @ projection
        return shared

    def joint(self, candidates: Described) -> tuple[Array, Array]:
        """Expected logarithms of the rates and their covariance, for a small number of candidates."""
        expected = prior(candidates)
        along = expected - self._centre
        kernel = self._fit.kernel if self._fit is not None else _SurrogateKernel(size=self._USUAL_SIZE, slope=SLOPES[0])
        covariance = _covariance(kernel, matern(candidates.features, candidates.features, LENGTH), along, along)
        if self._fit is None:
            return expected, covariance
        between = self._between(kernel, candidates, along)
        return expected + between @ self._fit.weights, covariance - between @ self._fit.inverse @ between.T

    def _between(self, kernel: _SurrogateKernel, candidates: Described, along: Array) -> Array:
        alike = matern(candidates.features, self._seen.features, LENGTH)
        return _covariance(kernel, alike, along, prior(self._seen) - self._centre)

    def _part(self, candidates: Described, spread: bool) -> tuple[Array, Array]:
        expected = prior(candidates)
        if self._fit is None:
            return expected, np.full(len(candidates), np.hypot(self._USUAL_SIZE, COMMON))
        kernel = self._fit.kernel
        along = expected - self._centre
        between = self._between(kernel, candidates, along)
        variance = kernel.size**2 + COMMON**2 + (kernel.slope * along) ** 2
        if spread:
            variance = np.maximum(variance - np.einsum("ij,ij->i", product(between, self._fit.inverse), between), 1e-9)
        return expected + between @ self._fit.weights, np.sqrt(variance)

    def _learn(self, errors: Array) -> _Fit:
        alike = matern(self._seen.features, self._seen.features, LENGTH)
        along = prior(self._seen) - self._centre
        fits = [self._fitted(kernel, _covariance(kernel, alike, along, along), errors) for kernel in _kernels()]
        return max(fits, key=lambda fit: fit.likelihood)

    def _fitted(self, kernel: _SurrogateKernel, covariance: Array, errors: Array) -> _Fit:
        # Number of iterations that down-weight outliers.
        inverse, weights, left_out = fit_process(covariance, self._noise, errors, 4)
        # The sum of the log-probabilities of each trial given all others, Student t with three degrees of freedom.
        variance = 1 / np.diag(inverse)
        likelihood = float((-2 * np.log1p(left_out**2 / (3 * variance)) - 0.5 * np.log(variance)).sum())
        # Negative log prior of the sizes: 2 for each doubling or halving of the residual's size, and for a wrong slope. A few
        # trials overrule the usual ones, a single trial does not.
        cost = 2.0 * (abs(math.log2(kernel.size / self._USUAL_SIZE)) + (kernel.slope != SLOPES[0]))
        return _Fit(kernel=kernel, inverse=inverse, weights=weights, likelihood=likelihood - cost)


def _kernels() -> list[_SurrogateKernel]:
    # Candidate standard deviations of the residual, compared by how well they predict each trial from the others.
    return [_SurrogateKernel(size=size, slope=slope) for size in (0.1, 0.2, 0.4, 0.8) for slope in SLOPES]


def _covariance(kernel: _SurrogateKernel, alike: Single, along: Array, across: Array) -> Array:
    """Covariance of candidates and trials, from the similarity of features and each prediction's distance from the centre."""
    total = np.multiply(alike, kernel.size**2, dtype=np.float64)
    total += along[:, None] * (kernel.slope**2 * across)
    total += COMMON**2
    return total


def prior(candidates: Described) -> Array:
    """Logarithm of each rate before any trial."""
    log_rates: Array = candidates.log_rate + candidates.learned - candidates.penalty
    return log_rates


def blocks(count: int, trial_count: int) -> Iterator[slice]:
    """Slices of the candidates, sized for comparison with `trial_count` trials."""
    # So few candidate-trial pairs that matrices stay in a processor's cache.
    size = max(2**16 // max(trial_count, 1), 1)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


COMMON_VARIANCE, TERMS, INDIVIDUAL = 0.5, 0.25, 0.25
"""Parts of the variance of the memory's logarithm before any trial: an error common to all configurations, errors of the terms
(states, activations, buffers) in proportion to their bytes, and an error specific to each configuration."""


class Feasibility:
    """The probability that candidates run, given the trials so far.

    1. log(measured / predicted bytes), in spreads = a common error + errors of the terms in proportion to their bytes + an
       individual one; before any trial its distribution is that of `fit_probability`.
    2. Each trial updates the common error and those of the terms, and with them all configurations that share the terms: a
       measured peak as a linear observation, a trial that ran or ran out of memory as a bound, by matching moments [assumed
       density filtering: Opper 1998]. A failure of unknown cause is a bound with the probability that memory was its cause.
    3. After an out-of-memory trial: no configuration of the same kind with at least as many predicted bytes in every tag fits.
       After a trial that ran: any such configuration with at most as many bytes in every tag fits.
    4. Failures repeat nearby: the share of failures among nearby trials, weighted by distance.
    """

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        count = observations.described.tags.shape[1] + 1
        self._mean, self._covariance = np.zeros(count), np.eye(count)
        """Of the common error and of each term's, in units of their spread before any trial."""
        self._learn()

    def quick_probability(self, candidates: Described) -> Array:
        """(n,) The probability that memory suffices, by the prediction and the learned errors."""
        along = _directions(candidates)
        spread = np.sqrt(INDIVIDUAL + np.einsum("ij,jk,ik->i", along, self._covariance, along))
        margin = np.log(candidates.room / candidates.needed) / candidates.memory_spread
        return probability_within((margin - along @ self._mean) / spread)

    def probability(self, candidates: Described) -> Array:
        """(n,) The probability that each candidate runs."""
        chance: Array = self.fits(candidates) * (1 - self.failing(candidates))
        return chance

    def fits(self, candidates: Described) -> Array:
        """(n,) The probability that memory suffices, including the evidence of individual trials."""
        fits = self.quick_probability(candidates)
        # Least probability that memory suffices if a trial with at least as many bytes ran.
        sure = 0.99
        doubtful = np.flatnonzero(fits < sure)
        ran = self._observations.described.take(np.flatnonzero(self._observations.ran))
        below_one_that_ran = _any_other(candidates.take(doubtful), ran, lambda needed, other: needed <= other * (1 + 1e-9))
        fits[doubtful[below_one_that_ran]] = sure
        did_not_fit = self._observations.described.take(np.flatnonzero(self._observations.out_of_memory))
        above_one_that_did_not = _any_other(candidates, did_not_fit, lambda needed, other: needed >= other * (1 - 1e-9))
        chance: Array = np.where(above_one_that_did_not, 0.0, fits)
        return chance

    def failing(self, candidates: Described) -> Array:
        """(n,) The probability that each candidate fails for an unpredicted reason."""
        failed = ~self._observations.ran
        share, features = np.zeros(len(candidates)), self._observations.described.features
        if failed.any():
            for block in blocks(len(candidates), len(features)):
                # Failures are correlated over this distance in features, and half a success is added to the actual ones.
                similarity = matern(candidates.features[block], features, 4.0)
                share[block] = similarity[:, failed].sum(axis=1) / (similarity.sum(axis=1) + 0.5)
        return share

    def _learn(self) -> None:
        """Update the errors by each trial, in order."""
        described, observations = self._observations.described, self._observations
        margins, along = np.log(described.room / described.needed) / described.memory_spread, _directions(described)
        # Standard deviations that an error counts at most: a trial that is off by more has another cause.
        outlier = 4.0
        for index, (margin, direction) in enumerate(zip(margins, along, strict=True)):
            variance = INDIVIDUAL
            projected = self._covariance @ direction
            if np.isfinite(observations.peak[index]):
                # Standard deviation of the memory's logarithm that remains once a peak was measured.
                variance += float(0.02 / described.memory_spread[index]) ** 2
            spread = float(np.sqrt(variance + direction @ projected))
            expected = float(direction @ self._mean)
            z = float(margin - expected) / spread
            if np.isfinite(observations.peak[index]):
                read = np.log((observations.peak[index] + described.outside[index]) / described.needed[index])
                moved, narrower, weight = float(read / described.memory_spread[index] - expected) / spread, 1.0, 1.0
            elif observations.ran[index]:
                ratio = hazard(-z)
                moved, narrower, weight = -ratio, ratio * (z + ratio), 1.0
            else:
                ratio = hazard(z)
                moved, narrower, weight = ratio, ratio * (ratio - z), self._blamed(index, z)
            moved = float(np.clip(moved, -outlier, outlier))
            step = projected / spread
            self._mean = self._mean + weight * moved * step
            spread_left = weight * narrower - weight * (1 - weight) * moved**2
            self._covariance = self._covariance - max(spread_left, 0.0) * np.outer(step, step)

    def _blamed(self, index: int, margin: float) -> float:
        """The probability that memory was the cause of a failure."""
        if self._observations.out_of_memory[index]:
            return 1.0
        fits = float(probability_within(np.array([margin]))[0])
        # Probability of a failure of unknown cause where memory suffices.
        unexplained = 0.1
        return (1 - fits) / (1 - fits + unexplained * fits)


def _any_other(candidates: Described, trials: Described, holds: Callable[[Array, Array], Flags]) -> Flags:
    """(n,) Whether the relation holds between each candidate and any trial of its kind, in every tag."""
    flags = np.zeros(len(candidates), dtype=bool)
    for block in blocks(len(candidates), len(trials)):
        pairs = candidates.kind[block][:, None] == trials.kind
        for candidate_bytes, trial_bytes in zip(candidates.tags[block].T, trials.tags.T, strict=True):
            pairs &= holds(candidate_bytes[:, None], trial_bytes)
        flags[block] = pairs.any(axis=1)
    return flags


def _directions(described: Described) -> Array:
    """(n, t + 1) The effect of the common error and of each term's on the logarithm of a configuration's bytes."""
    sizes = np.maximum(np.linalg.norm(described.tags, axis=1, keepdims=True), 1.0)
    common = np.full((len(described), 1), np.sqrt(COMMON_VARIANCE))
    return np.concatenate([common, np.sqrt(TERMS) * described.tags / sizes], axis=1)
