"""How far a source is believed: by its contradictions to local measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.knowledge.measurement import Measurement
from autotune.knowledge.residuals import Index, Residuals, residuals_of
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients

Flags = NDArray[np.bool_]
SUSPECT = 0.5
"""A source with less weight is reported as contradicting, and nothing is learned from it."""
DISTORTED = 0.03
"""Prior probability that a quantity of a source is wrong by a common factor."""
FACTOR = 1.0
"""Standard deviation of the logarithm of that factor."""
_MOST = 150
"""Measurements of a source, and local ones, that are compared; more hardly change the result."""
_LEVEL = 1.0
"""Standard deviation of what all measurements have in common: the error of the equations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """Standard deviations of residuals, in logarithms."""

    stack: float
    """Between stacks of device and software."""
    protocol: float
    """Between sources that measure the same stack."""
    configuration: float
    """Between configurations far apart."""
    noise: float
    """Of one measurement, beside its own noise."""


_TIME = _Scales(stack=0.25, protocol=0.12, configuration=0.3, noise=0.08)
_MEMORY = _Scales(stack=0.2, protocol=0.08, configuration=0.2, noise=0.05)
MOST_EVIDENCE = 2.5
"""Most that one local measurement says for or against a source, as the logarithm of a likelihood ratio: it may be broken."""
_LENGTH = 8.0
"""Distance in features over which residuals are correlated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The comparison of one source with local measurements."""

    source: str
    measurements: int
    compared: int
    """Local measurements that it was compared with."""
    weight: float
    """Probability that it does not contradict them; 1 without local measurements."""
    time_ratio: float | None
    """Its times / those that local measurements make likely, geometric mean; None: not comparable."""
    memory_ratio: float | None

    @property
    def contradicts(self) -> bool:
        """Whether nothing is learned from it."""
        return self.weight < SUSPECT

    @property
    def text(self) -> str:
        """The comparison in a clause."""
        if not self.compared:
            return "nothing local to compare it with"
        ratios = [f"{name} {ratio:.2f} of local ones" for name, ratio in self._ratios() if ratio is not None]
        return f"{', '.join(ratios)}, by {self.compared} local measurement{'s' * (self.compared > 1)}"

    def _ratios(self) -> tuple[tuple[str, float | None], ...]:
        return ("times", self.time_ratio), ("peaks", self.memory_ratio)


def trust_in(measurements: Sequence[Measurement], local: Sequence[Measurement], rates: Coefficients) -> dict[str, Trust]:
    """Compare each source with local measurements.

    The logarithms of measured / predicted of both are one Gaussian process: with a part that all share, one for each device and
    software, one that changes with the configuration, and one for each protocol. Under the hypothesis that a quantity of the
    source is distorted, the protocols differ by a factor of any size (`FACTOR`). The weight is the posterior probability that
    neither time nor memory is distorted [Rasmussen and Williams 2006, 2.2; 5.2].

    Args:
        measurements: of any sources.
        local: measured by the user.
        rates: coefficients of the prediction; best those of a local calibration.
    """
    ours, _ = residuals_of(local, rates)
    ours = ours.take(_spread_places(len(ours)))
    sources: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        sources.setdefault(measurement.source, []).append(measurement)
    return {source: _trust(source, members, ours, rates) for source, members in sources.items()}


def weights_of(trust: Mapping[str, Trust]) -> dict[str, float]:
    """Source -> the weight of its measurements: 0 if it contradicts."""
    return {source: 0.0 if each.contradicts else each.weight for source, each in trust.items()}


