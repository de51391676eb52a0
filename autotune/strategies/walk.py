"""A fixed sequence of configurations, walked repeatedly, skipping known ones."""

from collections.abc import Callable, Iterator, Set
from itertools import islice

from search_spaces.trial_config import TrialConfig


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

    def unknown(self, known: Set[str], count: int) -> list[TrialConfig]:
        """The first `count` distinct configurations of the sequence that are not in `known`."""
        places: dict[str, int] = {}
        for place, name in enumerate(self._passed):
            if name not in known and name not in places:
                places[name] = place
                if len(places) == count:
                    break
        chosen = [next(islice(self._make(), place, None)) for place in places.values()]
        while len(chosen) < count and (config := next(self._rest, None)) is not None:
            name = config.hash
            self._passed.append(name)
            if name not in known and name not in places:
                places[name] = len(self._passed) - 1
                chosen.append(config)
        return chosen
