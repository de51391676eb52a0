"""Confidence intervals that include the spread between repeats (docs/measurement.md has method and sources)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from executor.measurement.timing import t_quantile
from search_spaces.trial import Interval

CONFIDENCE = 0.95
CPU_SPREAD = 0.04
"""Relative standard deviation between repeats of one configuration on a shared CPU host, before a job has its own repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One trial of a configuration."""

    rate: float
    """Samples/s, or any positive quantity that is compared by ratio."""
    within: float
    """Standard error of the rate within the trial, relative to the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How much repeats of one configuration differ beyond their own standard errors."""

    relative: float = CPU_SPREAD
    """Relative standard deviation between repeats."""
    degrees_of_freedom: int = 5
    """Number of independent differences that `relative` is estimated from."""

    def interval(self, mean: float, within: float) -> Interval:
        """Return the 95 % interval of one trial: mean * (1 ± t * sqrt(within² + between²))."""
        half = self._quantile() * math.hypot(within, self.relative)
        return Interval(mean=mean, low=max(mean * (1.0 - half), 0.0), high=mean * (1.0 + half))

    def combined(self, repeats: Sequence[Repeat]) -> Interval:
        """Return the estimate from several trials of one configuration, with equal weights.

        Raises:
            ValueError: there is no repeat.
        """
        if not repeats:
            raise ValueError("an estimate needs at least one repeat")
        mean = fmean(repeat.rate for repeat in repeats)
        half = self._quantile() * math.sqrt(self._variance_of_mean(repeats))
        return Interval(mean=mean, low=max(mean * (1.0 - half), 0.0), high=mean * (1.0 + half))

    def ratio(self, numerator: Sequence[Repeat], denominator: Sequence[Repeat], confidence: float = CONFIDENCE) -> Interval:
        """Return the ratio of two configurations' rates with its interval at this confidence, computed on the log scale.

        If both sides have the same number of repeats, two or more, they are treated as interleaved pairs. Their differences
        are free of the drift that both share. Their variance is pooled with the one that the spread predicts.

        Raises:
            ValueError: a side has no repeat.
        """
        if not numerator or not denominator:
            raise ValueError("a ratio needs at least one repeat on each side")
        paired = len(numerator) == len(denominator) >= 2
        make = self._paired_ratio if paired else self._free_ratio
        return make(numerator, denominator, (1.0 + confidence) / 2)

    def _free_ratio(self, numerator: Sequence[Repeat], denominator: Sequence[Repeat], upper: float) -> Interval:
        center = _log_mean(numerator) - _log_mean(denominator)
        half = t_quantile(upper, self.degrees_of_freedom) * math.sqrt(
            self._variance_of_mean(numerator) + self._variance_of_mean(denominator)
        )
        return _exponential(center, half)

    def _paired_ratio(self, numerator: Sequence[Repeat], denominator: Sequence[Repeat], upper: float) -> Interval:
        differences = [math.log(a.rate / b.rate) for a, b in zip(numerator, denominator, strict=True)]
        count = len(differences)
        within = fmean(a.within**2 + b.within**2 for a, b in zip(numerator, denominator, strict=True))
        predicted = 2.0 * self.relative**2 + within
        freedom = self.degrees_of_freedom + count - 1
        pooled = (self.degrees_of_freedom * predicted + (count - 1) * variance(differences)) / freedom
        return _exponential(fmean(differences), t_quantile(upper, freedom) * math.sqrt(pooled / count))

    def _variance_of_mean(self, repeats: Sequence[Repeat]) -> float:
        within = fmean(repeat.within**2 for repeat in repeats)
        return (self.relative**2 + within) / len(repeats)

    def _quantile(self) -> float:
        return t_quantile((1.0 + CONFIDENCE) / 2, self.degrees_of_freedom)


def pooled_spread(groups: Iterable[Sequence[Repeat]], prior: Spread | None = None) -> Spread:
    """Estimate the spread from a job's own repeats, shrunk towards `prior`.

    1. In each group (the repeats of one configuration), compute the squared deviations of log rate from the group's mean.
       Their expected sum is (n - 1) * (between² + within²).
    2. Subtract (n - 1) * mean(within²) from it, and sum the rest over the groups.
    3. Pool with the prior, weighted by degrees of freedom: the posterior mean of a scaled inverse-chi-squared prior
       [Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6].
    """
    prior = prior or Spread()
    excess, freedom = 0.0, 0
    for repeats in groups:
        if len(repeats) < 2:
            continue
        logs = [math.log(repeat.rate) for repeat in repeats]
        excess += (len(logs) - 1) * (variance(logs) - fmean(repeat.within**2 for repeat in repeats))
        freedom += len(logs) - 1
    total = prior.degrees_of_freedom + freedom
    between = max(prior.degrees_of_freedom * prior.relative**2 + excess, 0.0) / total
    return Spread(relative=math.sqrt(between), degrees_of_freedom=total)


def _log_mean(repeats: Sequence[Repeat]) -> float:
    return fmean(math.log(repeat.rate) for repeat in repeats)


def _exponential(center: float, half: float) -> Interval:
    return Interval(mean=math.exp(center), low=math.exp(center - half), high=math.exp(center + half))
