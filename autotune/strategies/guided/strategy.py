"""Guided search: the candidate of the largest expected improvement per second of trial; trials correct its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.objective.posterior import density, probability_below
from autotune.objective.ranking import rate
from autotune.strategies.guided.described import (
    Array,
    CandidatePool,
    CandidatePools,
    Described,
    Flags,
    Forecaster,
    Guide,
    Index,
    Observations,
    joined,
    observe,
    select_informative,
)
from autotune.strategies.guided.surrogate import Feasibility, Surrogate
from autotune.strategies.strategy import Candidates, LeastMemory, Outlook, Score, Strategy, known_hashes
from autotune.strategies.walks import RandomStrategy
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

PRESELECTED = 200_000
"""Of more candidates, only this many are considered: those with the highest expected rate, ignoring nearby trials."""
CONSIDERED = 20_000
"""Number of candidates whose spread is computed and that are compared with each trial that ran out of memory."""


def choose(
    pool: Described,
    observations: Observations,
    available: Flags,
    count: int,
    running: Described | None = None,
    extra: Described | None = None,
) -> list[int]:
    """Return up to `count` positions worth a trial, best first; positions beyond the pool's are those of `extra`.

    1. A running trial is assumed to end as expected [kriging believer: Ginsbourger 2010]; so is each choice, for the next one.
    2. Before any trial has run: the highest expected rate times the probability to run.
    3. Then expected improvement [Mockus 1975; Jones 1998] times that probability, per second of trial, while any candidate
       exceeds 2 % of the best. Otherwise again the highest expected rate times a power of the probability that falls with the
       number of trials: likely winners with doubtful memory get their trial, only hopeless ones none. Every
       second time only candidates that a trial could distinguish from the best: one that leads by less than a trial's noise,
       at its best, wins by luck. (But apparently equal neighbours may also differ for unmodelled reasons, which only a trial
       can reveal.)

    Args:
        pool: the candidates.
        observations: results of the trials so far.
        available: (n + k,) which of the candidates, then of `extra`, may be chosen.
        count: how many are wanted.
        running: pending configurations.
        extra: k further candidates.
    """
    chosen: list[int] = []
    free = available.copy()
    # A trial that is only assumed to run provides no information about memory.
    feasibility = Feasibility(observations)
    if running is not None and len(running):
        observations = observations.with_assumed(running, Surrogate(observations).mean(running))
    while len(chosen) < count and free.any():
        surrogate = Surrogate(observations)
        positions, considered = _considered(pool, surrogate, feasibility, np.flatnonzero(free[: len(pool)]))
        if extra is not None:
            more = np.flatnonzero(free[len(pool) :])
            positions, considered = np.concatenate([positions, len(pool) + more]), joined(considered, extra.take(more))
        mean, spread = surrogate.mean_and_spread(considered)
        distinguishable = (
            _distinguishable(considered, mean, spread, surrogate)
            if len(observations) % 2
            else np.ones(len(considered), dtype=bool)
        )
        bar = _Bar(best=surrogate.best, trials=len(observations))
        first = _first(
            considered, mean, spread, distinguishable, with_moves(considered, observations.last_mesh), bar, feasibility
        )
        chosen.append(int(positions[first]))
        free[chosen[-1]] = False
        observations = observations.with_assumed(considered.take(np.array([first])), mean[first : first + 1])
    return chosen


def _considered(pool: Described, surrogate: Surrogate, feasibility: Feasibility, free: Index) -> tuple[Index, Described]:
    """Return the most promising free candidates with their positions; all of them if there are few."""
    if len(free) <= CONSIDERED:
        return free, pool.take(free)
    trend = surrogate.trend(pool)[free]
    free = free[_highest(trend, PRESELECTED)]
    preselected = pool.take(free)
    runs = feasibility.quick_probability(preselected)
    most_promising = _highest(surrogate.mean(preselected) + np.log(np.maximum(runs, 1e-12)), CONSIDERED)
    return free[most_promising], preselected.take(most_promising)


def _distinguishable(candidates: Described, mean: Array, spread: Array, surrogate: Surrogate) -> Flags:
    """Which candidates a trial could find to be better than the best; all if nothing has won yet or the noise is unknown."""
    if not surrogate.has_best or not surrogate.trial_noise:
        return np.ones(len(candidates), dtype=bool)
    ahead, unsure = surrogate.ahead(candidates, mean, spread)
    # The most optimistic outcome of a candidate is two standard deviations above the mean.
    flags: Flags = ahead + 2.0 * unsure > surrogate.trial_noise
    return flags


def _first(
    candidates: Described,
    mean: Array,
    spread: Array,
    distinguishable: Flags,
    seconds: Array,
    bar: "_Bar",
    feasibility: Feasibility,
) -> int:
    """Position of the candidate with the highest worth.

    Failures of unknown cause only lower the worth and are expensive to compute. They are computed for the most promising
    candidates, then for more until the upper bound of the rest is lower than the best found.
    """
    cost, fits = seconds / seconds.min(), feasibility.fits(candidates)
    at_most = worth(mean, spread, distinguishable, fits, cost, bar)
    order, size = np.argsort(-at_most, kind="stable"), 512
    while True:
        index = np.sort(order[:size])
        runs = fits[index] * (1 - feasibility.failing(candidates.take(index)))
        worths = worth(mean[index], spread[index], distinguishable[index], runs, cost[index], bar)
        first = int(worths.argmax())
        if size >= len(order) or worths[first] > at_most[order[size]]:
            return int(index[first])
        size *= 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """What a candidate is compared with."""

    best: float
    """Logarithm of the best rate; -inf: there is none."""
    trials: int
    """Number of trials so far."""


def worth(mean: Array, spread: Array, distinguishable: Flags, runs: Array, cost: Array, bar: _Bar) -> Array:
    """(n,) Worth by which candidates are ordered: higher is tried sooner.

    Args:
        mean, spread: of the logarithm of each candidate's rate.
        distinguishable: whether a trial could distinguish it from the best.
        runs: the probability to run.
        cost: of a trial, relative to the cheapest.
        bar: the best so far.
    """
    chance = np.log(np.maximum(runs, 1e-12))
    # Number of trials after which, if none is expected to gain, the probability to run counts half as much as before any trial:
    # a doubtful verdict may cost a trial, but must not hide a winner for good.
    doubt = 1 / (1 + (bar.trials / 2.0) ** 2) if np.isfinite(bar.best) else 1.0
    order = np.where(distinguishable, mean, mean - 50) + doubt * chance
    if np.isfinite(bar.best):
        gain = expected_gain(mean, spread, bar.best) * runs
        # 20 exceeds any difference between logarithms of rates.
        # Expected improvement, as a share of the best, below which the most probable winner is taken: smaller gains mostly
        # reflect uncertainty about distant candidates, not candidates known to be good.
        order = np.where(gain > 0.02, 20 + np.log(np.maximum(gain, 1e-12)) - np.log(cost), order)
    # Candidates that are less likely to run are tried only if no others are left.
    worths: Array = np.where(runs < 0.01, order - 100 + chance, order)
    return worths


def expected_gain(mean: Array, spread: Array, best: float) -> Array:
    """(n,) Expected improvement over the best as a share of it; differences of logarithms approximate shares."""
    ahead = (mean - best) / spread
    gain: Array = spread * (ahead * probability_below(ahead) + density(ahead))
    return gain


def _highest(values: Array, count: int) -> Index:
    """Positions of the highest values, in ascending order, so that ties keep their order."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count - 1)[:count])


