"""The probability that a trial of a candidate succeeds: sufficient memory and no unpredicted failure."""

from collections.abc import Callable

import numpy as np

from autotune.objective.posterior import hazard
from autotune.prediction.fitting.likeness import matern
from autotune.prediction.planning.memory_fit import probability_within
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.observations import Flags, Observations
from autotune.strategies.guided.surrogate import blocks

COMMON, TERMS, INDIVIDUAL = 0.5, 0.25, 0.25
"""Parts of the variance of the memory's logarithm before any trial: an error common to all configurations, errors of the terms
(states, activations, buffers) in proportion to their bytes, and an error specific to each configuration."""
MEASURED = 0.02
"""Standard deviation of the memory's logarithm that remains once a peak was measured."""
OUTLIER = 4.0
"""Standard deviations that an error counts at most: a trial that is off by more has another cause."""
UNEXPLAINED = 0.1
"""Probability of a failure of unknown cause where memory suffices."""
SURE = 0.99
"""Least probability that memory suffices if a trial with at least as many bytes ran."""


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
        doubtful = np.flatnonzero(fits < SURE)
        ran = self._observations.described.take(np.flatnonzero(self._observations.ran))
        below_one_that_ran = _any_other(candidates.take(doubtful), ran, lambda needed, other: needed <= other * (1 + 1e-9))
        fits[doubtful[below_one_that_ran]] = SURE
        did_not_fit = self._observations.described.take(np.flatnonzero(self._observations.out_of_memory))
        above_one_that_did_not = _any_other(candidates, did_not_fit, lambda needed, other: needed >= other * (1 - 1e-9))
        chance: Array = np.where(above_one_that_did_not, 0.0, fits)
        return chance

    def failing(self, candidates: Described) -> Array:
        """(n,) The probability that each candidate fails for an unpredicted reason."""
        failed = (~self._observations.ran).astype(np.float32)
        share, features = np.zeros(len(candidates)), self._observations.described.features
        if failed.any():
            for block in blocks(len(candidates), len(features)):
                # Failures are correlated over this distance in features, and half a success is added to the actual ones.
                similarity = matern(candidates.features[block], features, 4.0)
                share[block] = similarity @ failed / (similarity.sum(axis=1) + 0.5)
        return share

    def _learn(self) -> None:
        """Update the errors by each trial, in order."""
        described, observations = self._observations.described, self._observations
        margins, along = np.log(described.room / described.needed) / described.memory_spread, _directions(described)
        for index, (margin, direction) in enumerate(zip(margins, along, strict=True)):
            variance = INDIVIDUAL
            projected = self._covariance @ direction
            if np.isfinite(observations.peak[index]):
                variance += float(MEASURED / described.memory_spread[index]) ** 2
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
            moved = float(np.clip(moved, -OUTLIER, OUTLIER))
            step = projected / spread
            self._mean = self._mean + weight * moved * step
            spread_left = weight * narrower - weight * (1 - weight) * moved**2
            self._covariance = self._covariance - max(spread_left, 0.0) * np.outer(step, step)

    def _blamed(self, index: int, margin: float) -> float:
        """The probability that memory was the cause of a failure."""
        if self._observations.out_of_memory[index]:
            return 1.0
        fits = float(probability_within(np.array([margin]))[0])
        return (1 - fits) / (1 - fits + UNEXPLAINED * fits)


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
    common = np.full((len(described), 1), np.sqrt(COMMON))
    return np.concatenate([common, np.sqrt(TERMS) * described.tags / sizes], axis=1)
