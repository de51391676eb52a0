"""The `guided` strategy: the candidates with the best predictions, corrected by each trial."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.objective.ranking import rate
from autotune.strategies.guided.acquisition import choose, outlook
from autotune.strategies.guided.described import CandidatePool, CandidatePools, Forecaster, Guide, joined
from autotune.strategies.guided.observations import Flags, Observations, Value, observe, select_informative
from autotune.strategies.strategy import Candidates, LeastMemory, Outlook, Score, Strategy, known_hashes
from autotune.strategies.walks import RandomStrategy
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

MIN_MEASURED = 4
"""Number of measured trials after which knobs that no equation distinguishes are tuned around the best."""


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
    3. After `MIN_MEASURED` measured rates, moves around the best join the candidates: knobs that the pool keeps fixed.
    4. Choose (`choose`).

    The seed matters only after all of the pool was tried: nothing else is random.
    """

    seeded = False

    def __init__(self, score: Score, forecaster: Forecaster, value: Value = rate) -> None:
        """`score`: None for a trial that cannot win; `value`: the maximised value, which the forecaster predicts."""
        self._score, self._value = score, value
        self._random = RandomStrategy()
        self._first = forecaster
        self._pools = CandidatePools(forecaster)

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
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
        if len(scores) < MIN_MEASURED:
            return ()
        best = max(informative_trials, key=lambda trial: scores.get(trial.number, -np.inf))
        return forecaster.around(best.config, float(np.log(rate(best))))


def make_guided(score: Score, guide: Guide) -> GuidedStrategy:
    """Create the strategy; called by the registry."""
    return GuidedStrategy(score, guide.forecaster, guide.value)
