"""TPE after the predicted best configurations, which are tried first whatever their results."""

from collections.abc import Sequence

import numpy as np

from autotune.strategies.guided.described import CandidatePools, Guide, no_observations
from autotune.strategies.guided.surrogate import Feasibility, prior
from autotune.strategies.optuna_samplers import TpeStrategy
from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

FIRST = 5
"""Number of trials that are chosen only by prediction."""


class PredictedFirst(Strategy):
    """Enqueues a planner's answers before TPE starts, as a user who has a planner would."""

    def __init__(self, score: Score, guide: Guide) -> None:
        self._pools, self._next_strategy = CandidatePools(guide.forecaster), TpeStrategy(score)

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        hashes = known_hashes(history, pending)
        planned = [config for config in self._planned(candidates) if config.hash not in hashes][:count]
        remaining = count - len(planned)
        return planned + (
            self._next_strategy.propose(candidates, history, [*pending, *planned], remaining, seed) if remaining else []
        )

    def _planned(self, candidates: Candidates) -> list[TrialConfig]:
        pool = self._pools.of(candidates)
        described = pool.described
        fits = Feasibility(no_observations(described.take(np.empty(0, dtype=np.int64)))).quick_probability(described)
        order = np.argsort(-(prior(described) + np.log(np.maximum(fits, 1e-12))), kind="stable")
        return [pool.config(int(position)) for position in order[:FIRST]]