def outlook(pool: Described, observations: Observations, available: Flags, margin: float) -> Outlook | None:
    """What the untried candidates may gain; None: no trial that can win was measured.

    1. Expected gain: the largest expected improvement times the probability to run, as a share of the best.
    2. Probability that any candidate is faster than the best by more than `margin`: rates of the `TOGETHER` most promising
       are drawn from their joint distribution, since neighbours are correlated; whether each runs is drawn independently.
       For all others the probabilities are summed.
    """
    surrogate, feasibility = Surrogate(observations), Feasibility(observations)
    free = np.flatnonzero(available)
    if not np.isfinite(surrogate.best):
        return None
    if not len(free):
        return Outlook(expected_gain=0.0, chance_of_more=0.0, margin=margin, trial_seconds=0.0)
    candidates = pool.take(free)
    mean, spread = surrogate.mean_and_spread(candidates)
    runs = feasibility.probability(candidates) if len(free) <= CONSIDERED else feasibility.quick_probability(candidates)
    gains = expected_gain(mean, spread, surrogate.best) * runs
    chances = runs * _above(mean, spread, surrogate.best + np.log1p(margin))
    # Number of candidates whose rates are drawn jointly: those most likely to be the best.
    likeliest = np.argsort(-chances, kind="stable")[:400]
    other_chances = float(np.delete(chances, likeliest).sum())
    drawn = _any_above(surrogate, candidates.take(likeliest), runs[likeliest], surrogate.best + float(np.log1p(margin)))
    return Outlook(
        expected_gain=float(gains.max()),
        chance_of_more=min(drawn + other_chances, 1.0),
        margin=margin,
        trial_seconds=float(with_moves(candidates, observations.last_mesh)[int(gains.argmax())]),
    )


def _above(mean: Array, spread: Array, bar: float) -> Array:
    return probability_below((mean - bar) / spread)


def _any_above(surrogate: Surrogate, candidates: Described, runs: Array, bar: float) -> float:
    mean, covariance = surrogate.joint(candidates)
    random = np.random.default_rng(0)
    # Eigenvalues that rounding made negative are set to 0.
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    draws = 2_000
    drawn = mean + random.standard_normal((draws, len(mean))) @ root.T
    fits = random.random((draws, len(mean))) < runs
    return float(((drawn > bar) & fits).any(axis=1).mean())


