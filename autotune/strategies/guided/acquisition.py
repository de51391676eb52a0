"""Which candidates are worth the next trials: expected improvement for a second of trial, times the chance that it runs."""

import numpy as np

from autotune.objective.normal import density, probability_below
from autotune.strategies.guided.described import Array, Described, Index, joined
from autotune.strategies.guided.feasibility import Feasibility
from autotune.strategies.guided.observations import Flags, Observations
from autotune.strategies.guided.surrogate import Surrogate
from autotune.strategies.guided.trial_cost import with_moves

LEAST_GAIN = 0.02
"""Expected improvement, as a share of the best, below which the most probable winner is taken: gains so small are mostly what
is not known of candidates far away, not what is known to be good."""
SURELY = 2.0
"""Standard deviations above what is expected, beyond which nothing is hoped for."""
LIKELY = 0.5
"""Candidates that run less probably are tried when no others are left."""
REACHED = 200_000
"""Of more candidates those are looked at whose rate, without what trials nearby say of it, is expected to be highest."""
LOOKED = 512
"""Candidates of which it is told first how near they are to trials that failed."""
CONSIDERED = 20_000
"""Candidates whose spread is computed, and that are held against each trial that ran out of memory."""


def choose(
    pool: Described,
    told: Observations,
    open_: Flags,
    count: int,
    running: Described | None = None,
    besides: Described | None = None,
) -> list[int]:
    """Return up to `count` places that are worth a trial, the best first; places beyond the pool's are those of `besides`.

    1. What runs is taken to end as it is expected to [kriging believer: Ginsbourger 2010], and so is each choice for the next.
    2. Before anything ran: the highest expected rate times the chance to run.
    3. Then expected improvement [Mockus 1975; Jones 1998] times that chance, for each second of trial, while it is worth
       something anywhere; else again the highest expected rate times the chance, and every second time only of those that a
       trial could tell from the best: what is ahead by less than a trial's noise, at its best, wins by luck. (But neighbours
       that seem to be equal may also differ by what nobody has thought of, which is found by trying them.)

    Args:
        pool: the candidates.
        told: what trials told.
        open_: (n + k,) which candidates, and then which of those besides, may be chosen.
        count: how many are wanted.
        running: what is wanted or running.
        besides: k further candidates.
    """
    chosen: list[int] = []
    free = open_.copy()
    # What is only believed to run tells nothing of memory.
    feasibility = Feasibility(told)
    if running is not None and len(running):
        told = told.believing(running, Surrogate(told).mean(running))
    while len(chosen) < count and free.any():
        belief = Surrogate(told)
        places, asked = _considered(pool, belief, feasibility, np.flatnonzero(free[: len(pool)]))
        if besides is not None:
            more = np.flatnonzero(free[len(pool) :])
            places, asked = np.concatenate([places, len(pool) + more]), joined(asked, besides.take(more))
        mean, spread = belief.mean_and_spread(asked)
        apart = _told_apart(asked, mean, spread, belief) if len(told) % 2 else np.ones(len(asked), dtype=bool)
        first = _first(asked, mean, spread, apart, with_moves(asked, told.last_mesh), belief.best, feasibility)
        chosen.append(int(places[first]))
        free[chosen[-1]] = False
        told = told.believing(asked.take(np.array([first])), mean[first : first + 1])
    return chosen


def _considered(pool: Described, belief: Surrogate, feasibility: Feasibility, free: Index) -> tuple[Index, Described]:
    """The most promising of the free candidates, with their places; all where they are few."""
    if len(free) <= CONSIDERED:
        return free, pool.take(free)
    trend = belief.trend(pool)[free]
    free = free[_highest(trend, REACHED)]
    asked = pool.take(free)
    runs = feasibility.quick_probability(asked)
    near = _highest(belief.mean(asked) + np.log(np.maximum(runs, 1e-12)), CONSIDERED)
    return free[near], asked.take(near)


def _told_apart(asked: Described, mean: Array, spread: Array, belief: Surrogate) -> Flags:
    """Which candidates a trial could find to be better than the best; all where nothing won yet, or no noise was told."""
    if not belief.has_best or not belief.trial_noise:
        return np.ones(len(asked), dtype=bool)
    ahead, unsure = belief.ahead(asked, mean, spread)
    found: Flags = ahead + SURELY * unsure > belief.trial_noise
    return found


def _first(
    asked: Described, mean: Array, spread: Array, apart: Flags, seconds: Array, best: float, feasibility: Feasibility
) -> int:
    """Place of the highest worth.

    Failures of unknown cause only lower it, and are dear to tell: they are told of the most promising, and of more until what
    the others are worth at most is less.
    """
    cost, fits = seconds / seconds.min(), feasibility.fits(asked)
    at_most = worth(mean, spread, apart, fits, cost, best)
    order, looked = np.argsort(-at_most, kind="stable"), LOOKED
    while True:
        index = np.sort(order[:looked])
        runs = fits[index] * (1 - feasibility.failing(asked.take(index)))
        found = worth(mean[index], spread[index], apart[index], runs, cost[index], best)
        first = int(found.argmax())
        if looked >= len(order) or found[first] > at_most[order[looked]]:
            return int(index[first])
        looked *= 4


def worth(mean: Array, spread: Array, apart: Flags, runs: Array, cost: Array, best: float) -> Array:
    """(n,) The order in which candidates are tried: higher is sooner.

    Args:
        mean, spread: of the logarithm of each one's rate.
        apart: whether a trial could tell it from the best.
        runs: the chance to run.
        cost: of a trial, the cheapest being 1.
        best: logarithm of the best rate.
    """
    chance = np.log(np.maximum(runs, 1e-12))
    order = np.where(apart, mean, mean - 50) + chance
    if np.isfinite(best):
        gain = expected_gain(mean, spread, best) * runs
        # Twenty: beyond all that rates can differ by.
        order = np.where(gain > LEAST_GAIN, 20 + np.log(np.maximum(gain, 1e-12)) - np.log(cost), order)
    told: Array = np.where(runs < LIKELY, order - 100 + chance, order)
    return told


def expected_gain(mean: Array, spread: Array, best: float) -> Array:
    """(n,) Expected improvement over the best, as a share of it: logarithms are near enough to shares."""
    ahead = (mean - best) / spread
    told: Array = spread * (ahead * probability_below(ahead) + density(ahead))
    return told


def _highest(values: Array, count: int) -> Index:
    """Places of the highest values, in the order of the places, so that equals stay in theirs."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count - 1)[:count])
