"""A strategy that tries the predicted best configurations first, whatever their results, then follows another strategy."""

from collections.abc import Sequence

import numpy as np

from autotune.strategies.guided.described import CandidatePools, Forecaster, Guide
from autotune.strategies.guided.feasibility import Feasibility
from autotune.strategies.guided.observations import no_observations
from autotune.strategies.guided.surrogate import prior
from autotune.strategies.optuna_samplers import TpeStrategy
from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

FIRST = 5
"""Number of trials that are chosen only by prediction."""


class PredictedFirst(Strategy):
    """Enqueues a planner's answers before another optimizer starts, as a user who has a planner would."""

    def __init__(self, forecaster: Forecaster, next_strategy: Strategy) -> None:
        self._pools, self._next_strategy = CandidatePools(forecaster), next_strategy

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


def make_tpe_predicted(score: Score, guide: Guide) -> PredictedFirst:
    """Create the strategy; called by the registry."""
    return PredictedFirst(guide.forecaster, TpeStrategy(score))