REBUILD_SECONDS = 0.15
"""Seconds of a trial on warm ranks besides its steps [docs/results/trial-overhead.md]."""


def trial_seconds(step_seconds: Array, fidelity: Fidelity) -> Array:
    """(n,) Seconds of trials with these step times, for the minimum number of steps of a measurement."""
    timed = np.minimum(fidelity.min_steps * step_seconds, np.maximum(fidelity.max_seconds, step_seconds))
    # Untimed steps: warm-up, and the one whose memory is recorded.
    seconds: Array = REBUILD_SECONDS + 4 * step_seconds + timed
    return seconds


def with_moves(described: Described, last_mesh: int | None) -> Array:
    """(n,) The cost of each trial plus that of a mesh change after the previous trial."""
    if last_mesh is None:
        return described.cost
    # Process groups are rebuilt for other degrees than the previous trial's.
    seconds: Array = described.cost + 0.3 * (described.mesh != last_mesh)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """The candidates and the knowledge of them."""

    pool: CandidatePool
    observations: Observations
    around: Sequence[TrialConfig]
    available: Flags
    """(n + k,) Which of the pool, then of those around the best, are untried."""


class GuidedStrategy(Strategy):
    """Chooses by expected improvement over predictions that the trials so far correct.

    1. Describe every candidate once: predicted rate, memory by tag, features (`Forecaster.pool`).
    2. Fit the equations' coefficients to the trials (`Forecaster.after`). Learn the residuals of rates (`Surrogate`) and of
       memory (`Feasibility`).
    3. After four measured rates, moves around the best join the candidates: knobs that the pool keeps fixed.
    4. Choose (`choose`).

    The seed matters only after all of the pool was tried: nothing else is random.
    """

    def __init__(self, score: Score, guide: Guide) -> None:
        """`score`: None for a trial that cannot win."""
        self._score, self._value = score, guide.value
        self._random = RandomStrategy()
        self._first = guide.forecaster
        self._pools = CandidatePools(guide.forecaster)

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        forecaster = self._first.after(history)
        options = self._options(forecaster, candidates, history, pending)
        pool = options.pool
        chosen = choose(
            pool.described, options.observations, options.available, count,
            running=forecaster.describe(pending) if pending else None,
            extra=forecaster.describe(options.around) if options.around else None,
        )  # fmt: skip
        first = len(pool.described)
        configs = [pool.config(position) if position < first else options.around[position - first] for position in chosen]
        # What a pool drops from a large space is tried when nothing else is left.
        remaining = count - len(configs)
        return configs + (self._random.propose(candidates, history, [*pending, *configs], remaining, seed) if remaining else [])

    def outlook(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], margin: float
    ) -> Outlook | None:
        forecaster = self._first.after(history)
        options = self._options(forecaster, candidates, history, pending)
        described = options.pool.described
        if options.around:
            described = joined(described, forecaster.describe(options.around))
        return outlook(described, options.observations, options.available, margin)

    def least_memory(self, candidates: Candidates) -> LeastMemory | None:
        pool = self._pool(self._first, candidates)
        if not len(pool.described):
            return None
        position = int((pool.described.needed / pool.described.room).argmin())
        needed, room = float(pool.described.needed[position]), float(pool.described.room[position])
        return LeastMemory(config=pool.config(position), needed=needed, room=room)

    def _pool(self, forecaster: Forecaster, candidates: Candidates) -> CandidatePool:
        if self._pools.forecaster is not forecaster:
            self._pools = CandidatePools(forecaster)
        return self._pools.of(candidates)

    def _options(
        self, forecaster: Forecaster, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig]
    ) -> "_Options":
        pool = self._pool(forecaster, candidates)
        informative_trials = select_informative(history)
        hashes = known_hashes(history, pending)
        around = [config for config in self._around(forecaster, informative_trials) if config.hash not in hashes]
        around = [config for config, position in zip(around, pool.places(around), strict=True) if position < 0]
        available = np.ones(len(pool.described) + len(around), dtype=bool)
        tried = pool.places([*(trial.config for trial in history), *pending])
        available[tried[tried >= 0]] = False
        return _Options(
            pool=pool, observations=self._observe(forecaster, informative_trials), around=around, available=available
        )

    def _observe(self, forecaster: Forecaster, informative_trials: Sequence[TrialRecord]) -> Observations:
        described = forecaster.describe([trial.config for trial in informative_trials])
        return observe(informative_trials, described, self._value, self._score)

    def _around(self, forecaster: Forecaster, informative_trials: Sequence[TrialRecord]) -> Sequence[TrialConfig]:
        """Moves around the best that no equation distinguishes, once enough trials were measured to locate it."""
        scores = {trial.number: score for trial in informative_trials if (score := self._score(trial)) is not None}
        # Number of measured trials after which knobs that no equation distinguishes are tuned around the best.
        if len(scores) < 4:
            return ()
        best = max(informative_trials, key=lambda trial: scores.get(trial.number, -np.inf))
        return forecaster.around(best.config, float(np.log(rate(best))))
