"""A strategy: the configurations of the space from the last to the first."""

from collections.abc import Sequence

from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


class LastFirstStrategy(Strategy):
    """Takes the last configuration that is not known."""

    def __init__(self, score: Score) -> None:
        self.score = score

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        known = known_hashes(history, pending)
        return [config for config in reversed(list(candidates.enumerate())) if config.hash not in known][:count]
