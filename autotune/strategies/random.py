"""Configurations in an order that only the seed decides."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from autotune.strategies.walk import Walk
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

    def __init__(self, score: Score | None = None) -> None:  # noqa: ARG002  nothing is learned
        self._walks: dict[tuple[str, int], Walk] = {}

    def propose(
        self,
        candidates: Candidates,
        history: Sequence[TrialRecord],
        pending: Sequence[TrialConfig],
        count: int,
        seed: int,
    ) -> list[TrialConfig]:
        key = (candidates.hash, seed)
        if key not in self._walks:
            self._walks[key] = Walk(_sequence(candidates, seed))
        return self._walks[key].unknown(known_hashes(history, pending), count)


def _sequence(candidates: Candidates, seed: int) -> Callable[[], Iterator[TrialConfig]]:
    """Every configuration of a small space once; of a large one, draws until nothing new comes."""
    if candidates.count() > LARGEST_PERMUTED:
        return partial(_draws, candidates, seed)
    order = sorted(candidates.enumerate(), key=lambda config: stable_hash([seed, config.hash]))
    return lambda: iter(order)


def _draws(candidates: Candidates, seed: int) -> Iterator[TrialConfig]:
    seen: set[str] = set()
    index = stale = 0
    while stale < DRAWS_WITHOUT_NEWS:
        config = candidates.sample(Random(f"{seed}:{index}"))
        index += 1
        stale = stale + 1 if config.hash in seen else 0
        seen.add(config.hash)
        yield config
