"""The posterior distribution of the rates of a job's configurations, as draws, and the standard normal distribution."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.objective.intervals import Spread
from search_spaces.trial import Interval

Array = NDArray[np.float64]

NOISE_LEVELS, DRAWS = 5, 400
"""Number of noise levels, and of draws at each level."""
BLOCK_RATIOS = (0.0, 1.0, 4.0, 16.0, 64.0)
"""Hypotheses of the variance of the machine's speed between blocks, relative to the variance of the noise."""
DRIFTED_RATIOS = (1e4,)
"""The hypothesis if the machine is known to have drifted: measurements are not compared across blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement of a candidate."""

    candidate: int
    rate: float
    """Samples/s, positive."""
    within: float
    """Standard error of the rate within the measurement, relative to the rate."""
    block: int
    """Measurements in one block had the same state of the machine: a confirmation round, or the search."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """Joint draws of the candidates' log rates, at the machine's mean speed in the confirmation rounds."""

    _UPPER = 0.975

    draws: Array
    """Shape (candidates, draws)."""
    weights: Array
    """Shape (draws,); they sum to 1."""

    def rate(self, candidate: int) -> Interval:
        """Mean and central 95 % interval of the rate."""
        return self._interval(self.draws[candidate])

    def ratio(self, candidate: int, other: int) -> Interval:
        """Ratio of the candidate's rate to the other's, with its 95 % interval."""
        return self._interval(self.draws[candidate] - self.draws[other])

    def means(self) -> Array:
        """Mean log rates, shape (candidates,)."""
        means: Array = self.draws @ self.weights
        return means

    def upper(self) -> Array:
        """97.5 % quantiles of log rates, shape (candidates,)."""
        bounds: Array = np.quantile(self.draws, self._UPPER, axis=1)
        return bounds

    def probability_best(self, candidate: int, margin: float = 0.0) -> float:
        """Probability that no candidate is faster by more than the relative `margin`."""
        lag = self.draws.max(axis=0) - self.draws[candidate]
        return min(float(self.weights @ (lag <= math.log1p(margin))), 1.0)

    def probability_slower(self, candidate: int, other: int, margin: float = 0.0) -> float:
        """Probability that the candidate is slower than the other by more than the relative `margin`."""
        lag = self.draws[other] - self.draws[candidate]
        return float(self.weights @ (lag > math.log1p(margin)))

    def expected_loss(self, candidate: int) -> float:
        """Expected relative loss compared with the best candidate, if this one is the answer."""
        lag = self.draws.max(axis=0) - self.draws[candidate]
        return float(self.weights @ -np.expm1(-lag))

    def _interval(self, values: Array) -> Interval:
        order = np.argsort(values)
        reached = np.cumsum(self.weights[order])
        low, high = (
            values[order[np.searchsorted(reached, q).clip(max=len(order) - 1)]] for q in (1 - self._UPPER, self._UPPER)
        )
        return Interval(mean=math.exp(float(values @ self.weights)), low=math.exp(float(low)), high=math.exp(float(high)))


def posterior_of(
    observations: Sequence[Observation], candidates: int, prior: Spread, baseline: int | None = None, drifted: bool = False
) -> Posterior:
    """Return the posterior of the candidates' rates. The same arguments give the same draws.

    Args:
        observations: at least one for each candidate.
        candidates: number of candidates.
        prior: the assumed spread between repeats.
        baseline: index of the user's configuration; None: it is not a candidate.
        drifted: whether the machine's speed is known to have changed.

    1. A measurement's log rate is the sum of the candidate's log rate, the block's effect and noise. The effect of a block is
       random. Each of `BLOCK_RATIOS` is a hypothesis of its variance, weighted by its restricted likelihood [Patterson and
       Thompson, Biometrika 58 (1971)]: on a steady machine, all blocks are compared; after drift, only measurements in a block.
    2. The variance of the noise has a scaled inverse-chi-squared posterior. It combines the residuals with the prior (spread
       between repeats, error within measurements) [Gelman et al., Bayesian Data Analysis, 3rd edition, 2.6]. It is integrated
       over at `NOISE_LEVELS` quantiles.
    3. The candidates' rates come from a common distribution that is estimated from them on a grid, by a few steps of the EM
       algorithm from a broad start [Laird, JASA 73 (1978); Efron, Statistical Science 29 (2014)]. This shrinkage corrects the
       selection bias of the fastest of many.
    4. Draws of the candidates' posteriors are combined at random. Draws in which the baseline is the best are weighted so that
       its prior probability of being the best follows from the probability that it is already tuned.
    """
    logs = np.log([observation.rate for observation in observations])
    owner = np.array([observation.candidate for observation in observations])
    counts = np.bincount(owner, minlength=candidates).astype(float)
    random = np.random.default_rng(0)
    parts, weights = [], []
    ratios = DRIFTED_RATIOS if drifted else BLOCK_RATIOS
    assumed = prior.relative**2 + float(np.mean([observation.within**2 for observation in observations]))
    for fit in _fits(logs, owner, np.array([observation.block for observation in observations]), assumed, prior, ratios):
        means = np.bincount(owner, logs - fit.effects, minlength=candidates) / counts
        for quantile in _chi_squared(fit.freedom):
            parts.append(_draws(means, fit.scale / quantile / counts, random))
            weights.append(np.full(DRAWS, fit.weight))
    draws, weight = np.hstack(parts), np.concatenate(weights)
    # Prior probability that the user's configuration is already tuned, so that no tried one is faster. Otherwise each of the n
    # configurations, including the user's, is the best with probability 1/n.
    well_chosen = 1 / 3
    if baseline is not None and candidates > 1:
        best = well_chosen + (1.0 - well_chosen) / candidates
        weight[draws[baseline] >= draws.max(axis=0)] *= best / (1.0 - best) * (candidates - 1)
    return Posterior(draws, weight / weight.sum())


def _chi_squared(freedom: float) -> list[float]:
    """Chi-squared quantiles at the middles of `NOISE_LEVELS` equal shares [Wilson and Hilferty, PNAS 17 (1931)]."""
    part = 2.0 / (9.0 * freedom)
    normal = (NormalDist().inv_cdf((level + 0.5) / NOISE_LEVELS) for level in range(NOISE_LEVELS))
    return [freedom * (1.0 - part + z * math.sqrt(part)) ** 3 for z in normal]


def _draws(means: Array, variances: Array, random: np.random.Generator) -> Array:
    """Draws of log rates at one level of the noise, shape (candidates, DRAWS)."""
    # The grid extends four standard errors beyond the lowest and the highest mean.
    reach = 4.0 * math.sqrt(float(variances.max()))
    grid, step = np.linspace(means.min() - reach, means.max() + reach, 160, retstep=True)
    likelihood = np.exp(-0.5 * (means[:, None] - grid) ** 2 / variances[:, None])
    width = 2.0 * max(float(means.std()), math.sqrt(float(variances.max())), 0.05)
    start = np.exp(-0.5 * ((grid - means.mean()) / width) ** 2)
    start /= start.sum()
    density = start
    # Weight of the broad distribution that the fit starts from, in configurations.
    broad = 0.3
    # Few on purpose: for few configurations, a converged fit collapses to a handful of points.
    for _ in range(10):
        shares = likelihood * density
        shares /= shares.sum(axis=1, keepdims=True)
        density = (shares.sum(axis=0) + broad * start) / (len(means) + broad)
    reached = np.cumsum(likelihood * density, axis=1)
    ranks = (np.arange(DRAWS) + 0.5) / DRAWS
    places = [np.searchsorted(cumulative, cumulative[-1] * random.permutation(ranks)) for cumulative in reached]
    return np.asarray(grid[np.array(places)] + (random.random((len(means), DRAWS)) - 0.5) * step)


@dataclass(frozen=True, slots=True)
class _EffectFit:
    """The estimated block effects and noise under one hypothesis of the blocks' variance."""

    effects: Array
    """Log speed of each measurement's block."""
    scale: float
    """Sum of squares of the noise, with the prior's. Divided by a chi-squared variable of `freedom`, it is the variance."""
    freedom: float
    weight: float


