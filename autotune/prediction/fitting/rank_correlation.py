"""Spearman's rank correlation: the similarity of two orders."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def spearman(first: Floats, second: Floats) -> float | None:
    """Rank correlation with mid-ranks for ties; None: one of the two does not vary."""
    if first.size < 2:
        return None
    first_ranks, second_ranks = mid_ranks(first), mid_ranks(second)
    first_ranks, second_ranks = first_ranks - first_ranks.mean(), second_ranks - second_ranks.mean()
    norm = float(np.sqrt((first_ranks @ first_ranks) * (second_ranks @ second_ranks)))
    return float(first_ranks @ second_ranks) / norm if norm else None


def mid_ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    ordered, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    del ordered
    last = np.cumsum(counts)
    middles: Floats = last - (counts - 1) / 2
    return middles[inverse]
