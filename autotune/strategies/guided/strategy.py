"""The `guided` strategy: the candidates that are predicted best, corrected by each trial."""

from collections.abc import Sequence

import numpy as np

from autotune.objective import rate
from autotune.strategies.guided.choose import choose
from autotune.strategies.guided.described import Forecaster, Pool
from autotune.strategies.guided.told import Told, Value, speaking, told_by
from autotune.strategies.random import RandomStrategy
from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

SETTLED = 4
"""Measured trials after which what no equation tells apart is tried around the best."""


class GuidedStrategy(Strategy):
    """Chooses by expected improvement over predictions that the trials so far correct.

    1. Describe every candidate once: predicted rate, memory by tag, features (`Forecaster.pool`).
    2. Learn from the trials what predictions leave over, of rates (`Belief`) and of memory (`Feasibility`).
    3. Once there are `SETTLED` rates, moves around the best join the candidates: knobs that the pool leaves where they stand.
    4. Choose (`choose`).

    The seed decides nothing but what is tried when all of the pool was: there is nothing to draw.
    """

    seeded = False

    def __init__(self, score: Score, forecaster: Forecaster, value: Value = rate) -> None:
        """`score`: None for a trial that may not win; `value`: what is made the most of, which the forecaster predicts."""
        self._score, self._value = score, value
        self._random = RandomStrategy()
        self._forecaster = forecaster
        self._pools: dict[str, Pool] = {}

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        if candidates.hash not in self._pools:
            self._pools[candidates.hash] = self._forecaster.pool(candidates)
        pool = self._pools[candidates.hash]
        spoken = speaking(history)
        told = self._told(spoken)
        known = known_hashes(history, pending)
        around = [config for config in self._around(spoken) if config.hash not in known]
        around = [config for config, place in zip(around, pool.places(around), strict=True) if place < 0]
        open_ = np.ones(len(pool.described) + len(around), dtype=bool)
        tried = pool.places([*(trial.config for trial in history), *pending])
        open_[tried[tried >= 0]] = False
        chosen = choose(
            pool.described, told, open_, count,
            running=self._forecaster.describe(pending) if pending else None,
            besides=self._forecaster.describe(around) if around else None,
        )  # fmt: skip
        first = len(pool.described)
        configs = [pool.config(place) if place < first else around[place - first] for place in chosen]
        # What a pool leaves out of a large space is tried when nothing else is left.
        left = count - len(configs)
        return configs + (self._random.propose(candidates, history, [*pending, *configs], left, seed) if left else [])

    def _told(self, spoken: Sequence[TrialRecord]) -> Told:
        described = self._forecaster.describe([trial.config for trial in spoken])
        return told_by(spoken, described, self._value, self._score)

    def _around(self, spoken: Sequence[TrialRecord]) -> Sequence[TrialConfig]:
        """Moves that no equation tells apart, around the best, once enough is measured to know about where it is."""
        scores = {trial.number: score for trial in spoken if (score := self._score(trial)) is not None}
        if len(scores) < SETTLED:
            return ()
        best = max(spoken, key=lambda trial: scores.get(trial.number, -np.inf))
        return self._forecaster.around(best.config, float(np.log(rate(best))))
