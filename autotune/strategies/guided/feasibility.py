"""The probability that a trial of a candidate succeeds: sufficient memory and no unpredicted failure."""

from collections.abc import Callable

import numpy as np

from autotune.objective.normal import log_probability_above, log_probability_below, probability_below
from autotune.prediction.fitting.likeness import matern
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.observations import Flags, Observations
from autotune.strategies.guided.surrogate import blocks

INDIVIDUAL = 0.5
"""Share of the memory's spread that is specific to each configuration; the rest is one error common to all."""
BIASES = np.linspace(-4.0, 4.0, 81)
"""Grid of values of the common error, in its standard deviations."""
MEASURED = 0.02
"""Standard deviation of the memory's logarithm that remains once a peak was measured."""
SURE = 0.99
"""Least probability that memory suffices if a trial with at least as many bytes ran."""
FAILED_LENGTH = 4.0
"""Distance in features over which failures of unknown cause are correlated."""
PRIOR_SUCCESSES = 0.5
"""Number of successful trials added to the actual ones when failures are counted."""


class Feasibility:
    """The probability that candidates run, given the trials so far.

    1. log(measured / predicted bytes) = an error common to all + an individual one, both normal. The common error is
       weighted on a grid: by measured peaks, and by which trials ran or ran out of memory.
    2. After an out-of-memory trial: no configuration of the same kind with at least as many predicted bytes in every tag fits.
       After a trial that ran: any such configuration with at most as many bytes in every tag fits.
    3. Failures repeat nearby: the share of failures among nearby trials, weighted by distance.
    """

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        weights = self._error_weights()
        self._shared = float(weights @ BIASES)
        """Mean and variance of the common error, in units of its spread before any trial."""
        self._variance = float(weights @ (BIASES - self._shared) ** 2)

    def quick_probability(self, asked: Described) -> Array:
        """(n,) The probability that memory suffices, from the prediction and the common error only."""
        margin = np.log(asked.room / asked.needed)
        shared = self._shared * asked.memory_spread * np.sqrt(1 - INDIVIDUAL**2)
        spread = asked.memory_spread * np.sqrt(INDIVIDUAL**2 + (1 - INDIVIDUAL**2) * self._variance)
        return probability_below((margin - shared) / spread)

    def probability(self, asked: Described) -> Array:
        """(n,) The probability that each candidate runs."""
        chance: Array = self.fits(asked) * (1 - self.failing(asked))
        return chance

    def fits(self, asked: Described) -> Array:
        """(n,) The probability that memory suffices, including the evidence of individual trials."""
        fits = self.quick_probability(asked)
        doubtful = np.flatnonzero(fits < SURE)
        fits[doubtful[self._below_one_that_ran(asked.take(doubtful))]] = SURE
        chance: Array = np.where(self._above_one_that_did_not_fit(asked), 0.0, fits)
        return chance

    def failing(self, asked: Described) -> Array:
        """(n,) The probability that each candidate fails for an unpredicted reason."""
        failed = (~self._observations.ran).astype(np.float32)
        share, seen = np.zeros(len(asked)), self._observations.described.features
        if failed.any():
            for block in blocks(len(asked), len(seen)):
                near = matern(asked.features[block], seen, FAILED_LENGTH)
                share[block] = near @ failed / (near.sum(axis=1) + PRIOR_SUCCESSES)
        return share

    def _error_weights(self) -> Array:
        """The probability of each value of the common error."""
        seen, observations = self._observations.described, self._observations
        log_weights = -0.5 * BIASES**2
        for place in range(len(observations)):
            spread = float(seen.memory_spread[place])
            shared, own = BIASES * spread * np.sqrt(1 - INDIVIDUAL**2), spread * INDIVIDUAL
            margin = float(np.log(seen.room[place] / seen.needed[place]))
            if np.isfinite(observations.peak[place]):
                error = float(np.log((observations.peak[place] + seen.outside[place]) / seen.needed[place]))
                log_weights = log_weights - 0.5 * ((error - shared) / np.hypot(own, MEASURED)) ** 2
            elif observations.ran[place]:
                log_weights = log_weights + log_probability_below((margin - shared) / own)
            elif observations.out_of_memory[place]:
                log_weights = log_weights + log_probability_above((margin - shared) / own)
        weights = np.exp(log_weights - log_weights.max())
        normed: Array = weights / weights.sum()
        return normed

    def _above_one_that_did_not_fit(self, asked: Described) -> Flags:
        seen = self._observations.described.take(np.flatnonzero(self._observations.out_of_memory))
        return _any_other(asked, seen, lambda held, theirs: held >= theirs * (1 - 1e-9))

    def _below_one_that_ran(self, asked: Described) -> Flags:
        seen = self._observations.described.take(np.flatnonzero(self._observations.ran))
        return _any_other(asked, seen, lambda held, theirs: held <= theirs * (1 + 1e-9))


def _any_other(asked: Described, seen: Described, holds: Callable[[Array, Array], Flags]) -> Flags:
    """(n,) Whether the relation holds between each candidate and any trial of its kind, in every tag."""
    found = np.zeros(len(asked), dtype=bool)
    for block in blocks(len(asked), len(seen)):
        pairs = asked.kind[block][:, None] == seen.kind
        for held, theirs in zip(asked.tags[block].T, seen.tags.T, strict=True):
            pairs &= holds(held[:, None], theirs)
        found[block] = pairs.any(axis=1)
    return found
