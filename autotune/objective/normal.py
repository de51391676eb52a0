"""The standard normal distribution for arrays, as far as decisions need it."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Abramowitz and Stegun, 26.2.17: absolute error below 7.5e-8.
_P = 0.2316419
_B = (0.319381530, -0.356563782, 1.781477937, -1.821255978, 1.330274429)


def density(values: Array) -> Array:
    """Density of the standard normal distribution."""
    result: Array = np.exp(-0.5 * values**2) / math.sqrt(2 * math.pi)
    return result


def probability_below(values: Array) -> Array:
    """The standard normal distribution function; relative accuracy degrades below about -5."""
    t = 1 / (1 + _P * np.abs(values))
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
