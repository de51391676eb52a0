"""Predicts the same of every configuration: what guided search does when it knows nothing."""

from collections.abc import Sequence

import numpy as np

from autotune.strategies.guided.described import Described, Index
from autotune.strategies.strategy import Candidates
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


class FlatPool:
    """All candidates."""

    def __init__(self, configs: Sequence[TrialConfig]) -> None:
        self._configs = list(configs)
        self.described = describe(self._configs)

    def config(self, place: int) -> TrialConfig:
        return self._configs[place]

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        return np.array([self._configs.index(each) if each in self._configs else -1 for each in configs], dtype=np.int64)


class FlatForecaster:
    """Tells configurations apart by sizes and degrees alone."""

    def pool(self, candidates: Candidates) -> FlatPool:
        return FlatPool(list(candidates.enumerate()))

    def after(self, history: Sequence[TrialRecord]) -> "FlatForecaster":
        return self

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:
        return ()

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        return describe(configs)


def describe(configs: Sequence[TrialConfig]) -> Described:
    """Equal rates and bytes, far below what there is."""
    count, ones = len(configs), np.ones(len(configs))
    sizes = [
        (each.micro_batch_size, each.tensor_parallel_size, each.pipeline_parallel_size, 1 + each.zero_stage) for each in configs
    ]
    return Described(
        log_rate=0 * ones, learned=0 * ones, penalty=0 * ones,
        features=np.log2(np.array(sizes, dtype=np.float64).reshape(count, 4)), needed=ones,
        outside=0 * ones, tags=np.ones((count, 1)), room=100 * ones, memory_spread=0.1 * ones,
        kind=np.zeros(count, dtype=np.int64), cost=ones, mesh=np.zeros(count, dtype=np.int64),
    )  # fmt: skip
