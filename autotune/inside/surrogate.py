"""What a search inside a run knows of its settings: a normal distribution of the times of steps of all of them."""

import itertools
import math
import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.inside.space import RunKnob, RunSpace, Setting

Array = NDArray[np.float64]
INTERACTION = 0.02
"""Standard deviation of a setting's logarithm of time beyond the sum of its knobs' effects."""
BLOCK = 0.005
"""Least standard deviation of a block of steps, however long it is."""
DRIFT_PER_STEP = 2e-3
"""Standard deviation of the change of the machine's speed from one step to the next."""
JUMP = 0.3
"""Standard deviation of a sudden change of the machine's speed."""
CARRIED = ((0.0, 0.0), (0.5, 3.0), (1.0, -3.0))
"""Correlation of the effects before a drift with those after it -> logarithm of its weight: other work, similar work, another
speed of the machine. The middle one holds until measurements contradict it."""
NODES = np.array([statistics.NormalDist().inv_cdf((2 * number + 1) / 18) for number in range(9)])
"""Equally likely values of a standard normal variable."""


@dataclass(frozen=True, slots=True)
class Block:
    """Steps with one setting in a row."""

    setting: Setting
    at: float
    """The step in its middle."""
    log_seconds: float
    variance: float
    """Of its mean, from the noise of its steps."""
    epoch: int
    """Number of drifts before it: each may have changed the effects of knobs, and has changed the machine's speed."""


