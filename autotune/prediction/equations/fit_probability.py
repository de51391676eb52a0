"""The probability that memory suffices: one definition for verdicts, plans and search.

log(measured / predicted bytes) has Student's distribution with two degrees of freedom, scaled so that its 90 % band is that
of a normal distribution with the calibrated spread. (Stated bands are wider by `memory_tail`: sources also differ in what
they call memory.) Memory is usually as predicted within a few per cent, but a few configurations in a hundred are off by a
third, which a normal distribution would call impossible: on published sweeps left out of the fit, the log loss of its
verdicts is 0.100, and 0.072 with this one.
"""

import math

import numpy as np

from autotune.prediction.equations.cases import Array

_EDGE = 2.9199856 / 1.6448536
"""Upper edge of the 90 % band, Student's over the normal's."""


def fit_probability(needed: Array, room: Array, spread: Array | float) -> Array:
    """(n,) P(measured bytes <= room).

    Args:
        needed: predicted bytes, above 0.
        room: available bytes.
        spread: of the logarithm of measured / predicted bytes.
    """
    return probability_within(np.log(room / needed) / spread)


def probability_within(margin: Array) -> Array:
    """(n,) The same of the margin, log(room / needed), in spreads."""
    scaled = margin * _EDGE
    found: Array = 0.5 + scaled / (2 * np.sqrt(2 + scaled**2))
    return found


def margin_of(probability: float) -> float:
    """The margin, in spreads, at which memory suffices with this probability: the inverse of `probability_within`."""
    return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability))) / _EDGE
