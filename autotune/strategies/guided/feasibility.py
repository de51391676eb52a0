"""How probable it is that a trial of a candidate ends well: memory, and failures of what nobody predicts."""

from collections.abc import Callable

import numpy as np

from autotune.objective.normal import log_probability_above, log_probability_below, probability_below
from autotune.prediction.fitting.likeness import matern
from autotune.strategies.guided.described import Array, Described
from autotune.strategies.guided.observations import Flags, Observations
from autotune.strategies.guided.surrogate import blocks

OWN = 0.5
"""Share of the memory's spread that is each configuration's own; the rest is one error that all share."""
BIASES = np.linspace(-4.0, 4.0, 81)
"""Values of the shared error that are weighed, in its standard deviations."""
MEASURED = 0.02
"""Standard deviation of what a measured peak leaves open of memory."""
SURE = 0.99
"""How probably memory suffices where a trial that held no less ran: at least so."""
FAILED_LENGTH = 4.0
"""Distance in features over which failures of unknown cause repeat."""
DOUBT = 0.5
"""Trials that are taken to have ended well, beside those there are, when failures are counted."""


class Feasibility:
    """How probable it is that candidates run, after trials.

    1. log(measured / predicted bytes) = an error that all share + one of its own, both normal. The shared one is weighed on
       a grid: by measured peaks, and by whether trials ran or ran out of memory.
    2. Out of memory: nothing that holds at least as many predicted bytes in every tag, of the same kind, fits.
       Ran: whatever holds no more in any tag fits.
    3. Failures repeat near each other: the share of failures among the trials nearby, weighed by distance.
    """

    def __init__(self, told: Observations) -> None:
        self._told = told
        weights = self._weighed()
        self._shared = float(weights @ BIASES)
        """Of the shared error: its mean and its variance, in the spread that it has before any trial."""
        self._variance = float(weights @ (BIASES - self._shared) ** 2)

    def quick_probability(self, asked: Described) -> Array:
        """(n,) That each one's memory suffices, by its prediction alone."""
        margin = np.log(asked.room / asked.needed)
        shared = self._shared * asked.memory_spread * np.sqrt(1 - OWN**2)
        spread = asked.memory_spread * np.sqrt(OWN**2 + (1 - OWN**2) * self._variance)
        return probability_below((margin - shared) / spread)

    def probability(self, asked: Described) -> Array:
        """(n,) That each one runs."""
        told: Array = self.fits(asked) * (1 - self.failing(asked))
        return told

    def fits(self, asked: Described) -> Array:
        """(n,) That each one's memory suffices, by the trials too."""
        fits = self.quick_probability(asked)
        doubtful = np.flatnonzero(fits < SURE)
        fits[doubtful[self._below_one_that_ran(asked.take(doubtful))]] = SURE
        told: Array = np.where(self._above_one_that_did_not_fit(asked), 0.0, fits)
        return told

    def failing(self, asked: Described) -> Array:
        """(n,) That each one fails of what nobody predicts."""
        failed = (~self._told.ran).astype(np.float32)
        share, seen = np.zeros(len(asked)), self._told.described.features
        if failed.any():
            for block in blocks(len(asked), len(seen)):
                near = matern(asked.features[block], seen, FAILED_LENGTH)
                share[block] = near @ failed / (near.sum(axis=1) + DOUBT)
        return share

    def _weighed(self) -> Array:
        """The probability of each value of the shared error."""
        seen, told = self._told.described, self._told
        log_weights = -0.5 * BIASES**2
        for place in range(len(told)):
            spread = float(seen.memory_spread[place])
            shared, own = BIASES * spread * np.sqrt(1 - OWN**2), spread * OWN
            margin = float(np.log(seen.room[place] / seen.needed[place]))
            if np.isfinite(told.peak[place]):
                error = float(np.log((told.peak[place] + seen.outside[place]) / seen.needed[place]))
                log_weights = log_weights - 0.5 * ((error - shared) / np.hypot(own, MEASURED)) ** 2
            elif told.ran[place]:
                log_weights = log_weights + log_probability_below((margin - shared) / own)
            elif told.out_of_memory[place]:
                log_weights = log_weights + log_probability_above((margin - shared) / own)
        weights = np.exp(log_weights - log_weights.max())
        normed: Array = weights / weights.sum()
        return normed

    def _above_one_that_did_not_fit(self, asked: Described) -> Flags:
        seen = self._told.described.take(np.flatnonzero(self._told.out_of_memory))
        return _any_other(asked, seen, lambda held, theirs: held >= theirs * (1 - 1e-9))

    def _below_one_that_ran(self, asked: Described) -> Flags:
        seen = self._told.described.take(np.flatnonzero(self._told.ran))
        return _any_other(asked, seen, lambda held, theirs: held <= theirs * (1 + 1e-9))


def _any_other(asked: Described, seen: Described, holds: Callable[[Array, Array], Flags]) -> Flags:
    """(n,) Whether it holds of each one and any other of its kind, in every tag."""
    found = np.zeros(len(asked), dtype=bool)
    for block in blocks(len(asked), len(seen)):
        pairs = asked.kind[block][:, None] == seen.kind
        for held, theirs in zip(asked.tags[block].T, seen.tags.T, strict=True):
            pairs &= holds(held[:, None], theirs)
        found[block] = pairs.any(axis=1)
    return found
