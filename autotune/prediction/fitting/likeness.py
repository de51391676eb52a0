"""Similarity of two configurations: the kernel of the Gaussian processes over the residuals of the equations."""

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import Array

Single = NDArray[np.float32]
LENGTH = 6.0
"""Distance in features over which residuals are correlated."""
NOISE = 0.1
"""Standard deviation of one trial's logarithm, including effects that the features do not describe."""
SINGLE_THREADED = 2**18
"""Multiplications up to which OpenBLAS uses one thread."""


def matern(one: Array, other: Array, length: float) -> Single:
    """Matérn 3/2 of the distances between rows: 1 if they are equal.

    Distances are differences of large numbers and need double precision; the result does not.
    """
    scale = np.sqrt(3) / length
    centre = other.mean(axis=0) if len(other) else 0.0
    ours, theirs = scale * (one - centre), scale * (other - centre)
    # |a|^2 - 2 a b + |b|^2 as one product: each further pass over the pairs would take as long as the product itself.
    left = np.column_stack([ours, np.einsum("ij,ij->i", ours, ours), np.ones(len(ours))])
    right = np.column_stack([-2 * theirs, np.ones(len(theirs)), np.einsum("ij,ij->i", theirs, theirs)])
    distance = np.empty((len(one), len(other)), dtype=np.float32)
    np.maximum(product(left, right.T), 0.0, out=distance, casting="same_kind")
    np.sqrt(distance, out=distance)
    alike = np.exp(-distance)
    distance += 1
    alike *= distance
    return alike


def product(one: Array, other: Array) -> Array:
    """`one @ other` in parts small enough for OpenBLAS to use only this thread: others would wait for busy cores."""
    rows = max(SINGLE_THREADED // max(other.size, 1), 16)
    found = np.empty((len(one), other.shape[1]))
    for first in range(0, len(one), rows):
        np.matmul(one[first : first + rows], other, out=found[first : first + rows])
    return found