class Surrogate:
    """The distribution of the logarithm of the time of a step with each setting, relative to each other.

    log seconds of a block = speed of the machine + effects of the knobs' values + interaction of the setting + noise. All are
    normal a priori (a larger micro-batch and less recomputation are expected to be faster), so that the posterior is a Gaussian
    process's [Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.22 to 2.24 and 2.30]. The
    speed is a random walk; effects of an ordered knob are one too, whose increments are correlated. So each block informs about
    all settings that share a value with its own.
    """

    def __init__(self, space: RunSpace) -> None:
        self.settings: list[Setting] = [*itertools.product(*(knob.values for knob in space.knobs))]
        self.index = {setting: number for number, setting in enumerate(self.settings)}
        self._positions = np.array(
            [[knob.values.index(value) for knob, value in zip(space.knobs, setting, strict=True)] for setting in self.settings]
        )
        self._effects = [_covariance(knob) for knob in space.knobs]
        self.blocks: list[Block] = []
        self._variances = np.full(len(self.settings), INTERACTION**2)
        for knob, effect in enumerate(self._effects):
            self._variances += np.diag(effect)[self._positions[:, knob]]
        self._cross, self._inverse = np.zeros((len(self.settings), 0)), np.zeros((0, 0))
        self._level = self._weights = np.zeros(0)
        self._prior = self._positions @ np.array([knob.trend for knob in space.knobs])
        """Mean logarithm of the time of each setting before any step."""
        self.mean = self._prior
        self._carried: list[float] = []
        """Of each drift, the member of `CARRIED` that its measurements support most."""

    def _kernel(self, first: NDArray[np.intp], second: NDArray[np.intp]) -> Array:
        """Prior covariance of settings, of shape (first, second)."""
        positions = self._positions
        kernel: Array = INTERACTION**2 * (first[:, None] == second[None, :])
        for knob, effect in enumerate(self._effects):
            kernel = kernel + effect[np.ix_(positions[first, knob], positions[second, knob])]
        return kernel

    def condition(self) -> None:
        """Compute the posterior from all blocks."""
        blocks = self.blocks
        rows = np.array([self.index[block.setting] for block in blocks], dtype=np.intp)
        at = np.array([block.at for block in blocks])
        epochs = np.array([block.epoch for block in blocks], dtype=np.intp)
        kernel = self._kernel(rows, rows)
        speed = DRIFT_PER_STEP**2 * np.minimum(at[:, None], at) + JUMP**2 * (1.0 + np.minimum(epochs[:, None], epochs))
        self._level = DRIFT_PER_STEP**2 * at + JUMP**2 * (1.0 + epochs)
        noise = np.diag([block.variance + BLOCK**2 for block in blocks])
        values = np.array([block.log_seconds for block in blocks])
        values = values - values[0] - (self._prior[rows] - self._prior[rows[0]])
        last, best = int(epochs[-1]), -math.inf
        earlier = self._carried[: last - 1] if last else []
        for carried, weight in CARRIED if last else ((1.0, 0.0),):
            chain = [*earlier, carried][:last]
            products = np.array([[math.prod(chain[min(a, b) : max(a, b)]) for b in range(last + 1)] for a in range(last + 1)])
            fade = products[np.ix_(epochs, epochs)]
            triangle = np.linalg.cholesky(kernel * fade + speed + noise)
            solved = np.linalg.solve(triangle, values)
            evidence = -float(solved @ solved) / 2 - float(np.log(np.diag(triangle)).sum()) + weight
            if evidence > best:
                best, self._carried = evidence, chain
                inverse = np.linalg.inv(triangle)
                self._inverse, self._fade = inverse.T @ inverse, fade[-1]
        self._weights = self._inverse @ values
        self._cross = self._kernel(np.arange(len(self.settings)), rows) * self._fade
        self.mean = self._prior + self._cross @ self._weights

    def covariance(self, settings: NDArray[np.intp]) -> Array:
        """Posterior covariance of settings, and in the last row and column of the machine's present speed."""
        prior = np.zeros((len(settings) + 1, len(settings) + 1))
        prior[:-1, :-1] = self._kernel(settings, settings)
        prior[-1, -1] = self._level[-1]
        cross = np.vstack([self._cross[settings], self._level])
        covariance: Array = prior - cross @ self._inverse @ cross.T
        return covariance

    def expected_gains(self, means: Array, covariance: Array, variance: float) -> Array:
        """By how much the least mean is expected to fall after a block of each setting with this variance of its mean.

        `covariance` is that of the settings, as `covariance` returns it. A block shows the sum of its setting and the speed.
        """
        shared = covariance[:-1, :-1] + covariance[:-1, -1]
        total = np.diag(covariance)[:-1] + 2 * covariance[:-1, -1] + covariance[-1, -1]
        reach = shared / np.sqrt(total + variance + BLOCK**2)[:, None]
        gains: Array = means.min() - (means[None, :, None] + reach[:, :, None] * NODES).min(axis=1).mean(axis=1)
        return gains

    def difference(self, setting: Setting, other: Setting) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of the ratio of times of the first to the second."""
        pair = np.array([self.index[setting], self.index[other]])
        covariance = self.covariance(pair)
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return float(self.mean[pair[0]] - self.mean[pair[1]]), math.sqrt(max(float(variance), 1e-12))

    def deviations(self, incumbent: Setting) -> Array:
        """Standard deviation of the difference of each setting to the incumbent."""
        mine = self.index[incumbent]
        every = np.arange(len(self.settings))
        contrast = self._cross - self._cross[mine]
        prior = self._variances + self._variances[mine] - 2 * self._kernel(every, np.array([mine]))[:, 0]
        variances: Array = prior - np.einsum("ij,jk,ik->i", contrast, self._inverse, contrast)
        return np.sqrt(np.maximum(variances, 0.0))


def _covariance(knob: RunKnob) -> Array:
    """Prior covariance of the effects of a knob's values: neighbours differ by `knob.effect`."""
    count = len(knob.values)
    if not knob.ordered:
        return knob.effect**2 / 2 * np.eye(count)
    steps = np.arange(count - 1)
    increments = knob.effect**2 * 0.6 ** np.abs(steps[:, None] - steps)
    sums = np.tril(np.ones((count, count - 1)), -1)
    covariance: Array = sums @ increments @ sums.T
    return covariance
