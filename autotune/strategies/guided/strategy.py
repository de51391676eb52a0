"""The `guided` strategy: the candidates that are predicted best, corrected by each trial."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.objective.ranking import rate
from autotune.strategies.guided.acquisition import choose
from autotune.strategies.guided.described import Forecaster, Guide, Pool, Pools, joined
from autotune.strategies.guided.observations import Flags, Observations, Value, speaking, told_by
from autotune.strategies.guided.outlook import outlook
from autotune.strategies.random import RandomStrategy
from autotune.strategies.strategy import Candidates, LeastMemory, Outlook, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

SETTLED = 4
"""Measured trials after which what no equation tells apart is tried around the best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """What can be chosen from, and what is known."""

    pool: Pool
    told: Observations
    around: Sequence[TrialConfig]
    open_: Flags
    """(n + k,) Of the pool and of those around the best, which were not tried."""


class GuidedStrategy(Strategy):
    """Chooses by expected improvement over predictions that the trials so far correct.

    1. Describe every candidate once: predicted rate, memory by tag, features (`Forecaster.pool`).
    2. Fit the equations' coefficients to the trials (`Forecaster.after`). Learn the residuals of rates (`Surrogate`) and of
       memory (`Feasibility`).
    3. Once there are `SETTLED` rates, moves around the best join the candidates: knobs that the pool leaves where they stand.
    4. Choose (`choose`).

    The seed decides nothing but what is tried when all of the pool was: there is nothing to draw.
    """

    seeded = False

    def __init__(self, score: Score, forecaster: Forecaster, value: Value = rate) -> None:
        """`score`: None for a trial that may not win; `value`: what is made the most of, which the forecaster predicts."""
        self._score, self._value = score, value
        self._random = RandomStrategy()
        self._first = forecaster
        self._pools = Pools(forecaster)

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
            pool.described, options.told, options.open_, count,
            running=forecaster.describe(pending) if pending else None,
            besides=forecaster.describe(options.around) if options.around else None,
        )  # fmt: skip
        first = len(pool.described)
        configs = [pool.config(place) if place < first else options.around[place - first] for place in chosen]
        # What a pool leaves out of a large space is tried when nothing else is left.
        left = count - len(configs)
        return configs + (self._random.propose(candidates, history, [*pending, *configs], left, seed) if left else [])

    def outlook(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], margin: float
    ) -> Outlook | None:
        forecaster = self._first.after(history)
        options = self._options(forecaster, candidates, history, pending)
        described = options.pool.described
        if options.around:
            described = joined(described, forecaster.describe(options.around))
        return outlook(described, options.told, options.open_, margin)

    def least_memory(self, candidates: Candidates) -> LeastMemory | None:
        pool = self._pool(self._first, candidates)
        if not len(pool.described):
            return None
        place = int((pool.described.needed / pool.described.room).argmin())
        needed, room = float(pool.described.needed[place]), float(pool.described.room[place])
        return LeastMemory(config=pool.config(place), needed=needed, room=room)

    def _pool(self, forecaster: Forecaster, candidates: Candidates) -> Pool:
        if self._pools.forecaster is not forecaster:
            self._pools = Pools(forecaster)
        return self._pools.of(candidates)

    def _options(
        self, forecaster: Forecaster, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig]
    ) -> "_Options":
        pool = self._pool(forecaster, candidates)
        spoken = speaking(history)
        known = known_hashes(history, pending)
        around = [config for config in self._around(forecaster, spoken) if config.hash not in known]
        around = [config for config, place in zip(around, pool.places(around), strict=True) if place < 0]
        open_ = np.ones(len(pool.described) + len(around), dtype=bool)
        tried = pool.places([*(trial.config for trial in history), *pending])
        open_[tried[tried >= 0]] = False
        return _Options(pool=pool, told=self._told(forecaster, spoken), around=around, open_=open_)

    def _told(self, forecaster: Forecaster, spoken: Sequence[TrialRecord]) -> Observations:
        described = forecaster.describe([trial.config for trial in spoken])
        return told_by(spoken, described, self._value, self._score)

    def _around(self, forecaster: Forecaster, spoken: Sequence[TrialRecord]) -> Sequence[TrialConfig]:
        """Moves that no equation tells apart, around the best, once enough is measured to know about where it is."""
        scores = {trial.number: score for trial in spoken if (score := self._score(trial)) is not None}
        if len(scores) < SETTLED:
            return ()
        best = max(spoken, key=lambda trial: scores.get(trial.number, -np.inf))
        return forecaster.around(best.config, float(np.log(rate(best))))


def make_guided(score: Score, guide: Guide) -> GuidedStrategy:
    """What the registry calls."""
    return GuidedStrategy(score, guide.forecaster, guide.value)
