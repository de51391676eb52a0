"""What fits: the probability that memory suffices, and the required one, on the device and in its node.

log(measured / predicted bytes) has Student's distribution with two degrees of freedom, scaled so that its 90 % band is that
of a normal distribution with the calibrated spread. (Stated bands are wider by `memory_tail`: sources also differ in what
they call memory.) Memory is usually as predicted within a few per cent, but a few configurations in a hundred are off by a
third, which a normal distribution would call impossible: on published sweeps left out of the fit, the log loss of its
verdicts is 0.100, and 0.072 with this one.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.errors import RequestError
from autotune.prediction.equations.cases import Array
from autotune.prediction.planning.question import Question
from search_spaces.clusters.cluster import ClusterSpec

PROBABILITY = 0.95
"""Required probability that a plan fits: the upper edge of its 90 % band equals the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Upper limits of predicted bytes. A prediction is the median of measurements (`fit_probability`)."""

    device: float
    """Per rank, on the device."""
    host: float
    """Per rank, in its node's main memory."""

    def holds(self, device: Array, host: Array) -> NDArray[np.bool_]:
        """Which predictions are within the limits."""
        within: NDArray[np.bool_] = (device <= self.device) & (host <= self.host)
        return within


def memory_limits_of(question: Question, probability: float = PROBABILITY) -> MemoryLimits:
    """The largest predictions that fit with that probability.

    Raises:
        RequestError: the probability is invalid.
    """
    if not 0.0 < probability < 1.0:
        raise RequestError("fit_probability", f"{probability} is not between 0 and 1", f"give a share such as {PROBABILITY}")
    factor = math.exp(margin_of(probability) * question.rates.memory_spread)
    cluster = question.cluster
    return MemoryLimits(
        device=cluster.device.memory_bytes / factor, host=cluster.host_memory_bytes / ranks_of_node(cluster) / factor
    )


def chance_to_fit(question: Question, device_bytes: float, host_bytes: float) -> float:
    """The probability that neither a rank's device nor its share of the node's main memory runs out."""
    cluster = question.cluster
    available = np.array([cluster.device.memory_bytes, cluster.host_memory_bytes / ranks_of_node(cluster)])
    needed = np.maximum(np.array([device_bytes, host_bytes]), 1.0)
    return float(fit_probability(needed, available, question.rates.memory_spread).min())


def ranks_of_node(cluster: ClusterSpec) -> int:
    """Ranks that share a node's main memory."""
    return min(cluster.devices_per_node, cluster.world_size)


_EDGE = 2.9199856 / 1.6448536
"""Upper edge of the 90 % band, Student's over the normal's."""


def fit_probability(needed: Array, available: Array, spread: Array | float) -> Array:
    """(n,) P(measured bytes <= available).

    Args:
        needed: predicted bytes, above 0.
        available: available bytes.
        spread: of the logarithm of measured / predicted bytes.
    """
    return probability_within(np.log(available / needed) / spread)


def probability_within(margin: Array) -> Array:
    """(n,) The same of the margin, log(available / needed), in spreads."""
    scaled = margin * _EDGE
    probability: Array = 0.5 + scaled / (2 * np.sqrt(2 + scaled**2))
    return probability


def margin_of(probability: float) -> float:
    """The margin, in spreads, at which memory suffices with this probability: the inverse of `probability_within`."""
    return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability))) / _EDGE