def _fits(
    logs: Array, owner: NDArray[Any], block: NDArray[Any], assumed: float, prior: Spread, ratios: Sequence[float]
) -> list[_EffectFit]:
    """Fit each hypothesis, and drop unlikely ones. `assumed`: prior variance of the noise.

    Only candidates with several measurements contribute to block effects. Effects are relative to the mean of the confirmation
    rounds (blocks above 0), or of all blocks if there are no rounds.
    """
    repeated = np.bincount(owner)[owner] > 1
    names = np.unique(block)
    if not repeated.any():
        return [_EffectFit(np.zeros(len(logs)), prior.degrees_of_freedom * assumed, prior.degrees_of_freedom, 1.0)]
    y = logs[repeated]
    fixed = (owner[repeated][:, None] == np.unique(owner[repeated])).astype(float)
    random = (block[repeated][:, None] == names).astype(float)
    repeated_blocks = random.any(axis=0)
    reference = repeated_blocks & (names > 0) if (repeated_blocks & (names > 0)).any() else repeated_blocks
    scored_fits = []
    # Prior probability that the machine has the same speed in all blocks; the other hypotheses share the rest.
    steady = 0.8
    for ratio in ratios if repeated_blocks.sum() > 1 else BLOCK_RATIOS[:1]:
        # After a drift, differences between blocks do not contribute to the noise.
        design = np.hstack([fixed, random]) if ratio in DRIFTED_RATIOS else fixed
        independent = len(y) - int(np.linalg.matrix_rank(design))
        # Degrees of freedom of the assumed noise once there are repeats. Few, because machines differ by a factor of five: with
        # more, a noisy machine makes wrong answers look certain (docs/results/decision-benchmark.md). Without repeats, the
        # assumption keeps the prior's degrees of freedom.
        weight = 0.75 if independent else prior.degrees_of_freedom
        freedom = independent + weight
        covariance = np.eye(len(y)) + ratio * random @ random.T
        inverse = np.linalg.inv(covariance)
        information = fixed.T @ inverse @ fixed
        error = y - fixed @ np.linalg.solve(information, fixed.T @ inverse @ y)
        effects = ratio * random.T @ inverse @ error
        effects = np.where(repeated_blocks, effects - effects[reference].mean(), 0.0)
        scale = weight * assumed + float(error @ inverse @ error)
        size = float(np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(information)[1])
        before = math.log(steady if ratio == 0.0 else (1.0 - steady) / max(len(ratios) - 1, 1))
        fit = _EffectFit(effects[np.searchsorted(names, block)], scale, freedom, 1.0)
        scored_fits.append((fit, before - 0.5 * (size + freedom * math.log(scale))))
    most = max(likelihood for _, likelihood in scored_fits)
    likely = [(fit, math.exp(likelihood - most)) for fit, likelihood in scored_fits]
    return [dataclasses.replace(fit, weight=weight) for fit, weight in likely if weight >= 0.02]


