"""Configurations in an order that only the seed decides."""

from collections.abc import Iterator, Sequence
from random import Random

from autotune.strategies.strategy import Strategy, known_hashes
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import TrialRecord

LARGEST_PERMUTED = 20_000
"""Configurations up to which the whole space is put in order; of a larger one points are drawn."""
DRAWS_WITHOUT_NEWS = 1_000
"""Draws in a row that give nothing new, after which a large space counts as used up."""


class RandomStrategy(Strategy):
    """Walks one fixed sequence and skips what is known.

    The sequence depends on the space and the seed alone, never on results or on timing: a job that is killed and resumed
    tries the same set as one that is not.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], list[TrialConfig]] = {}

    def propose(
        self,
        candidates: SearchSpace,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        known = known_hashes(history, pending)
        chosen: list[TrialConfig] = []
        for config in self.sequence(candidates, seed):
            if len(chosen) == count:
                break
            if config.hash not in known:
                known.add(config.hash)
                chosen.append(config)
        return chosen

    def sequence(self, candidates: SearchSpace, seed: int) -> Iterator[TrialConfig]:
        """Every configuration of a small space once; of a large one, draws until nothing new comes."""
        if candidates.count() <= LARGEST_PERMUTED:
            return iter(self._order(candidates, seed))
        return _draws(candidates, seed)

    def _order(self, candidates: SearchSpace, seed: int) -> list[TrialConfig]:
        key = (candidates.hash, seed)
        if key not in self._orders:
            self._orders[key] = sorted(candidates.enumerate(), key=lambda config: stable_hash([seed, config.hash]))
        return self._orders[key]


def _draws(candidates: SearchSpace, seed: int) -> Iterator[TrialConfig]:
    seen: set[str] = set()
    index = stale = 0
    while stale < DRAWS_WITHOUT_NEWS:
        config = candidates.sample(Random(f"{seed}:{index}"))
        index += 1
        stale = stale + 1 if config.hash in seen else 0
        seen.add(config.hash)
        yield config
