"""Strategies that learn nothing: the order of the space, and an order that only the seed decides."""

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import islice
from random import Random

from autotune.strategies.strategy import Candidates, Score, Strategy, known_hashes
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import TrialRecord


class Walk:
    """Generates the sequence lazily, once, and keeps the hashes of the configurations passed.

    The result depends only on the sequence and the argument: skipping 100,000 known configurations takes milliseconds;
    returning to a passed one regenerates the sequence up to it.
    """

    def __init__(self, make: Callable[[], Iterator[TrialConfig]]) -> None:
        """`make` starts the sequence, which may contain duplicates."""
        self._make = make
        self._rest = make()
        self._passed: list[str] = []

    def unknown(self, hashes: Set[str], count: int) -> list[TrialConfig]:
        """The first `count` distinct configurations of the sequence that are not in `hashes`."""
        indices: dict[str, int] = {}
        for index, name in enumerate(self._passed):
            if name not in hashes and name not in indices:
                indices[name] = index
                if len(indices) == count:
                    break
        chosen = [next(islice(self._make(), index, None)) for index in indices.values()]
        while len(chosen) < count and (config := next(self._rest, None)) is not None:
            name = config.hash
            self._passed.append(name)
            if name not in hashes and name not in indices:
                indices[name] = len(self._passed) - 1
                chosen.append(config)
        return chosen


class GridStrategy(Strategy):
    """Takes the first unknown configurations; generates a huge space only as far as it is read."""

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


class RandomStrategy(Strategy):
    """Walks a fixed sequence and skips known configurations.

    The sequence depends only on the space and the seed, not on results or timing: a job that is killed and resumed tries the
    same set as an uninterrupted one.
    """

    def __init__(self, score: Score | None = None) -> None:  # noqa: ARG002  nothing is learned
        self._walks: dict[tuple[str, int], Walk] = {}

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        key = (candidates.hash, seed)
        if key not in self._walks:
            self._walks[key] = Walk(_sequence(candidates, seed))
        return self._walks[key].unknown(known_hashes(history, pending), count)


def _sequence(candidates: Candidates, seed: int) -> Callable[[], Iterator[TrialConfig]]:
    """Every configuration of a small space once; for a large one, draws until no new ones come."""
    if candidates.count() > 20_000:
        return partial(_draws, candidates, seed)
    order = sorted(candidates.enumerate(), key=lambda config: stable_hash([seed, config.hash]))
    return lambda: iter(order)


def _draws(candidates: Candidates, seed: int) -> Iterator[TrialConfig]:
    drawn: set[str] = set()
    index = stale = 0
    while stale < 1_000:  # consecutive ones without a new configuration: the space counts as exhausted
        config = candidates.sample(Random(f"{seed}:{index}"))
        index += 1
        stale = stale + 1 if config.hash in drawn else 0
        drawn.add(config.hash)
        yield config