# Abramowitz and Stegun, 26.2.17: absolute error below 7.5e-8.
_B = (0.319381530, -0.356563782, 1.781477937, -1.821255978, 1.330274429)


def density(values: Array) -> Array:
    """Density of the standard normal distribution."""
    result: Array = np.exp(-0.5 * values**2) / math.sqrt(2 * math.pi)
    return result


def probability_below(values: Array) -> Array:
    """The standard normal distribution function; relative accuracy degrades below about -5."""
    t = 1 / (1 + 0.2316419 * np.abs(values))
    upper = density(values) * t * (_B[0] + t * (_B[1] + t * (_B[2] + t * (_B[3] + t * _B[4]))))
    result: Array = np.where(values < 0, upper, 1 - upper)
    return result


def log_probability_below(values: Array) -> Array:
    """Logarithm of `probability_below`; below -5 by the first term of the asymptotic series."""
    clipped = np.minimum(values, -5.0)
    tail = -0.5 * clipped**2 - np.log(-clipped * math.sqrt(2 * math.pi))
    result: Array = np.where(values < -5.0, tail, np.log(np.maximum(probability_below(values), 1e-300)))
    return result


def hazard(value: float) -> float:
    """Density of the standard normal distribution over the probability above the value."""
    above = float(log_probability_below(np.array([-value]))[0])
    return math.exp(-0.5 * value**2 - 0.5 * math.log(2 * math.pi) - above)