def _trust(source: str, members: Sequence[Measurement], ours: Residuals, rates: Coefficients) -> Trust:
    theirs, _ = residuals_of(members, rates)
    theirs = theirs.take(_nearest(theirs, ours))
    time = _compared(theirs, ours, theirs.time, ours.time, _TIME)
    memory = _compared(theirs, ours, theirs.memory, ours.memory, _MEMORY)
    # Odds of each quantity against being distorted; the four cases of two quantities.
    odds = np.array([DISTORTED / (1 - DISTORTED) * np.exp(-np.clip(each.log_ratio, -50, 50)) for each in (time, memory)])
    weight = float(1 / np.prod(1 + odds))
    return Trust(
        source=source,
        measurements=len(members),
        compared=max(time.count, memory.count),
        weight=weight if max(time.count, memory.count) else 1.0,
        time_ratio=time.ratio,
        memory_ratio=memory.ratio,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    log_ratio: float
    """Logarithm of the likelihood of the local values if the quantity is not distorted / if it is."""
    ratio: float | None
    count: int


def _compared(theirs: Residuals, ours: Residuals, other: Array, own: Array, scales: _Scales) -> _Compared:
    at, here = np.flatnonzero(np.isfinite(other)), np.flatnonzero(np.isfinite(own))
    if not len(at) or not len(here):
        return _Compared(log_ratio=0.0, ratio=None, count=0)
    joined = Residuals(
        **{
            name: np.concatenate([getattr(theirs, name)[at], getattr(ours, name)[here]])
            for name in Residuals.__dataclass_fields__
        }
    )
    values = np.concatenate([_clipped(other[at]), _clipped(own[here])])
    foreign = np.arange(len(values)) < len(at)
    honest, distorted = (_conditional(joined, values, foreign, scales, extra) for extra in (0.0, FACTOR))
    error = values[~foreign] - honest.expected
    broken = _outlier_variance(error, honest.covariance)
    ratio = honest.log_likelihood(values[~foreign], broken) - distorted.log_likelihood(values[~foreign], broken)
    return _Compared(
        log_ratio=float(np.clip(ratio, -MOST_EVIDENCE * len(here), MOST_EVIDENCE * len(here))),
        ratio=float(np.exp(-np.median(error))),
        count=len(here),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Conditional:
    """The normal distribution of the local values, given those of the source."""

    expected: Array
    covariance: Array

    def log_likelihood(self, values: Array, further: Array) -> float:
        """Without the constant. `further`: variance of each value beyond the distribution's."""
        covariance = self.covariance + np.diag(further)
        error = values - self.expected
        return -0.5 * float(error @ np.linalg.solve(covariance, error) + np.linalg.slogdet(covariance)[1])


def _conditional(joined: Residuals, values: Array, foreign: Flags, scales: _Scales, extra: float) -> _Conditional:
    """`extra`: standard deviation of a common factor on the values of the source."""
    alike = (joined.stack[:, None] == joined.stack[None]).all(axis=2)
    covariance = _LEVEL**2 + scales.stack**2 * alike + scales.protocol**2 * (foreign[:, None] == foreign[None])
    covariance += scales.configuration**2 * _matern(joined.features)
    covariance += np.diag(scales.noise**2 + np.minimum(joined.noise, 1.0) ** 2)
    covariance += extra**2 * (foreign[:, None] & foreign[None])
    there, here = np.flatnonzero(foreign), np.flatnonzero(~foreign)
    gain = np.linalg.solve(covariance[np.ix_(there, there)], covariance[np.ix_(there, here)])
    left = covariance[np.ix_(here, here)] - covariance[np.ix_(here, there)] @ gain
    return _Conditional(expected=gain.T @ values[there], covariance=left)


def _outlier_variance(error: Array, covariance: Array) -> Array:
    """Further variance of values more than two standard deviations from the others: broken runs."""
    scale = np.diag(covariance)
    away: Array = (error - np.median(error)) ** 2
    further: Array = np.maximum(away / 4 - scale, 0.0)
    return further


def _matern(features: Array) -> Array:
    """Matérn 3/2 of the distances between rows."""
    squared = ((features[:, None] - features[None]) ** 2).sum(axis=2)
    distance = np.sqrt(squared) * np.sqrt(3) / _LENGTH
    alike: Array = (1 + distance) * np.exp(-distance)
    return alike


def _clipped(values: Array) -> Array:
    """Values beyond three typical deviations of their median are taken to there: broken runs are no contradiction."""
    centre = np.median(values)
    bound = 3 * max(1.4826 * float(np.median(np.abs(values - centre))), 0.1)
    return np.clip(values, centre - bound, centre + bound)


def _nearest(theirs: Residuals, ours: Residuals) -> Index:
    """The places that are compared: of many, those nearest to local measurements, on the same device and software first."""
    if len(theirs) <= _MOST or not len(ours):
        return _spread_places(len(theirs))
    distance = ((theirs.features[:, None] - ours.features[None]) ** 2).sum(axis=2)
    distance += 100.0 * ~(theirs.stack[:, None] == ours.stack[None]).all(axis=2)
    return np.sort(np.argsort(distance.min(axis=1), kind="stable")[:_MOST])


def _spread_places(count: int) -> Index:
    """At most `_MOST` of so many places, spread evenly."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, _MOST)).round().astype(np.int64))
        if count
        else np.empty(0, dtype=np.int64)
    )
