"""Configurations in an order that depends only on the space and the seed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from autotune.strategies.walk import Walk
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import TrialRecord

LARGEST_PERMUTED = 20_000
"""Largest space that is permuted as a whole; in a larger one configurations are drawn."""
DRAWS_WITHOUT_NEWS = 1_000
"""Consecutive draws without a new configuration after which a large space counts as exhausted."""


class RandomStrategy(Strategy):
    """Walks a fixed sequence and skips known configurations.

    The sequence depends only on the space and the seed, not on results or timing: a job that is killed and resumed tries the
    same set as an uninterrupted one.
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
    """Every configuration of a small space once; for a large one, draws until no new ones come."""
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
