"""Configurations in the order of the space, independent of the seed."""

from collections.abc import Sequence

from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from autotune.strategies.walk import Walk
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


class GridStrategy(Strategy):
    """Takes the first unknown configurations; generates a huge space only as far as it is read."""

    seeded = False

    def __init__(self, score: Score | None = None) -> None:  # noqa: ARG002  nothing is learned
        self._walks: dict[str, Walk] = {}

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,  # noqa: ARG002  a grid has a fixed order
    ) -> list[TrialConfig]:
        walk = self._walks.setdefault(candidates.hash, Walk(candidates.enumerate))
        return walk.unknown(known_hashes(history, pending), count)
