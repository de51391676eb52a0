"""The score of a perfect predictor: the table's noise keeps it below 1."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.planning.depth import mid_ranks
from benchmarks.prediction.scoring.contract import Floats
from benchmarks.prediction.scoring.facts import Candidate, Facts, GroupKey
from benchmarks.prediction.scoring.ranking import timed_candidates

ASSUMED_NOISE = 0.01
"""Used if a source has too few repeats to estimate its noise."""
LEAST_REPEATED = 3
"""Minimum number of repeated configurations to estimate a source's noise."""
_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation."""
_DRAWS = 200
_ROUNDS = 10
_POINTS = 1000
_MOST = 1000
"""Maximum number of candidates per group that are considered."""
_LEAST_NOISE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Relative standard deviation of one measurement of throughput."""

    deviation: float
    repeated: int
    """Configurations with repeats that differ; exact equals count as one measurement."""
    assumed: bool
    """Whether there were too few of them for an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Expected scores in a group of a predictor that knows every configuration's true throughput."""

    predicted_best_share: float
    spearman: float | None


def noises(facts: Facts, assumed: float = ASSUMED_NOISE) -> dict[str, Noise]:
    """The noise of each source, estimated from configurations repeated within its groups."""
    residuals: dict[str, list[Floats]] = {source: [] for source in facts.sources()}
    for (source, _), candidates in facts.groups.items():
        for candidate in candidates:
            rates = _rates(facts, candidate)
            if rates.size > 1:
                # Bessel's correction, so that a pair counts as much as a longer series of repeats.
                residuals[source].append((rates - rates.mean()) * np.sqrt(rates.size / (rates.size - 1)))
    return {source: _noise(found, assumed) for source, found in residuals.items()}


def ceilings(facts: Facts, keys: Iterable[GroupKey], noise: Mapping[str, Noise], seed: int) -> dict[GroupKey, Ceiling]:
    """The ceiling of each of these groups."""
    return {
        key: group_ceiling(timed_candidates(facts.groups[key]), noise[key[0]].deviation, np.random.default_rng(seed))
        for key in keys
    }


def group_ceiling(timed: Sequence[Candidate], deviation: float, random: np.random.Generator) -> Ceiling:
    """Expected share and correlation of the truth, given the measurements.

    1. Log throughputs are y, each with normal noise: `deviation`, divided by the root of its repeats.
    2. The distribution of true values is estimated from y by expectation maximization on a grid, starting from a flat one
       [Kiefer and Wolfowitz 1956; Laird 1978]. It stops after a few rounds, since the limit consists of a few spikes.
    3. The true value of each configuration, given its y, is drawn 200 times from it.
    4. A perfect predictor picks each draw's largest: its share is the *measured* value of the pick over the best measured.

    On sweeps of 60 configurations with known truths and noise of 1 to 12 %, the mean share is within 0.01 of the truth's;
    if many configurations are within the noise of the top, up to 0.03 too high: the bound is too strict, never too lenient.
    """
    measured = np.log([candidate.rate for candidate in timed])
    noise = max(deviation, _LEAST_NOISE) / np.sqrt([candidate.repeats for candidate in timed])
    # In a very large group the fastest determine the share, and a sample the correlation.
    order = np.argsort(-measured, kind="stable")
    fastest, some = order[:_MOST], order if order.size <= _MOST else random.choice(order, _MOST, replace=False)
    draws = _draw_truths(measured[fastest], noise[fastest], random)
    shares = np.exp(measured[fastest][draws.argmax(axis=1)] - measured.max())
    if order.size > _MOST:
        draws = _draw_truths(measured[some], noise[some], random)
    return Ceiling(predicted_best_share=float(shares.mean()), spearman=_mean_correlation(draws, measured[some]))


def _draw_truths(measured: Floats, noise: Floats, random: np.random.Generator) -> Floats:
    """Draws (draw, candidate) of the true values, given the measured ones."""
    grid = _grid(measured, noise)
    likelihood = np.exp(-0.5 * ((measured[:, None] - grid) / noise[:, None]) ** 2)
    weights = np.gradient(grid)
    for _ in range(_ROUNDS):
        posterior = likelihood * weights
        posterior /= posterior.sum(axis=1, keepdims=True)
        weights = posterior.mean(axis=0)
    posterior = (likelihood * weights).cumsum(axis=1)
    levels = random.random((len(measured), _DRAWS)) * posterior[:, -1:]
    places = [np.searchsorted(row, level, side="right") for row, level in zip(posterior, levels, strict=True)]
    # Draws on the same grid point are ties, which are broken at random.
    return grid[np.minimum(places, grid.size - 1)].T + _LEAST_NOISE * random.standard_normal((_DRAWS, len(measured)))


def _grid(measured: Floats, noise: Floats) -> Floats:
    """Possible true values: around every measured value, four deviations to either side."""
    points = np.unique(measured[:, None] + noise[:, None] * np.linspace(-4, 4, 33))
    return points[:: -(-points.size // _POINTS)]


def _mean_correlation(draws: Floats, measured: Floats) -> float | None:
    # Without ties in the draws, ranks are the inverse of the order.
    ranks = draws.argsort(axis=1).argsort(axis=1).astype(np.float64)
    ranks -= ranks.mean(axis=1, keepdims=True)
    others = mid_ranks(measured) - (len(measured) + 1) / 2
    norms = np.sqrt((ranks**2).sum(axis=1) * (others @ others))
    return float(np.mean(ranks @ others / norms)) if norms.all() else None


def _rates(facts: Facts, candidate: Candidate) -> Floats:
    positions = [position for position in candidate.rows if np.isfinite(facts.seconds[position])]
    return np.unique(np.log(facts.work[positions] / facts.seconds[positions]))


def _noise(residuals: Sequence[Floats], assumed: float) -> Noise:
    if len(residuals) < LEAST_REPEATED:
        return Noise(deviation=assumed, repeated=len(residuals), assumed=True)
    pooled = _TO_DEVIATION * float(np.median(np.abs(np.concatenate(residuals))))
    return Noise(deviation=pooled, repeated=len(residuals), assumed=False)
