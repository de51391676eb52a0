"""Configurations in the order of the space, whatever the seed."""

from collections.abc import Sequence
from itertools import islice

from autotune.strategies.strategy import Strategy, known_hashes
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


class GridStrategy(Strategy):
    """Takes the first configurations that are not known; of a huge space only as many are made as are looked at."""

    def propose(
        self,
        candidates: SearchSpace,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,  # noqa: ARG002  a grid has one order
    ) -> list[TrialConfig]:
        known = known_hashes(history, pending)
        return list(islice((config for config in candidates.enumerate() if config.hash not in known), count))
